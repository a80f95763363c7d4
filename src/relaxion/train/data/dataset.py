"""Data sets: reading files, and splitting by what a structure is rather than by its place in the file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import ase.io
from ase import Atoms
from ase.formula import Formula
from ase.io.formats import filetype, open_with_compression

from relaxion.errors import FileError, InputError, SettingsError
from relaxion.paths import check_file
from relaxion.settings import nearest

MOST_ENDS = 1000  # empty lines behind the end of a file before that is an error
LONGEST_REASON = 300  # characters of what ASE says
LARGEST_CLAIM = 1_000_000  # atoms or columns of a file with fewer characters than this
LONGEST_HEAD = 100_000  # characters of a line that is looked at
LINES_OF_HEAD = {"vasp": 7, "extxyz": 2}


def read(path: str | Path, index: str | int = ":") -> list[Atoms]:
    """Structures from any file ASE reads, compressed or not."""
    path = Path(path)
    check_file(path)
    try:
        with opened_for_ase(path) as (source, form):
            found = ase.io.read(source, index=index, format=form, do_not_split_by_at_sign=True)
            images = [found] if isinstance(found, Atoms) else list(found)
    except Exception as error:  # ASE's readers have no common error: damaged files bring any kind
        reason = reading_error(error)
        raise FileError(f"{path} cannot be read: {reason}; is it complete, and in a format that ASE reads?") from error
    if not any(len(atoms) for atoms in images):
        raise FileError(f"{path} holds no structure with atoms at index '{index}'")
    return images


@contextmanager
def opened_for_ase(path: Path) -> Iterator[tuple[Any, str | None]]:
    """What ASE's readers are given, and the format where it is not theirs to find out.

    The whole path: ASE takes a name that begins with mysql or postgres for a database on the network. Extended XYZ as
    an open file: of a frame that claims a trillion atoms its reader would look for every single one.
    """
    name = str(path.absolute())
    kind = None if path.is_dir() else filetype(name)
    if kind in ("vasp", "extxyz"):
        _check_claims(name, kind)
    if kind != "extxyz":
        yield name, None
        return
    with open_with_compression(name, "r") as file:
        yield _Ending(file), "extxyz"


def _check_claims(name: str, kind: str) -> None:
    """EOFError where a short file claims a million atoms or columns: readers would make room for them first."""
    with open_with_compression(name, "r") as file:
        head = [file.readline(LONGEST_HEAD) for _ in range(LINES_OF_HEAD[kind])]
        text = file.read(LARGEST_CLAIM)
    if len(text) == LARGEST_CLAIM:
        return
    claims = head[5:7] if kind == "vasp" else head[1:2]
    pattern = r"(?:^|\s)(\d+)(?=\s|$)" if kind == "vasp" else r":[RISL]:(\d+)"
    claimed = max((int(number) for line in claims for number in re.findall(pattern, line)), default=0)
    if claimed > LARGEST_CLAIM:
        raise EOFError(f"it claims {claimed} atoms or columns, and ends long before")


class _Ending:
    """A file that says so when it is read on and on beyond its end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._ended = 0

    def readline(self) -> str:
        line = self._file.readline()
        self._ended = 0 if line else self._ended + 1
        if self._ended > MOST_ENDS:
            raise EOFError("it ends in the middle of a structure")
        return line

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        if not (line := self.readline()):
            raise StopIteration
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def reading_error(error: Exception) -> str:
    """What a reader of ASE's said, on one line that can be read."""
    if isinstance(error, MemoryError):
        return "it needs far more memory than a file of its size should"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        return f"'{error.args[0][:80]}' is not an element or keyword of its format"
    if "BundleTrajectory" in str(error):
        return "it is a folder, not an ASE trajectory"
    said = " ".join(str(error).split())
    kind = type(error).__name__
    words = f"{kind}: {said}" if said else f"its content does not match its format ({kind})"
    return words if len(words) <= LONGEST_REASON else f"{words[: LONGEST_REASON - 1]}…"


