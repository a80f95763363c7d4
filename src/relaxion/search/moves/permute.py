"""Three to six atoms change places at once: what single swaps would have to go uphill for."""

from __future__ import annotations

import numpy as np
from ase import Atoms

from relaxion.search.geometry import placed

FEWEST = 3
MOST = 6


def permute(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where fewer than three atoms are free, or the draw leaves every element where it was."""
    if len(free) < FEWEST:
        return None
    number = int(random.integers(FEWEST, min(MOST, len(free)) + 1))
    chosen = random.choice(free, number, replace=False)
    order = random.permutation(chosen)
    if np.array_equal(atoms.numbers[chosen], atoms.numbers[order]):
        return None
    positions = atoms.get_positions()
    positions[chosen] = positions[order]
    return placed(atoms, positions)
