"""Force constants by rule, for any non-metals.

R. Lindh, A. Bernhardsson, G. Karlström, P.-Å. Malmqvist, Chem. Phys. Lett. 241, 423 (1995): with g = exp[α(R² - r²)] of
each bond, a stretch has 0.45 g, a bend 0.15 g g, a torsion 0.005 g g g (atomic units). Wags are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ase.units import Bohr, Hartree

from relaxion.optimizer.hessian.internal.topology import Indices, Topology
from relaxion.optimizer.point import Array, Geometry

LENGTHS = np.array([[1.35, 2.10, 2.53], [2.10, 2.87, 3.40], [2.53, 3.40, 3.40]]) * Bohr  # R by periods 1, 2, ≥ 3
DECAYS = np.array([[1.0, 0.3949, 0.3949], [0.3949, 0.28, 0.28], [0.3949, 0.28, 0.28]]) / Bohr**2  # α
PERIODS = np.searchsorted([2, 10], np.arange(119))  # 0, 1, 2 of the tables above, by atomic number
FARTHEST = 3.4  # Å; pairs that are not bonded have no stretch beyond


@dataclass(frozen=True)
class ValenceSettings:
    """Force constants. Lindh's where nothing else is said."""

    stretch: float = 0.45 * Hartree / Bohr**2
    """eV/Å², times g."""
    bend: float = 0.15 * Hartree
    """eV/rad², times g of both bonds."""
    torsion: float = 0.005 * Hartree
    """eV/rad², times g of all three bonds."""
    wag: float = 0.02 * Hartree
    """eV, times g of all three bonds."""
    largest_share: float = 3.0
    """g of a bond is at most this, however short."""
    smallest_share: float = 0.25
    """And at least this: a bond built too long is still a bond."""
    floor: float = 0.1
    """Stiffness of every atom of a molecule against its place, eV/Å². More would hide torsions."""


def shares(geometry: Geometry, first: Indices, second: Indices, lengths: Array) -> Array:
    """Lindh's g of these pairs."""
    one, other = PERIODS[geometry.numbers[first]], PERIODS[geometry.numbers[second]]
    return np.exp(DECAYS[one, other] * (LENGTHS[one, other] ** 2 - lengths**2))


def constants_of(topology: Topology, geometry: Geometry, vectors: Array, settings: ValenceSettings) -> Array:
    """Of each coordinate in the order of `values_at`, eV/Å² or eV/rad²."""
    links = topology.links
    lengths = np.linalg.norm(vectors, axis=1)
    g = np.clip(shares(geometry, links.first, links.second, lengths), settings.smallest_share, settings.largest_share)
    g[2 * topology.n_bonds :] = 1.0  # axes longer than a bond
    return np.concatenate(
        [
            settings.stretch * g[: topology.n_bonds],
            settings.bend * g[topology.bends].prod(axis=1),
            settings.bend * np.repeat(g[topology.straight].prod(axis=1), 2),
            settings.torsion * g[topology.torsions].prod(axis=1),
            settings.wag * g[topology.wags].prod(axis=1),
        ]
    )
