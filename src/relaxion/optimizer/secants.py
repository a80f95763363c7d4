"""What steps met, and how that corrects a stiffness: limited-memory BFGS on top of any model of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relaxion.optimizer.point import Array, Point, dot, longest

if TYPE_CHECKING:
    from relaxion.optimizer.hessian.internal.secants import ValenceMemory
    from relaxion.optimizer.hessian.internal.topology import Topology

Solve = Callable[[Array], Array]
ShiftedSolve = Callable[[Array, float], Array]
Measure = Callable[[Array], float]

SOFTEST_SHARE = 0.2  # Powell's damping: a secant softer than this share of the stiffness is stiffened
AGEING = 0.8  # weight of a secant relative to the next newer one


@dataclass(frozen=True)
class Secant:
    """What one step taught: the step, and by how much the forces dropped along it."""

    step: Array
    drop: Array  # forces before - forces after, eV/Å

    @property
    def curvature(self) -> float:
        return dot(self.step, self.drop)


class Secants:
    """What the steps of one relaxation met: Cartesian secants, and those in internal coordinates of molecules."""

    def __init__(self, most: int) -> None:
        """`most`: Cartesian secants that are kept."""
        self.most = most
        self.recent: list[Secant] = []
        self.internal: ValenceMemory | None = None  # while internal coordinates make steps

    @property
    def topology(self) -> Topology | None:
        """The molecules in which the internal secants are seen."""
        return None if self.internal is None else self.internal.topology

    def learn(self, before: Point, after: Point) -> None:
        """Keep a secant of positive curvature; others would make the Hessian indefinite."""
        secant = Secant(after.coordinates - before.coordinates, before.forces - after.forces)
        if secant.curvature > 1e-5 * dot(secant.step, secant.step):
            self.recent = [*self.recent, secant][-self.most :]
        if self.internal is not None and self.internal.topology is not None and after.geometry is not None:
            self.internal.learn(before, after)

    def arrays(self) -> list[Array]:
        """Everything that has a row for each coordinate."""
        points = [] if self.internal is None else self.internal.points()
        own = [array for secant in self.recent for array in (secant.step, secant.drop)]
        return own + [array for point in points for array in (point.coordinates, point.forces)]


def corrected(forces: Array, secants: Sequence[Secant], solve: Solve) -> Array:
    """The two-loop recursion of L-BFGS (Nocedal 1980) with `solve` as the initial inverse stiffness."""
    right = forces
    weights = []
    for secant in reversed(secants):
        weight = dot(secant.step, right) / secant.curvature
        right = right - weight * secant.drop
        weights.append(weight)
    step = solve(right)
    for secant, weight in zip(secants, reversed(weights), strict=True):
        step = step + (weight - dot(secant.drop, step) / secant.curvature) * secant.step
    return step


def quasi_newton(forces: Array, secants: Sequence[Secant], solve: ShiftedSolve, shift: float = 0.0) -> Array:
    """The step of a Hessian that secants correct, everything stiffer by a shift (eV/Å²), the secants included."""
    if shift > 0:
        secants = [Secant(secant.step, secant.drop + shift * secant.step) for secant in secants]
    return corrected(forces, secants, lambda right: solve(right, shift))


def downhill(step: Array, forces: Array) -> bool:
    """Whether a step goes along the forces, and is one at all."""
    return bool(dot(step, forces) > 1e-3 * np.linalg.norm(step) * np.linalg.norm(forces))  # False if not a number


def damped(secants: Sequence[Secant], apply: Solve) -> list[Secant]:
    """None softer than a share of the stiffness they correct (Powell 1978): the correction stays positive."""
    stiffened = (_damped(secant, apply(secant.step)) for secant in secants)
    return [secant for secant in stiffened if secant is not None]


def _damped(secant: Secant, applied: Array) -> Secant | None:
    """`applied`: B·s; None where the stiffness B has none along the step."""
    own = dot(secant.step, applied)
    if own <= 0:
        return None
    if secant.curvature >= SOFTEST_SHARE * own:
        return secant
    weight = (1 - SOFTEST_SHARE) * own / (own - secant.curvature)
    return Secant(secant.step, weight * secant.drop + (1 - weight) * applied)


def believed(
    secants: Sequence[Secant], apply: Solve, weight: float, length: float, reach: Measure = longest
) -> list[Secant]:
    """Each as a mean of what was met and what the stiffness B says, y ← w·y + (1 - w)·B·s, and damped.

    B is predicted for the way ahead, a secant was measured on the way behind: the longer its step, and the older it is,
    the less it says of the stiffness here. w = `weight` · 0.8^age / (1 + (length of s / `length`)²), the newest having
    age 0; `reach` measures lengths, `Point.reach` as atoms feel them.
    """
    result = list[Secant]()
    for age, secant in enumerate(reversed(secants) if weight > 0 else ()):
        own = weight * AGEING**age / (1 + (reach(secant.step) / length) ** 2)
        applied = apply(secant.step)
        mean = _damped(Secant(secant.step, own * secant.drop + (1 - own) * applied), applied)
        result += [] if mean is None else [mean]
    return result[::-1]


def weighted_error(secants: list[Secant], answers: list[Array]) -> float:
    """How far answers miss the steps, newest counting most: mean of |s - γ·H·y| / |s|; 0 without secants.

    γ makes the curvature right, since springs know shapes only.
    """
    total, weights, weight = 0.0, 0.0, 1.0
    for secant, answer in zip(reversed(secants), reversed(answers), strict=True):
        scale = secant.curvature / dot(secant.drop, answer)
        total += weight * float(np.linalg.norm(secant.step - scale * answer) / np.linalg.norm(secant.step))
        weights += weight
        weight *= 0.6
    return total / weights if secants else 0.0


def missed(secants: list[Secant], apply: Solve) -> float:
    """By how much a stiffness misses the drops of the forces: mean of |y - B·s| / |y|; 0 without secants."""
    misses = [np.linalg.norm(secant.drop - apply(secant.step)) / np.linalg.norm(secant.drop) for secant in secants]
    return float(np.mean(misses)) if misses else 0.0
