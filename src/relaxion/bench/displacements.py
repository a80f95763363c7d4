"""How starts are made from structures: atoms displaced, cells strained."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.geometry import get_distances

NEAREST_ANGSTROM = 1.0  # no start has two atoms nearer than this, except LJ38, whose recipe says otherwise


def displaced(atoms: Atoms, generator: np.random.Generator, width: float, nearest: float = NEAREST_ANGSTROM) -> Atoms:
    """Every atom by a Gaussian of this width (Å), the centre kept; drawn again where two come too near."""
    while True:
        moved = atoms.copy()
        displacements = generator.normal(0, width, (len(atoms), 3))
        moved.positions += displacements - displacements.mean(axis=0)
        if _closest(moved) > nearest:
            return moved


def _closest(atoms: Atoms) -> float:
    """Å; images of an atom itself left out, they are a lattice vector away."""
    distances = get_distances(atoms.positions, cell=atoms.cell, pbc=atoms.pbc)[1]
    return float((distances + np.diag(np.full(len(atoms), np.inf))).min())


def strained(atoms: Atoms, generator: np.random.Generator, largest: float) -> Atoms:
    """The cell, and the atoms with it, by a random symmetric strain."""
    strain = generator.uniform(-largest, largest, (3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    return atoms
