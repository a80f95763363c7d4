"""The cell is stretched and sheared, the atoms with it and a little about their places."""

from __future__ import annotations

import numpy as np
from ase import Atoms

LARGEST = 0.2  # of a component of the strain
WIDTH = 0.05  # Å, so that symmetry does not hold the atoms


def strain(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where the structure is not periodic along all axes."""
    if not atoms.pbc.all():
        return None
    noise = random.uniform(-LARGEST, LARGEST, (3, 3))
    symmetric = (noise + noise.T) / 2
    moved = atoms.copy()
    moved.calc = None
    moved.set_cell(moved.cell.array @ (np.eye(3) + symmetric), scale_atoms=True)
    positions = moved.get_positions()
    positions[free] += random.normal(0, WIDTH, (len(free), 3))
    moved.set_positions(positions)
    return moved
