"""Crystals of metals with a point defect, or with a boundary between two grains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms
from ase.build import bulk, surface
from ase.geometry import get_distances

from relaxion.errors import SettingsError
from relaxion.train.data.alloys import MOST_BUILT, lattice_edges, lattices_of, mean_volume, random_symbols
from relaxion.train.data.perturbations import closest

ORDERS = ((0, 0, 0, 0), (0, 1, 1, 1), (0, 0, 1, 1))  # of the four sites of a cell: pure, A3B, AB
SITES = {"fcc": {"cubic": True}, "bcc": {"cubic": True}, "hcp": {"orthorhombic": True}}
TRIALS = 200  # random places among which the widest hole is looked for
PLANES = {"fcc": ((1, 1, 1), (2, 1, 0), (3, 1, 0), (1, 1, 2)), "bcc": ((1, 1, 2), (2, 1, 0), (3, 1, 0), (1, 1, 1))}
"""Mirror planes of coincidence boundaries: twins (Σ3), and the tilts Σ5 about [001]."""
NEAREST = 0.8  # cube roots of the volume per atom: of two atoms at a boundary that are nearer one is left out
SHIFTS = 12


def defective_crystal(
    random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int], interstitials: Sequence[str] = ()
) -> Atoms:
    """A pure or ordered crystal with an atom between the others, two atoms exchanged, or one of another element."""
    atoms = _ordered(random, elements, (sizes[0], sizes[1] - 1))
    if random.random() < 0.5:
        symbols = [*elements, *interstitials] if random.random() < 0.7 else atoms.get_chemical_symbols()
        return atoms + Atoms([str(random.choice(symbols))], [_hole(atoms, random)])
    one, other = random.choice(len(atoms), 2, replace=False)
    if atoms.numbers[one] != atoms.numbers[other]:
        atoms.numbers[[one, other]] = atoms.numbers[[other, one]]
    else:
        atoms.symbols[int(one)] = str(random.choice(elements))
    return atoms


def _ordered(random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int]) -> Atoms:
    """One or two elements, each on its own sites of a small cell."""
    for _ in range(MOST_BUILT):
        lattice = str(random.choice(lattices_of(elements)))
        order = np.array(ORDERS[int(random.integers(len(ORDERS)))])
        pair = np.array(random.choice(elements, 2, replace=False))
        cell = bulk("Cu", lattice, **lattice_edges(lattice, mean_volume(pair[order].tolist())), **SITES[lattice])
        cell.set_chemical_symbols(pair[order[: len(cell)]].tolist())
        atoms = cell * random.integers(1, 4, 3)
        if sizes[0] <= len(atoms) <= sizes[1]:
            return atoms
    raise SettingsError(f"no crystal of {sizes[0]} to {sizes[1]} atoms was found; allow more sizes")


def _hole(atoms: Atoms, random: np.random.Generator) -> np.ndarray:
    """The place farthest from all atoms, of some random ones."""
    places = random.uniform(0, 1, (TRIALS, 3)) @ atoms.cell.array
    distances = get_distances(places, atoms.positions, cell=atoms.cell, pbc=True)[1]
    return places[int(distances.min(axis=1).argmax())]


def bicrystal(random: np.random.Generator, elements: Sequence[str], sizes: tuple[int, int]) -> Atoms:
    """A grain and its mirror image: a twin or a symmetric tilt boundary, twice, because the cell is periodic."""
    symbols = random_symbols(random, elements, sizes[1])
    if random.random() < 0.5:
        symbols = symbols[:1] * len(symbols)
    volume = mean_volume(symbols)
    for _ in range(MOST_BUILT):
        lattice = str(random.choice([name for name in lattices_of(elements) if name in PLANES]))
        plane = PLANES[lattice][int(random.integers(len(PLANES[lattice])))]
        crystal = bulk("Cu", lattice, **lattice_edges(lattice, volume), cubic=True)
        grain = surface(crystal, plane, int(random.integers(2, 8)), periodic=True)
        if 2 * len(grain) > 1.2 * sizes[1]:
            continue
        atoms = _mirrored(grain, random, NEAREST * volume ** (1 / 3))
        if sizes[0] <= len(atoms) <= sizes[1]:
            atoms.set_chemical_symbols(symbols[: len(atoms)])
            return atoms
    raise SettingsError(f"no two grains of {sizes[0]} to {sizes[1]} atoms were found; allow more sizes")


def _mirrored(grain: Atoms, random: np.random.Generator, nearest: float) -> Atoms:
    """Both grains, the second shifted along the plane to where it fits best, of some random shifts."""
    image, height = grain.copy(), float(grain.cell.array[2, 2])
    heights = grain.positions[:, 2]
    image.positions[:, 2] = height + heights.max() + heights.min() - heights
    found, best = grain, -1.0
    for _ in range(SHIFTS):
        second = image.copy()
        second.positions += random.uniform(0, 1, 2) @ grain.cell.array[:2]
        both = grain + second
        both.set_cell([*grain.cell.array[:2], [0, 0, 2 * height]])
        both.pbc = True
        if (room := closest(both)) > best:
            found, best = both, room
    crowded = np.triu(found.get_all_distances(mic=True) < nearest, 1).any(axis=0)
    return found[np.flatnonzero(~crowded)]
