"""Metals to learn stiffness from: random alloys, also with vacancies, slabs, clusters and packings, all displaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from ase import Atom, Atoms
from ase.build import bulk, fcc100, fcc111
from ase.constraints import FixAtoms
from ase.data import atomic_numbers
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.generators.packings import pack
from relaxion.generators.starts import atomic_volume
from relaxion.settings import nearest
from relaxion.structures import Structures

EMT_METALS = ("Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt")
EAM_METALS = ("Cu", "Ag", "Au", "Ni", "Pd", "Pt", "Al", "Pb", "Fe", "Mo", "Ta", "W", "Mg", "Co", "Ti", "Zr")
ADSORBATES = ("H", "C", "N", "O")  # that EMT knows
PURE_SLABS = 0.4  # of them; surfaces that people look at are mostly of one metal
MOST_BUILT = 1000  # tries to make a structure of the sizes asked for


@dataclass(frozen=True)
class MetalStarts:
    """Random structures of random kinds; `shares` says how many of which kind."""

    elements: tuple[str, ...] = EMT_METALS
    sizes: tuple[int, int] = (2, 16)
    shares: Mapping[str, float] = field(default_factory=lambda: {"alloy": 1.0})
    rattle_angstrom: tuple[float, float] = (0.03, 0.3)
    free_share: float = 0.4
    """Of the crystals, those whose cells are strained and relax too."""
    largest_strain: float = 0.04
    adsorbates: tuple[str, ...] = ()
    """Elements of atoms that may sit on slabs beside the metals."""
    largest_slab: int | None = None
    """Atoms of the largest slab, atoms on top not counted; None: as of every other kind."""

    def __post_init__(self) -> None:
        for name in self.shares:
            if name not in KINDS:
                raise SettingsError(f"unknown kind of start '{name}': {nearest(name, KINDS)}")

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        """So many starts. The seed of NumPy's generator is drawn from the one given."""
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        names, weights = list(self.shares), np.array(list(self.shares.values()))
        chosen = random.choice(len(names), n_structures, p=weights / weights.sum())
        images = [self._displaced(KINDS[names[number]](self, random), random) for number in chosen]
        free = [bool(atoms.pbc.all()) and random.random() < self.free_share for atoms in images]
        for atoms, is_free in zip(images, free, strict=True):
            if is_free:
                strain = random.uniform(-self.largest_strain, self.largest_strain, (3, 3))
                atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        return Structures.from_ase(images, cell_free=free)

    def symbols(self, random: np.random.Generator, number: int) -> list[str]:
        """Of an alloy of one to four elements."""
        few = random.choice(self.elements, min(len(self.elements), int(random.integers(1, 5))), replace=False)
        return [str(symbol) for symbol in random.choice(few, number)]

    def _displaced(self, atoms: Atoms, random: np.random.Generator) -> Atoms:
        width = 0.0 if atoms.info.pop("far", False) else random.uniform(*self.rattle_angstrom)
        displacements = random.normal(0, width, (len(atoms), 3))
        fixed = atoms.constraints[0].index if atoms.constraints else []
        displacements[fixed] = 0
        atoms.positions += displacements - (0 if len(fixed) else displacements.mean(axis=0))
        return atoms


