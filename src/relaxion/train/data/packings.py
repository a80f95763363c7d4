"""Atoms far from any minimum: random packings of a cell, clusters strewn into a box. And clusters cut from crystals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import ceil, pi
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.data import atomic_numbers
from ase.formula import Formula
from torch import Generator, Tensor

from relaxion.errors import StructureError
from relaxion.structures.structures import Structures
from relaxion.train.data.alloys import lattice_edges, mean_volume

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
    edge, places = edge_angstrom, list[np.ndarray]()
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
