"""One part of a crystal slides over the other, along a lattice plane."""

from __future__ import annotations

import numpy as np
from ase import Atoms

from relaxion.search.geometry import placed


def slip(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where the structure is not periodic along all axes, or an atom is fixed."""
    if not atoms.pbc.all() or len(free) < len(atoms) or len(atoms) < 2:
        return None
    axis = int(random.integers(3))
    fractions = atoms.get_scaled_positions()
    low, high = np.sort(random.uniform(size=2))
    chosen = (fractions[:, axis] > low) & (fractions[:, axis] <= high)
    if not 0 < chosen.sum() < len(atoms):
        return None
    shift = random.uniform(size=3)
    shift[axis] = 0.0
    positions = atoms.get_positions()
    positions[chosen] += shift @ atoms.cell.array
    return placed(atoms, positions)
