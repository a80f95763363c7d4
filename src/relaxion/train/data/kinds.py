"""Kinds of starts that a recipe relaxes: how many of each, by which potential and how far.

Seed, kind and number decide about a start, so any of them can be made again by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from ase import Atoms
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list
from pydantic import Field, model_validator

from relaxion.errors import SettingsError, StructureError
from relaxion.settings import Settings, nearest
from relaxion.structures import Structures
from relaxion.train.data import dataset
from relaxion.train.data.alloys import EMT_METALS, packed
from relaxion.train.data.dataset import FIRST_MEASURING_SEED, LABEL, Side, belongs, reasons_of
from relaxion.train.data.perturbations import random_displacements, random_strain, strained
from relaxion.train.data.prototypes import CRYSTAL, random_crystal, random_element, random_perovskite
from relaxion.train.data.slabs import random_molecule, random_surface
from relaxion.train.data.starts import MetalStarts

MAKERS = ("prototype", "element", "perovskite", "packing", "surface", "molecule", "metal", "file")


REVISIONS = {"element": " 2"}
"""Raised when a maker makes other structures than it used to: a key then still means one start."""


class KindSettings(Settings):
    """One kind of starts."""

    make: str
    """Who makes the structures: prototype, element, perovskite, packing, surface, molecule, metal or file."""

    engine: str
    """The potential that relaxes them: chgnet, gfn2, emt, ..."""

    share: float = Field(default=1.0, ge=0)
    """Weight of this kind among the others where examples are made of it (`relaxion train universal`)."""

    smallest_n_atoms: int = Field(default=2, ge=1)
    """Atoms of the smallest structure."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest one."""

    smallest_rattle_angstrom: float = Field(default=0.03, ge=0)
    """Narrowest Gaussian by which each coordinate is displaced."""

    largest_rattle_angstrom: float = Field(default=0.25, ge=0)
    """Widest one."""

    free_cell_share: float = Field(default=0.0, ge=0, le=1)
    """Of the structures periodic along three axes, those that are strained and relax with their cell."""

    largest_strain: float = Field(default=0.04, ge=0, lt=0.3)
    """Of the strained ones, largest element of the symmetric strain."""

    largest_volume_change: float = Field(default=0.0, ge=0, lt=0.7)
    """Of the strained ones too: the natural logarithm of the volume is wrong by up to this much, either way."""

    tolerance_ev_per_angstrom: float = Field(default=2e-3, gt=0)
    """A relaxation is finished here. Well below what users ask for: its end is the label of all states before it."""

    max_force_calls: int = Field(default=40, ge=2)
    """Then it is stored as it is."""

    largest_force_ev_per_angstrom: float = Field(default=50.0, gt=0)
    """Starts with a larger force are skipped: no potential is reliable there."""

    sizing_force_calls: int = Field(default=0, ge=0)
    """Force calls spent on the perfect crystal before it is displaced (or cut, or packed), its volume following the
    pressure: radii alone guess volumes to 15 %. Molecules have none, files are at their volume already."""

    element: str | None = None
    """With make = "element": only this one."""

    files: tuple[str, ...] = ()
    """With make = "file": structure files; those that are not there are left out."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.make not in MAKERS:
            raise ValueError(f"unknown maker '{self.make}': {nearest(self.make, MAKERS)}")
        if self.smallest_n_atoms > self.largest_n_atoms:
            raise ValueError(
                f"smallest_n_atoms {self.smallest_n_atoms} is above largest_n_atoms {self.largest_n_atoms}"
            )
        if self.smallest_rattle_angstrom > self.largest_rattle_angstrom:
            raise ValueError("smallest_rattle_angstrom is above largest_rattle_angstrom")
        if (self.make == "file") != bool(self.files):
            raise ValueError("files go with make = 'file', and only with it")
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        return self.smallest_n_atoms, self.largest_n_atoms

    @property
    def origin(self) -> str:
        """What decides about a start and its relaxation, as text: everything but its weight."""
        plain = self.model_dump(exclude={"share"})
        if self.largest_volume_change == 0:  # as before there was this setting: collections of then go on
            del plain["largest_volume_change"]
        return json.dumps(plain, sort_keys=True) + REVISIONS.get(self.make, "")


class CollectSettings(Settings):
    """The whole of it."""

    seed: int = Field(default=6, ge=0, lt=FIRST_MEASURING_SEED)
    """Start, kind and number decide about a start; seeds from 9000 on are for benchmarks."""

    side: Side = "training"
    """Which side of what is held out (docs/policies.md)."""

    kinds: dict[str, KindSettings] = Field(min_length=1)
    """By name; the name is stored with each trajectory."""

    @classmethod
    def of(cls, table: Mapping[str, Any], given: Mapping[str, Any]) -> CollectSettings:
        """A recipe with overrides; `kind.share=2` reaches into one kind, `share=2` into all of them."""
        table = dict(table)
        given = dict(given)
        kinds = table.get("kinds")
        if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
            raise SettingsError("a recipe to collect has a section for each kind of starts, like [kinds.prototype]")
        kinds = {name: dict(kind) for name, kind in kinds.items()}
        for word in [word for word in given if word not in cls.model_fields]:
            _assign(kinds, word, given.pop(word))
        read = {name: KindSettings.read(kind) for name, kind in kinds.items()}
        return cls.read({**table, **given, "kinds": read})

    def key(self, kind: str, number: int) -> str:
        """Of one start: the same recipe, kind and number give the same one, on any machine."""
        text = f"{self.seed} {self.side} {kind} {number} {self.kinds[kind].origin}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _assign(kinds: dict[str, dict[str, Any]], word: str, value: Any) -> None:
    name, dot, field = word.partition(".")
    if dot:
        if name not in kinds:
            raise SettingsError(f"no kind '{name}' in this recipe: {nearest(name, kinds)}")
        kinds[name][field] = value
        return
    if word not in KindSettings.model_fields:
        known = [*CollectSettings.model_fields, *KindSettings.model_fields]
        raise SettingsError(f"unknown setting '{word}': {nearest(word, known)}")
    for kind in kinds.values():
        kind[word] = value


# ---- Starts of a collection: seed, kind and number decide about each, so any of them can be made again by itself.

NEAREST_SHARE = 0.6  # of the sum of covalent radii: displaced atoms do not come nearer
PACKED_ANGSTROM = 1.0  # nor do those of a random packing
TRIES = 30


@dataclass(frozen=True, eq=False)
class Start:
    """One relaxation to be done, and everything about it that is random."""

    key: str
    kind: str
    number: int
    atoms: Atoms  # where they are before anything is displaced
    crystal: Atoms | None  # whose volume decides about that of the atoms
    strain: np.ndarray | None  # (3, 3) symmetric; None: the cell stays
    displacements: np.ndarray  # (n_atoms, 3) Å
    growth: float = 1.0  # of all lengths, beyond the volume of the crystal

    def structure(self, scale: float = 1.0) -> Structures:
        """Grown by `scale` along all axes, then strained and displaced; less where atoms would come too near."""
        atoms = self.atoms.copy()
        atoms.set_constraint()
        atoms.set_cell(atoms.cell.array * scale * self.growth, scale_atoms=True)
        if self.strain is not None:
            strained(atoms, self.strain)
        places = atoms.positions.copy()
        radii = NEAREST_SHARE * covalent_radii[atoms.numbers]
        for attempt in range(TRIES):
            atoms.positions = places + 0.9**attempt * self.displacements
            if not self.displacements.any() or len(neighbor_list("i", atoms, radii)) == 0:
                break
        atoms.set_constraint(self.atoms.constraints)
        return Structures.from_ase(atoms, cell_free=self.strain is not None)


def make_start(settings: CollectSettings, kind: str, number: int) -> Start:
    """The start of this kind and number."""
    own = settings.kinds[kind]
    mixed = hashlib.sha256(f"{settings.seed} {kind} {number}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(mixed[:8], "little"))
    atoms = _MAKERS[own.make](own, settings.side, random)
    free = bool(atoms.pbc.all()) and random.random() < own.free_cell_share
    strain = random_strain(random, own.largest_strain) if free else None
    width = random.uniform(own.smallest_rattle_angstrom, own.largest_rattle_angstrom)
    displacements = random_displacements(atoms, random, width)
    crystal = atoms.info.get(CRYSTAL) if own.sizing_force_calls else None
    change = random.uniform(-own.largest_volume_change, own.largest_volume_change) if free else 0.0
    growth = float(np.exp(change / 3))
    return Start(settings.key(kind, number), kind, number, atoms, crystal, strain, displacements, growth)


def _packing(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:
    """The composition and the volume of a crystal, its atoms anywhere but too near."""
    for _ in range(TRIES):
        crystal = random_crystal(random, side=side, sizes=(2, own.largest_n_atoms))
        most = own.largest_n_atoms // len(crystal)
        least = -(-own.smallest_n_atoms // len(crystal))
        if least > most:
            continue
        formula = "".join(crystal.get_chemical_symbols() * int(random.integers(least, most + 1)))
        volume = crystal.get_volume() / len(crystal)
        try:
            atoms = packed(random, formula, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=PACKED_ANGSTROM)
        except StructureError:  # too dense for this distance
            continue
        atoms.info = crystal.info
        return atoms
    raise StructureError(
        f"no packing of {own.smallest_n_atoms} to {own.largest_n_atoms} atoms was found; allow more sizes"
    )


def _metal(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:  # noqa: ARG001 (no EMT metal is held out)
    """An alloy of the metals that EMT knows: for trials without an expensive potential."""
    starts = MetalStarts(elements=EMT_METALS, sizes=own.sizes, rattle_angstrom=(0.0, 1e-9), free_share=0.0)
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))
    return starts.sample(generator, 1).to_ase()[0]


def _file(own: KindSettings, side: Side, random: np.random.Generator) -> Atoms:
    usable = file_structures(own, side)
    return usable[int(random.integers(len(usable)))].copy()


def file_structures(own: KindSettings, side: Side) -> list[Atoms]:
    """Structures of the files that are there, those of this side and of the sizes asked for."""
    images = [atoms for name in own.files if Path(name).is_file() for atoms in _read(name)]
    fitting = [atoms for atoms in images if own.smallest_n_atoms <= len(atoms) <= own.largest_n_atoms]
    return [atoms for atoms in fitting if belongs(reasons_of(atoms), side)]


@lru_cache(maxsize=8)
def _read(name: str) -> tuple[Atoms, ...]:
    """Of pure elements each structure is a prototype of its own; all others go by their composition."""
    found = []
    for place, atoms in enumerate(dataset.read(name)):
        bare = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        if len(set(atoms.numbers.tolist())) == 1:
            bare.info[LABEL] = f"{Path(name).name.partition('.')[0]}/{place}"
        found.append(bare)
    return tuple(found)


_MAKERS: dict[str, Callable[[KindSettings, Side, np.random.Generator], Atoms]] = {
    "prototype": lambda own, side, random: random_crystal(random, side=side, sizes=own.sizes),
    "element": lambda own, side, random: random_element(random, side=side, sizes=own.sizes, element=own.element),
    "perovskite": lambda _own, side, random: random_perovskite(random, side=side),
    "packing": _packing,
    "surface": lambda own, side, random: random_surface(random, side=side, sizes=own.sizes),
    "molecule": lambda own, side, random: random_molecule(random, side=side, sizes=own.sizes),
    "metal": _metal,
    "file": _file,
}
