"""A place an optimizer has been to, and what the calculator said there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from relaxion.optimize.springs import Array, Geometry


@dataclass(frozen=True)
class Point:
    """Coordinates as the ASE door moves them (atoms, then three rows for a free cell), forces and energy there."""

    coordinates: Array  # (n_rows, 3) Å
    forces: Array  # (n_rows, 3) eV/Å
    energy: float  # eV
    geometry: Geometry | None  # None: not a plain structure, springs cannot be drawn

    @property
    def largest_force(self) -> float:
        return longest(self.forces)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.energy) and np.isfinite(self.forces).all())


@dataclass(frozen=True)
class Proposal:
    """Where to look next: `step` away from `base`, and what a quadratic model expects there."""

    base: Point
    step: Array  # (n_rows, 3) Å
    expected_change: float  # eV, below 0
    method: str  # "policy", "springs", "plain" or "fire"
    reason: str = ""  # why this method, where the guard chose it, or FIRE came to help
    wanted: Array | None = None  # the step before trust radius and screen; None: as it is
    trust: float = 0.0  # Å, the trust radius it had to keep to
    knobs: Mapping[str, float] = field(default_factory=dict)  # how the gate turned them, by name; empty without a gate


def longest(rows: Array) -> float:
    """Length of the longest row."""
    return float(np.sqrt((rows**2).sum(axis=1).max()))


def dot(first: Array, second: Array) -> float:
    """Scalar product over all coordinates."""
    return float(np.vdot(first, second))
