"""Families of systems: which potential, which moves, starts to train critics on, and systems that stay unseen.

Bimetallic clusters with EMT: the pairs of UNSEEN stay out of every training and every tuning; AlAu and AlPt collapse
with EMT and are left out. Al–Fe crystals with Mendelev's potential: the compositions of UNSEEN_CRYSTALS stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TypeAlias

import numpy as np
from ase import Atoms

from relaxion.train.data.alloys import ball, packed, repacked, summed_volume

MakeStart: TypeAlias = Callable[[np.random.Generator], Atoms]
METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
UNSEEN = (("Cu", "Au"), ("Ag", "Pd"), ("Ni", "Pt"), ("Al", "Cu"))
COLLAPSING = (("Al", "Au"), ("Al", "Pt"))
TRAINED = tuple(
    pair for pair in combinations(METALS, 2) if not any(set(pair) == set(other) for other in (*UNSEEN, *COLLAPSING))
)
LATTICES = ("fcc", "hcp", "bcc")
CRYSTALS = tuple((n_al, size - n_al) for size in range(6, 13) for n_al in range(1, size))  # atoms of Al, of Fe
UNSEEN_CRYSTALS = tuple(CRYSTALS[n] for n in sorted(np.random.default_rng(32).choice(len(CRYSTALS), 16, replace=False)))
APART = 1.8  # Å; no two atoms of a crystal's start are nearer


@dataclass(frozen=True)
class SearchFamily:
    """What is searched, and how."""

    potential: str
    training_start: MakeStart
    tuned: Mapping[str, float]  # shares of the best fixed mixture that was found
    hops: Mapping[str, float]  # shares of the candidates from which critics choose
    cell: bool = False  # relaxed too


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


def training_crystal(random: np.random.Generator) -> Atoms:
    """One of the compositions that are not kept unseen, in a cell of its own."""
    known = [composition for composition in CRYSTALS if composition not in UNSEEN_CRYSTALS]
    return crystal(*known[int(random.integers(len(known)))], random)


def crystal(n_al: int, n_fe: int, random: np.random.Generator) -> Atoms:
    """Atoms strewn into a random cell of their volume."""
    symbols = ["Al"] * n_al + ["Fe"] * n_fe
    volume = summed_volume(symbols) / len(symbols)
    return packed(random, symbols, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=APART)


AL_FE = "eam:../shared/data/AlFe.fs.gz"
FAMILIES = {
    "metals": SearchFamily(
        "emt",
        training_cluster,
        tuned={"swap": 0.6, "relocate": 0.25, "twist": 0.15},
        hops={"swap": 0.5, "relocate": 0.35, "twist": 0.15},
    ),
    "al-fe": SearchFamily(
        AL_FE,
        training_crystal,
        tuned={"swap": 0.4, "slip": 0.2, "relocate": 0.2, "rattle": 0.2},
        hops={"swap": 0.4, "slip": 0.25, "relocate": 0.25, "rattle": 0.1},
    ),
    "al-fe-cell": SearchFamily(
        AL_FE,
        training_crystal,
        tuned={"swap": 0.4, "slip": 0.2, "relocate": 0.1, "rattle": 0.15, "strain": 0.15},
        hops={"swap": 0.4, "slip": 0.2, "relocate": 0.15, "rattle": 0.1, "strain": 0.15},
        cell=True,
    ),
}
SIZES = {"tuning": (15, 19, 24), "unseen": (14, 16, 18, 20, 23, 25), "large": (30, 38, 50)}


def systems(family: str, which: str) -> dict[str, MakeStart]:
    """Starts of each system by its name. which: `tuning`, `unseen`, or `large` (clusters, of unseen pairs)."""
    if family == "metals":
        return _clusters(TRAINED[::2] if which == "tuning" else UNSEEN, which)
    known = [composition for composition in CRYSTALS if composition not in UNSEEN_CRYSTALS]
    compositions = known[2::5] if which == "tuning" else UNSEEN_CRYSTALS
    found: dict[str, MakeStart] = {}
    for n_al, n_fe in compositions:
        first = crystal(n_al, n_fe, np.random.default_rng([n_al, n_fe]))
        # a fixed cell belongs to the system: all starts share it
        make = partial(crystal, n_al, n_fe) if FAMILIES[family].cell else partial(repacked, first, APART)
        found[f"Al{n_al}Fe{n_fe}"] = make
    return found


def _clusters(pairs: tuple[tuple[str, str], ...], which: str) -> dict[str, MakeStart]:
    """Compositions drawn once for each set."""
    random = np.random.default_rng({"tuning": 1, "unseen": 2, "large": 3}[which])
    found: dict[str, MakeStart] = {}
    for pair in pairs:
        for size in SIZES[which]:
            first = int(random.integers(size // 4, size - size // 4 + 1))
            found[f"{pair[0]}{first}{pair[1]}{size - first}"] = partial(alloy_cluster, pair, size, first)
    return found
