"""Random alloys on the lattices of metals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, surface
from ase.data import atomic_numbers, chemical_symbols, reference_states
from ase.geometry import get_distances
from torch import Generator

from relaxion.errors import SettingsError
from relaxion.structures import Structures
from relaxion.train.data.perturbations import closest

EMT_METALS = ("Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt")
EAM_METALS = ("Cu", "Ag", "Au", "Ni", "Pd", "Pt", "Al", "Pb", "Fe", "Mo", "Ta", "W", "Mg", "Co", "Ti", "Zr")
BODY_CENTRED = ("Fe", "Mo", "Ta", "W")
HEXAGONAL = ("Mg", "Co", "Ti", "Zr")
LATTICE_CONSTANTS = {"Al": 4.05, "Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92}  # Å
MOST_BUILT = 1000  # tries to make a structure of the sizes asked for


def random_symbols(random: np.random.Generator, elements: Sequence[str], number: int) -> list[str]:
    """Of an alloy of one to four of the elements."""
    few = random.choice(elements, min(len(elements), int(random.integers(1, 5))), replace=False)
    return [str(symbol) for symbol in random.choice(few, number)]


def by_volume(atoms: Atoms) -> float:
    """The factor that brings a lattice to the mean of its elements' volumes."""
    return (mean_volume(atoms.get_chemical_symbols()) * len(atoms) / atoms.get_volume()) ** (1 / 3)


def by_lattice_constant(atoms: Atoms) -> float:
    """The factor from copper's lattice to the mean of the elements' lattice constants."""
    constants = [LATTICE_CONSTANTS[symbol] for symbol in atoms.get_chemical_symbols()]
    return float(np.mean(constants) / LATTICE_CONSTANTS["Cu"])


def random_alloy(
    random: np.random.Generator,
    elements: Sequence[str],
    sizes: tuple[int, int],
    *,
    centred_share: float = 0.0,
    edge_angstrom: float = 1.0,
    scale: Callable[[Atoms], float] = by_volume,
) -> Atoms:
    """A close-packed or, in this share, body-centred lattice of 1–4 elements, built with this edge, then scaled."""
    for _ in range(MOST_BUILT):
        repeats, cubic = random.integers(1, 5, 3), bool(random.integers(2))
        lattice = "bcc" if centred_share and random.random() < centred_share else "fcc"
        atoms = bulk("Cu", lattice, a=edge_angstrom, cubic=cubic) * repeats
        if sizes[0] <= len(atoms) <= sizes[1]:
            break
    else:
        raise SettingsError(f"no crystal of {sizes[0]} to {sizes[1]} atoms was found; allow more sizes")
    atoms.set_chemical_symbols(random_symbols(random, elements, len(atoms)))
    atoms.set_cell(atoms.cell * scale(atoms), scale_atoms=True)
    return atoms


def lattices_of(elements: Sequence[str]) -> tuple[str, ...]:
    """That metals among these crystallise in; the close-packed cubic one is always among them."""
    others = {"bcc": BODY_CENTRED, "hcp": HEXAGONAL}
    return ("fcc", *(lattice for lattice, own in others.items() if set(own) & set(elements)))


def lattice_edges(lattice: str, volume: float) -> dict[str, Any]:
    """What ASE's builders ask for (Å), for this volume per atom (Å³); hcp with the ratio of spheres."""
    if lattice == "hcp":
        a = (2**0.5 * volume) ** (1 / 3)
        return {"a": a, "c": a * (8 / 3) ** 0.5}
    return {"a": ({"fcc": 4, "bcc": 2}[lattice] * volume) ** (1 / 3)}


def fcc_alloys(
    elements: Sequence[str],
    n_structures: int,
    generator: Generator,
    *,
    n_atoms: int = 8,
    cell_free: bool = False,
) -> Structures:
    """Alloys of a given size, as compact as can be: each atom any of the elements, by a generator of torch's."""
    images = []
    for _ in range(n_structures):
        which = torch.randint(len(elements), (n_atoms,), generator=generator)
        symbols = [str(elements[int(number)]) for number in which]
        edge = (4 * (summed_volume(symbols) / n_atoms)) ** (1 / 3)
        atoms = bulk("X", "fcc", a=edge).repeat(_compact_box(n_atoms))
        atoms.set_chemical_symbols(symbols)
        images.append(atoms)
    return Structures.from_ase(images, cell_free=cell_free)


def mean_volume(symbols: Sequence[str]) -> float:
    """Å³ per atom."""
    return float(np.mean([atomic_volume(atomic_numbers[symbol]) for symbol in symbols]))


def summed_volume(symbols: Sequence[str]) -> float:
    """Å³ of all; added one by one, which for many atoms differs from NumPy's mean in the last digit."""
    return sum(atomic_volume(atomic_numbers[symbol]) for symbol in symbols)


def atomic_volume(number: int) -> float:
    """Å³ per atom of the pure metal."""
    reference = reference_states[number] or {}
    a = reference.get("a", 0.0)
    match reference.get("symmetry"):
        case "fcc":
            return a**3 / 4
        case "bcc":
            return a**3 / 2
        case "hcp":
            return 3**0.5 / 4 * a**3 * reference["c/a"]
    raise SettingsError(f"{chemical_symbols[number]} is not a simple metal (fcc, bcc, hcp)")


def _compact_box(count: int) -> tuple[int, int, int]:
    """Three whole numbers with this product, as equal as can be."""
    first = max(n for n in range(1, round(count ** (1 / 3)) + 1) if count % n == 0)
    rest = count // first
    second = max(n for n in range(1, int(rest**0.5) + 1) if rest % n == 0)
    return first, second, rest // second


# ---- Crystals of metals with a point defect, or with a boundary between two grains.

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