def _alloy(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """A close-packed or body-centred lattice with the mean of the elements' volumes."""
    for _ in range(MOST_BUILT):
        repeats, cubic = random.integers(1, 5, 3), bool(random.integers(2))
        lattice = "bcc" if _has_centred(starts) and random.random() < 0.4 else "fcc"
        atoms = bulk("Cu", lattice, a=1.0, cubic=cubic) * repeats
        if starts.sizes[0] <= len(atoms) <= starts.sizes[1]:
            break
    else:
        raise SettingsError(f"no crystal of {starts.sizes[0]} to {starts.sizes[1]} atoms was found; allow more sizes")
    atoms.set_chemical_symbols(starts.symbols(random, len(atoms)))
    scale = (_mean_volume(atoms) * len(atoms) / atoms.get_volume()) ** (1 / 3)
    atoms.set_cell(atoms.cell * scale, scale_atoms=True)
    return atoms


def _has_centred(starts: MetalStarts) -> bool:
    return any(symbol in starts.elements for symbol in ("Fe", "Mo", "Ta", "W"))


def _mean_volume(atoms: Atoms) -> float:
    return float(np.mean([atomic_volume(int(number)) for number in atoms.numbers]))  # Å³


def _vacancy(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    atoms = _alloy(starts, random)
    if len(atoms) >= 6:
        del atoms[int(random.integers(len(atoms)))]
    return atoms


def _slab(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """Two to four layers of a metal or an alloy, often with the lowest fixed, often with atoms on top."""
    build = fcc111 if random.random() < 0.6 else fcc100
    size = _slab_size(starts, random)
    symbols = starts.symbols(random, math.prod(size))
    if random.random() < PURE_SLABS:
        symbols = symbols[:1] * len(symbols)
    volume = np.mean([atomic_volume(atomic_numbers[symbol]) for symbol in symbols])
    atoms = build("Cu", size, a=float((4 * volume) ** (1 / 3)), vacuum=6.0)
    atoms.set_chemical_symbols(symbols)
    lowest = np.flatnonzero(atoms.get_tags() == size[2])
    if random.random() < (0.7 if starts.adsorbates else 0.4):
        atoms += _on_top(atoms, size, starts, random)
    atoms.pbc = [True, True, False]
    if random.random() < 0.6:
        atoms.set_constraint(FixAtoms(lowest))
    return atoms


def _slab_size(starts: MetalStarts, random: np.random.Generator) -> tuple[int, int, int]:
    """Atoms along both directions of the surface, and layers."""
    low, high = starts.sizes[0], starts.largest_slab or starts.sizes[1]
    for _ in range(MOST_BUILT):
        size = (int(random.integers(1, 4)), int(random.integers(2, 4)), int(random.integers(2, 5)))
        if low <= math.prod(size) <= high:
            return size
    raise SettingsError(f"no slab of {low} to {high} atoms was found: they have 4 to 36; allow others")


def _on_top(atoms: Atoms, size: tuple[int, int, int], starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """Atoms above places of the slab, no two above the same: metals, or nearer to it adsorbates."""
    top = atoms[atoms.get_tags() == 1]
    places = random.permutation(len(top))[: max(1, min(int(random.integers(1, 4)), len(top) // 2))]
    edges = atoms.cell.array[0] / size[0], atoms.cell.array[1] / size[1]
    found = []
    for place in places:
        along, across = random.choice((0.0, 1 / 3, 0.5, 2 / 3), 2) if random.random() < 0.5 else random.uniform(0, 1, 2)
        if starts.adsorbates and random.random() < 0.7:
            symbol, height = str(random.choice(starts.adsorbates)), random.uniform(0.9, 1.6)
        else:
            symbol, height = starts.symbols(random, 1)[0], random.uniform(1.7, 2.4)
        found.append(Atom(symbol, top.positions[place] + along * edges[0] + across * edges[1] + [0, 0, height]))
    return Atoms(found)


def _cluster(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """Atoms strewn into a box, no two nearer than 2 Å: far from any minimum."""
    size = int(random.integers(max(3, starts.sizes[0]), starts.sizes[1] + 1))
    symbols = starts.symbols(random, size)
    volume = np.mean([atomic_volume(atomic_numbers[symbol]) for symbol in symbols])
    edge, places = float((volume * size) ** (1 / 3)), list[np.ndarray]()
    while len(places) < size:
        place = random.uniform(0, edge, 3)
        edge *= 1.001  # ends for any size
        if all(np.linalg.norm(place - other) > 2.0 for other in places):
            places.append(place)
    return Atoms(symbols, places, info={"far": True})


def _packing(starts: MetalStarts, random: np.random.Generator) -> Atoms:
    """A random cell at the mean volume, no two atoms nearer than 1.8 Å."""
    symbols = starts.symbols(random, int(random.integers(starts.sizes[0], starts.sizes[1] + 1)))
    volume = float(np.mean([atomic_volume(atomic_numbers[symbol]) for symbol in symbols]))
    seed = torch.Generator().manual_seed(int(random.integers(2**62)))
    packed = pack(
        ["".join(symbols)], seed, volume_per_atom_angstrom3=1.05 * volume, minimum_distance_angstrom=1.8
    ).to_ase()[0]
    packed.info["far"] = True
    return packed


KINDS: dict[str, Callable[[MetalStarts, np.random.Generator], Atoms]] = {
    "alloy": _alloy,
    "vacancy": _vacancy,
    "slab": _slab,
    "cluster": _cluster,
    "packing": _packing,
}
