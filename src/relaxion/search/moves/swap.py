"""Two atoms of different elements change places: the order of the elements, on the same skeleton."""

from __future__ import annotations

import numpy as np
from ase import Atoms

from relaxion.search.geometry import placed


def swap(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where all free atoms are of one element."""
    if len(free) < 2:
        return None
    first = int(free[random.integers(len(free))])
    others = free[atoms.numbers[free] != atoms.numbers[first]]
    if not len(others):
        return None
    second = int(others[random.integers(len(others))])
    positions = atoms.get_positions()
    positions[[first, second]] = positions[[second, first]]
    return placed(atoms, positions)
