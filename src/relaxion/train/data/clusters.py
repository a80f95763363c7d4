"""Clusters: atoms strewn into a box, far from any minimum, or cut from a crystal."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, pi

import numpy as np
from ase import Atoms
from ase.build import bulk

from relaxion.train.data.alloys import lattice_edges, mean_volume

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
