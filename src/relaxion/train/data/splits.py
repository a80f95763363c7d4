"""What the universal policy never sees in training, so that it can be assessed on it: one rule, written down here.

Held out are

- six whole elements, one from each corner of the periodic table;
- one prototype in seven, by the hash of its label (files of structures: label and place in the file);
- one composition in ten, by the hash of its reduced formula, and always the four of the published MACS recipe;
  pure elements have no composition in this sense: elements and prototypes tell them apart;
- one molecule in five, by the hash of its name; a molecule joined from others also where one of its parts is.

Hashes are SHA-256 of `kind:name`, so the rule is the same on every machine, in any order, for whatever is added later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Literal

from ase import Atoms
from ase.formula import Formula

from relaxion.errors import SettingsError
from relaxion.settings import nearest
from relaxion.train.data.dataset import composition

Side = Literal["training", "assessment"]
Reason = Literal["element", "prototype", "composition", "molecule"]
SIDES: tuple[Side, ...] = ("training", "assessment")

ELEMENTS = frozenset({"Sc", "Ga", "Se", "Rb", "Ir", "Te"})
"""A light and a heavy transition metal, a poor metal, an alkali metal, two chalcogens."""
MACS_COMPOSITIONS = frozenset(Formula(f).reduce()[0].format("hill") for f in ("SrTiO3", "Y2O3", "Ca3Ti2O7", "Sr2TiO4"))
PROTOTYPES_IN = 7  # one of so many
COMPOSITIONS_IN = 10
MOLECULES_IN = 5
JOINT = "+"  # between the parts of a joined molecule's name
CAP = "/"  # before what took the place of a hydrogen atom

LABEL = "prototype"  # where makers write the prototype's label into `atoms.info`
NAME = "molecule"  # and the molecule's name


def reasons(
    *,
    elements: Iterable[str] = (),
    formula: str | None = None,
    prototype: str | None = None,
    molecule: str | None = None,
) -> frozenset[Reason]:
    """Why a structure of these is held out; empty: it may be trained on. `formula` is reduced here."""
    found: set[Reason] = set()
    if ELEMENTS & set(elements):
        found.add("element")
    if prototype is not None and _chosen("prototype", prototype, PROTOTYPES_IN):
        found.add("prototype")
    if formula is not None and _composition(formula):
        found.add("composition")
    if molecule is not None and any(_chosen("molecule", name, MOLECULES_IN) for name in _names(molecule)):
        found.add("molecule")
    return frozenset(found)


def reasons_of(atoms: Atoms) -> frozenset[Reason]:
    """The same for a structure whose maker left label or name in its `info`; molecules go by name, not by formula."""
    symbols = set(atoms.get_chemical_symbols())
    name = atoms.info.get(NAME)
    if name is not None:
        return reasons(elements=symbols, molecule=name)
    return reasons(elements=symbols, formula=composition(atoms), prototype=atoms.info.get(LABEL))


def belongs(found: Collection[Reason], side: Side) -> bool:
    """Whether a structure with these reasons is one of this side."""
    if side not in SIDES:
        raise SettingsError(f"unknown side '{side}': {nearest(str(side), SIDES)}")
    return bool(found) == (side == "assessment")


def _composition(formula: str) -> bool:
    reduced = Formula(formula).reduce()[0].format("hill")
    if len(Formula(reduced).count()) == 1:
        return False
    return reduced in MACS_COMPOSITIONS or _chosen("composition", reduced, COMPOSITIONS_IN)


def _names(molecule: str) -> list[str]:
    parts = molecule.partition(CAP)[0].split(JOINT)
    return [molecule] if [molecule] == parts else [*parts, molecule]


def _chosen(kind: str, name: str, one_in: int) -> bool:
    digest = hashlib.sha256(f"{kind}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0
