"""All free atoms by a Gaussian step: the move of plain basin hopping."""

from __future__ import annotations

import numpy as np
from ase import Atoms

from relaxion.search.geometry import Distances, placed

WIDTH = 0.16  # bonds, along each axis: 0.4 Å in copper


def rattle(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """Every free atom by WIDTH of a bond along each axis."""
    if not len(free):
        return None
    bond = float(np.median(Distances.of(atoms).bonds))
    positions = atoms.get_positions()
    positions[free] += random.normal(0, WIDTH * bond, (len(free), 3))
    return placed(atoms, positions)
