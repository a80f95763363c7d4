"""Random alloys: on the lattices of metals, packed into a cell, strewn into a box, and clusters cut from crystals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import ceil, pi
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, surface
from ase.data import atomic_numbers, chemical_symbols, reference_states
from ase.formula import Formula
from ase.geometry import get_distances
from torch import Generator, Tensor

from relaxion.errors import SettingsError, StructureError
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
        repeats = random.integers(1, 5, 3)
        cubic = bool(random.integers(2))
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
        symbol = str(random.choice(symbols))
        places = random.uniform(0, 1, (TRIALS, 3)) @ atoms.cell.array
        distances = get_distances(places, atoms.positions, cell=atoms.cell, pbc=True)[1]
        return atoms + Atoms([symbol], [places[int(distances.min(axis=1).argmax())]])  # the farthest from all atoms
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
    image = grain.copy()
    height = float(grain.cell.array[2, 2])
    heights = grain.positions[:, 2]
    image.positions[:, 2] = height + heights.max() + heights.min() - heights
    found = grain
    best = -1.0
    for _ in range(SHIFTS):
        second = image.copy()
        second.positions += random.uniform(0, 1, 2) @ grain.cell.array[:2]
        both = grain + second
        both.set_cell([*grain.cell.array[:2], [0, 0, 2 * height]])
        both.pbc = True
        if (room := closest(both)) > best:
            found = both
            best = room
    crowded = np.triu(found.get_all_distances(mic=True) < nearest, 1).any(axis=0)
    return found[np.flatnonzero(~crowded)]


CANDIDATES = 64  # places thrown at once for one atom: one matrix of distances instead of 64


def pack(
    formulas: Sequence[str],
    generator: Generator,
    *,
    volume_per_atom_angstrom3: float,
    minimum_distance_angstrom: float = 1.0,
    volume_spread: float = 0.05,
    largest_strain: float = 0.2,
    tries: int = 50,
    cell_free: bool = False,
) -> Structures:
    """One random packing per formula (`Al2Fe2`), at the volume ± the spread, in a cube strained at random.

    The distance holds through periodic images, self-images included.
    """
    parts = []
    for formula in formulas:
        numbers = torch.tensor([atomic_numbers[symbol] for symbol in Formula(formula)])
        volume = volume_per_atom_angstrom3 * len(numbers)
        for _ in range(tries):
            cell = _random_cell(volume, volume_spread, largest_strain, generator)
            positions = _places(len(numbers), cell, minimum_distance_angstrom, generator)
            if positions is not None:
                parts.append(_structure(numbers, positions, cell, cell_free))
                break
        else:
            raise StructureError(
                f"no packing of {formula} at {volume_per_atom_angstrom3:.3g} Å³ per atom keeps all atoms "
                f"{minimum_distance_angstrom:.3g} Å apart ({tries} tries); give more room or less distance"
            )
    return Structures.concatenate(parts)


def packed(random: np.random.Generator, symbols: Sequence[str] | str, **how: Any) -> Atoms:
    """One packing of these atoms (or of a formula) as `pack` makes it; its seed is drawn from NumPy's generator."""
    seed = torch.Generator().manual_seed(int(random.integers(2**62)))
    return pack(["".join(symbols)], seed, **how).to_ase()[0]


def repacked(atoms: Atoms, minimum_distance_angstrom: float, random: np.random.Generator) -> Atoms:
    """The same atoms strewn anew into the same cell."""
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))
    cell = torch.from_numpy(atoms.cell.array)
    for _ in range(50):
        positions = _places(len(atoms), cell, minimum_distance_angstrom, generator)
        if positions is not None:
            found = atoms.copy()
            found.positions = positions.numpy()
            return found
    raise StructureError(f"{atoms.symbols} cannot be packed {minimum_distance_angstrom:g} Å apart; give less distance")


def _random_cell(volume: float, spread: float, largest_strain: float, generator: Generator) -> Tensor:
    noise = torch.randn((3, 3), generator=generator, dtype=torch.float64)
    draws = torch.rand(2, generator=generator, dtype=torch.float64)
    symmetric = noise + noise.T
    size = largest_strain * draws[0] / torch.linalg.eigvalsh(symmetric).abs().max()
    shape = torch.eye(3, dtype=torch.float64) + size * symmetric
    wanted = volume * (1 + spread * (2 * draws[1] - 1))
    return shape * (wanted / torch.linalg.det(shape)) ** (1 / 3)  # (3, 3) Å


