"""The classical optimizer: which hand-made Hessian takes the next step, and the secants that correct it.

Where there are molecules, their internal coordinates come first. Elsewhere it is either springs between neighbours or a
multiple of 1, whichever explains the newest secants better; no force call is spent on the choice. Both are scaled by
measured curvature, however large or small, so that the unit of energy hardly matters. Where the springs are wrong, or
add nothing to a multiple of 1, this is the plain curvature-scaled L-BFGS with its longer memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from relaxion.optimizer.hessian.base import (
    Candidate,
    Hessian,
    Hessians,
    Identity,
    Scaled,
    Secant,
    Secants,
    damped,
    weighted_error,
)
from relaxion.optimizer.hessian.internal import InternalSecants, along_internals
from relaxion.optimizer.point import Point, cosine, dot
from relaxion.optimizer.trust_region import TrustRegionSettings

INTERNAL = "internal"  # methods, as the history has them
SPRINGS = "springs"
PLAIN = "plain"


# Tuned on structures apart from every benchmark (docs/decisions.md).
SPRINGS_MEMORY = 3  # secants that correct the springs; old ones harm on top of a good Hessian
PLAIN_MEMORY = 10  # secants that correct a multiple of 1
PLAIN_STIFFNESS = 20.0  # eV/Å², for a first step without springs
JUDGED_SECANTS = 3  # over which springs and a multiple of 1 are compared
SPRINGS_BONUS = 1.3  # springs are taken while their error is below this many times that of a multiple of 1
SPRINGS_COSINE = 0.97  # springs whose answers to all judged secants are this parallel to the plain ones add nothing


@dataclass(frozen=True)
class ClassicalSettings:
    """Which hand-made Hessians there are, and how far a step may go."""

    region: TrustRegionSettings = field(default_factory=TrustRegionSettings)
    use_springs: bool = True
    internal: bool = True
    """Molecules have internal coordinates, also within a policy's Hessian; False: none have."""


def candidates(
    base: Point, hessians: Hessians, secants: Secants, settings: ClassicalSettings, radius: float
) -> Iterator[Candidate]:
    """The classical models for a step from `base`, the best one first; the last one always applies.

    Args:
        radius: of the trust region, Å.
    """
    if hessians.internal is not None:
        here = hessians.internal
        if secants.internal is None:
            secants.internal = InternalSecants()
        carried = [Secant(*secant) for secant in secants.internal.secants(here)]
        curve = partial(along_internals, here, largest=settings.region.largest, reach=base.reach)
        yield Candidate(INTERNAL, here, damped(carried, here.apply), radius, curve=curve)
    judged = secants.recent[-JUDGED_SECANTS:]
    springs = hessians.springs if settings.use_springs else None
    scaled = None if springs is None else _scaled_springs(springs, judged)
    if scaled is not None:
        yield Candidate(SPRINGS, scaled, secants.recent[-SPRINGS_MEMORY:], radius)
        return
    plain: Hessian = Identity(PLAIN_STIFFNESS)
    if judged:
        newest = judged[-1]
        plain = Scaled(Identity(), newest.curvature / dot(newest.drop, newest.drop))
    yield Candidate(PLAIN, plain, secants.recent[-PLAIN_MEMORY:], radius)


def _scaled_springs(springs: Hessian, judged: Sequence[Secant]) -> Hessian | None:
    """The springs, scaled by the newest secant; None where they add nothing to a multiple of 1, or are too wrong."""
    if not judged:
        return springs
    answers = [springs.solve(secant.drop) for secant in judged]
    drops = [secant.drop for secant in judged]
    if all(cosine(*pair) > SPRINGS_COSINE for pair in zip(answers, drops, strict=True)):
        return None
    if weighted_error(list(judged), answers) > SPRINGS_BONUS * weighted_error(list(judged), drops):
        return None
    return Scaled(springs, judged[-1].curvature / dot(judged[-1].drop, answers[-1]))
