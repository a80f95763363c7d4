"""The protocol at the heart of the optimizer: a model of the Hessian at one point.

Springs, a multiple of 1, internal coordinates, a learned stiffness and the move of a direct policy look alike from
outside. Secants correct any of them (`secants.py`), one trust region limits the steps of all of them
(`trust_region.py`), and the safeguard chooses which one makes the next step (`safeguard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relaxion.optimizer.point import Array
from relaxion.optimizer.secants import Secant


class Hessian(Protocol):
    """A symmetric positive definite matrix B at one geometry, in the coordinates of the points (`Point`)."""

    @property
    def has_curvature(self) -> bool:
        """Whether measured curvatures can be compared with it; a direct policy's move has none."""
        ...

    def apply(self, step: Array) -> Array:
        """B·u: the drop of the forces along a step.

        Args:
            step: (n_rows, 3) Å.
        """
        ...

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """(B + shift·1)⁻¹·f: the step to where a quadratic model has no forces. NaN where it cannot be solved.

        Args:
            forces: (n_rows, 3) eV/Å.
            shift: additional stiffness of every coordinate, eV/Å².
        """
        ...


@dataclass(frozen=True, eq=False)
class Identity:
    """The same stiffness for every coordinate."""

    stiffness: float = 1.0  # eV/Å²
    has_curvature = True

    def apply(self, step: Array) -> Array:
        return self.stiffness * step

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        return forces / (self.stiffness + shift)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Another Hessian divided by a factor, as measured curvature suggests."""

    hessian: Hessian
    softness: float
    has_curvature = True

    def apply(self, step: Array) -> Array:
        return self.hessian.apply(step) / self.softness

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        return self.softness * self.hessian.solve(forces, shift * self.softness)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A Hessian that may make the next step, and how."""

    method: str  # "policy", "internal", "springs" or "plain"
    hessian: Hessian
    secants: Sequence[Secant]  # that correct it
    radius: float  # Å, of the trust region for this step
    scale: float = 1.0  # of the step
    shift: float = 0.0  # eV/Å², of every coordinate
    curve: Callable[[Array], Array] | None = None  # carries a step out along internal coordinates
    reason: str = ""
    control: Mapping[str, float] = field(default_factory=dict)  # the step rule, for the history
