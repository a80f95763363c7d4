"""Bimetallic clusters: systems to train critics on, and unseen pairs to assess them on.

The pairs of UNSEEN stay out of every training and every tuning. AlAu and AlPt collapse with EMT and are left out.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from ase import Atoms

from relaxion.train.data.alloys import ball

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
UNSEEN = (("Cu", "Au"), ("Ag", "Pd"), ("Ni", "Pt"), ("Al", "Cu"))
COLLAPSING = (("Al", "Au"), ("Al", "Pt"))
TRAINED = tuple(
    pair for pair in combinations(METALS, 2) if not any(set(pair) == set(other) for other in (*UNSEEN, *COLLAPSING))
)
LATTICES = ("fcc", "hcp", "bcc")


def training_cluster(random: np.random.Generator, fewest: int = 10, most: int = 26) -> Atoms:
    """A pair, a size, a composition and a lattice by chance; at least two atoms of each metal."""
    pair = TRAINED[int(random.integers(len(TRAINED)))]
    size = int(random.integers(fewest, most + 1))
    if random.random() < 0.1:
        size = int(random.integers(most + 1, 2 * most - 10))
    first = int(random.integers(2, size - 1))
    return alloy_cluster(pair, size, first, random)


def alloy_cluster(pair: tuple[str, str], size: int, first: int, random: np.random.Generator) -> Atoms:
    """A ball cut from a lattice, `first` atoms of the pair's first metal, places by chance."""
    symbols = random.permutation([pair[0]] * first + [pair[1]] * (size - first)).tolist()
    return ball(random, symbols, LATTICES[int(random.integers(len(LATTICES)))])
