"""One half of a cluster is turned against the other, about the normal of the cut."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from scipy.spatial.transform import Rotation

from relaxion.search.geometry import placed, random_rotation_axis

SMALLEST = 0.3  # rad


def twist(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None for periodic structures, which have no halves, and where fixed atoms hold the structure."""
    if atoms.pbc.any() or len(free) < len(atoms) or len(atoms) < 4:
        return None
    axis = random_rotation_axis(random)
    positions = atoms.get_positions()
    centre = positions.mean(axis=0)
    heights = (positions - centre) @ axis
    cut = random.uniform(*np.quantile(heights, [0.25, 0.75]))
    upper = heights > cut
    if not 0 < upper.sum() < len(atoms):
        return None
    angle = random.uniform(SMALLEST, 2 * np.pi - SMALLEST)
    turn = Rotation.from_rotvec(angle * axis)
    positions[upper] = turn.apply(positions[upper] - centre) + centre
    return placed(atoms, positions)