def _places(count: int, cell: Tensor, distance: float, generator: Generator) -> Tensor | None:
    """Positions found one atom after the other; None where the cell is full or too narrow."""
    images = _image_vectors(cell, distance)
    if len(images) > 1 and images[1:].norm(dim=1).min() < distance:
        return None  # an atom would be too near to its own image
    placed = torch.zeros((0, 3), dtype=torch.float64)
    for _ in range(count):
        fractions = torch.rand((CANDIDATES, 3), generator=generator, dtype=torch.float64)
        candidates = fractions @ cell
        images_of_placed = (placed[:, None] + images).reshape(-1, 3)
        room = torch.cdist(candidates, images_of_placed, compute_mode="donot_use_mm_for_euclid_dist")
        free = (room >= distance).all(dim=1).nonzero().flatten()
        if len(free) == 0:
            return None
        placed = torch.cat([placed, candidates[free[:1]]])
    return placed


def _image_vectors(cell: Tensor, distance: float) -> Tensor:
    """All lattice vectors that can matter within `distance` for two points in the cell; zero comes first."""
    heights = torch.linalg.inv(cell).norm(dim=0).reciprocal()  # between opposite faces, Å
    reach = [math.ceil(distance / height) + 1 for height in heights.tolist()]
    ranges = [torch.tensor([0, *[s * n for n in range(1, r + 1) for s in (1, -1)]]) for r in reach]
    return torch.cartesian_prod(*ranges).to(torch.float64) @ cell


def _structure(numbers: Tensor, positions: Tensor, cell: Tensor, cell_free: bool) -> Structures:
    return Structures(
        positions=positions,
        cells=cell[None],
        periodic=torch.ones((1, 3), dtype=torch.bool),
        atomic_numbers=numbers,
        structure_index=torch.zeros(len(numbers), dtype=torch.int64),
        movable=torch.ones(len(numbers), dtype=torch.bool),
        cell_free=torch.tensor([cell_free]),
    )


# ---- Clusters: atoms strewn into a box, far from any minimum, or cut from a crystal.

APART_ANGSTROM = 2.0  # no two atoms of a metal cluster are nearer
LJ_RADIUS = 0.31  # of OptBench's clusters


def strewn(random: np.random.Generator, number: int, edge_angstrom: float, growth: float = 1.0) -> np.ndarray:
    """So many places in a cube, none nearer to another than 2 Å; each try makes the cube larger by `growth`."""
    edge = edge_angstrom
    places = list[np.ndarray]()
    while len(places) < number:
        place = random.uniform(0, edge, 3)
        edge *= growth
        if all(np.linalg.norm(place - other) > APART_ANGSTROM for other in places):
            places.append(place)
    return np.array(places)  # (number, 3) Å


def ball(random: np.random.Generator, symbols: Sequence[str], lattice: str) -> Atoms:
    """The places of a lattice that are nearest to a random point: a compact particle with facets and edges."""
    crystal = bulk("Cu", lattice, **lattice_edges(lattice, mean_volume(symbols)))
    crystal *= 2 * ceil(len(symbols) ** (1 / 3)) + 3  # any ball of so many atoms about a cell in the middle fits
    centre = crystal.get_center_of_mass() + random.uniform(-0.5, 0.5, 3) @ crystal.cell.array / len(crystal) ** (1 / 3)
    nearest = np.argsort(((crystal.positions - centre) ** 2).sum(axis=1), kind="stable")[: len(symbols)]
    return Atoms(symbols, crystal.positions[nearest] - centre)


def optbench_cluster(random: np.random.Generator, number: int = 38) -> Atoms:
    """A Lennard-Jones cluster by the rule of OptBench (henkelmangroup/optbench, `bin/random_cluster.py`).

    Hydrogens, one after the other, uniformly in a cube of edge (k · 4/3 π r / 0.1)^(1/3) for the k-th, kept when
    their nearest neighbour is 0.8–1.3 bonds away; a bond is 2r = 0.62, so all pairs begin squeezed (a Lennard-Jones
    bond is 1.12).
    """
    positions = np.zeros((1, 3))
    while len(positions) < number:
        edge = ((len(positions) + 1) * 4 / 3 * pi * LJ_RADIUS / 0.1) ** (1 / 3)
        place = random.uniform(-edge / 2, edge / 2, 3)
        if 0.8 < np.linalg.norm(positions - place, axis=1).min() / (2 * LJ_RADIUS) < 1.3:
            positions = np.vstack([positions, place])
    return Atoms(f"H{number}", positions)
