"""Data sets: reading files, and splitting by what a structure is rather than by its place in the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ase.io
from ase import Atoms

from relaxion.errors import FileError, InputError
from relaxion.settings import nearest
from relaxion.structures.structures import Structures

Key = str | Callable[[Atoms], str]


def read(path: str | Path, index: str | int = ":") -> list[Atoms]:
    """Structures from any file ASE reads, compressed or not."""
    path = Path(path)
    check_file(path)
    try:
        found = ase.io.read(path, index=index)
        images = [found] if isinstance(found, Atoms) else list(found)
    except Exception as error:  # ASE's readers have no common error: damaged files bring any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FileError(
            f"{path} cannot be read: {reason}; is it whole, and of a kind ASE reads? ('ase info --formats' lists them)"
        ) from error
    if not any(len(atoms) for atoms in images):
        raise FileError(f"{path} holds no structure with atoms at index '{index}'")
    return images


def check_file(path: Path) -> None:
    """Refuse, with a sentence, a file that is not there or empty."""
    try:
        if not path.exists():
            raise FileError(f"{path} does not exist; check the name (the working directory is {Path.cwd()})")
        if path.is_file() and path.stat().st_size == 0:
            raise FileError(f"{path} is empty (0 bytes)")
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


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

    def __post_init__(self) -> None:
        if len(self.images) != len(self.keys):
            raise InputError(f"{len(self.keys)} keys for {len(self.images)} structures; give one for each")

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def of(cls, images: Iterable[Atoms], key: Key = "composition") -> Dataset:
        """`key`: composition, system, an entry of `atoms.info` (a prototype, say), or a function."""
        images = tuple(images)
        return cls(images, tuple(_key_of(atoms, key, number) for number, atoms in enumerate(images)))

    @classmethod
    def read(cls, paths: str | Path | Sequence[str | Path], key: Key = "composition") -> Dataset:
        """All structures of one file or several."""
        paths = [paths] if isinstance(paths, str | Path) else paths
        return cls.of([atoms for path in paths for atoms in read(path)], key)

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

    def structures(self, *, cell_free: bool = False) -> Structures:
        """All of them in one batch."""
        return Structures.from_ase(self.images, cell_free=cell_free)

    def _where(self, chosen: Sequence[bool]) -> Dataset:
        kept = [number for number, keep in enumerate(chosen) if keep]
        return Dataset(tuple(self.images[n] for n in kept), tuple(self.keys[n] for n in kept))


def _key_of(atoms: Atoms, key: Key, number: int) -> str:
    if callable(key):
        return key(atoms)
    if key in KEYS:
        return KEYS[key](atoms)
    if key not in atoms.info:
        raise InputError(f"structure {number} has no key '{key}': {nearest(key, [*KEYS, *atoms.info])}")
    return str(atoms.info[key])


def _uniform(key: str, seed: int) -> float:
    # not hash(): Python salts that anew in every process
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