def composition(atoms: Atoms) -> str:
    """The reduced formula: Al4Fe2 and Al2Fe are the same."""
    return atoms.symbols.formula.reduce()[0].format("hill")


def chemical_system(atoms: Atoms) -> str:
    """The elements, sorted: Al-Fe."""
    return "-".join(sorted(set(atoms.get_chemical_symbols())))


KEYS: dict[str, Callable[[Atoms], str]] = {"composition": composition, "system": chemical_system}


@dataclass(frozen=True)
class Dataset:
    """Structures, each with the key that decides on which side of a split it stands."""

    images: tuple[Atoms, ...]
    keys: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def of(cls, images: Iterable[Atoms], key: str = "composition") -> Dataset:
        """`key`: composition, system, or an entry of `atoms.info` (a prototype, say)."""
        images = tuple(images)
        return cls(images, tuple(_key_of(atoms, key, number) for number, atoms in enumerate(images)))

    def split(self, *fractions: float, seed: int = 0) -> tuple[Dataset, ...]:
        """Parts that share no key: `split(0.8)` gives two, `split(0.8, 0.1)` three; the last takes the rest.

        A key goes by its hash, so it stands on the same side whatever else is in the file, in any order.
        The price: fractions hold for the number of *keys* on average, not exactly.
        """
        if not fractions or min(fractions) <= 0 or sum(fractions) > 1 + 1e-12:
            raise InputError(f"fractions must be above 0 and sum to at most 1, got {fractions}")
        edges = [sum(fractions[: number + 1]) for number in range(len(fractions))]
        sides = [sum(_uniform(key, seed) >= edge for edge in edges) for key in self.keys]
        return tuple(self._where([side == part for side in sides]) for part in range(len(edges) + 1))

    def hold_out(self, elements: Iterable[str]) -> tuple[Dataset, Dataset]:
        """Structures without any of the elements, and those with one: chemistry never trained on."""
        elements = set(elements)
        held = [bool(elements & set(atoms.get_chemical_symbols())) for atoms in self.images]
        return self._where([not side for side in held]), self._where(held)

    def _where(self, chosen: Sequence[bool]) -> Dataset:
        kept = [number for number, keep in enumerate(chosen) if keep]
        return Dataset(tuple(self.images[n] for n in kept), tuple(self.keys[n] for n in kept))


def _key_of(atoms: Atoms, key: str, number: int) -> str:
    if key in KEYS:
        return KEYS[key](atoms)
    if key not in atoms.info:
        raise InputError(f"structure {number} has no key '{key}': {nearest(key, [*KEYS, *atoms.info])}")
    return str(atoms.info[key])


def _uniform(key: str, seed: int) -> float:
    # not hash(): Python salts that anew in every process
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# ---- What the universal policy never sees in training, so that it can be assessed on it: one rule, written down here.
#
# Held out are
#
# - six whole elements, one from each corner of the periodic table;
# - one prototype in seven, by the hash of its label (files of structures: label and place in the file);
# - one composition in ten, by the hash of its reduced formula, and always the four of the published MACS recipe;
#   pure elements have no composition in this sense: elements and prototypes tell them apart;
# - one molecule in five, by the hash of its name; a molecule joined from others also where one of its parts is.
#
# Hashes are SHA-256 of `kind:name`, so the rule is the same on every machine, in any order, for whatever is added.

Side = Literal["training", "assessment"]
Reason = Literal["element", "prototype", "composition", "molecule"]
SIDES: tuple[Side, ...] = ("training", "assessment")

ELEMENTS = frozenset({"Sc", "Ga", "Se", "Rb", "Ir", "Te"})
"""A light and a heavy transition metal, a poor metal, an alkali metal, two chalcogens."""
MACS_COMPOSITIONS = frozenset(Formula(f).reduce()[0].format("hill") for f in ("SrTiO3", "Y2O3", "Ca3Ti2O7", "Sr2TiO4"))
FIRST_MEASURING_SEED = 9000  # from here on seeds are for measuring: nothing is trained or chosen on them
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
