"""Lessons from a store of finished relaxations: dear force calls are paid once and learned from often."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.collecting.store import Trajectory
from relaxion.networks.metric.lessons import Lessons, way_to
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State
from relaxion.training.universal_settings import LessonRule

logger = logging.getLogger(__name__)

VALIDATION_MODULUS = 20  # one trajectory in so many is not trained on
TRUST_ANGSTROM = 0.3  # written into states, which must have one; the metric does not see it


def is_validation(key: str) -> bool:
    """By the key alone, so that a store that grows keeps its two sides apart."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % VALIDATION_MODULUS == 0


def states_of(trajectory: Trajectory) -> State:
    """Every structure on the way as a state without a past."""
    structures, evaluation = trajectory.structures, trajectory.evaluation
    trust = torch.full((len(trajectory),), TRUST_ANGSTROM, dtype=structures.dtype)
    calls = torch.arange(1, len(trajectory) + 1)
    return State(structures, evaluation, None, Move.zero(structures), evaluation.forces, trust, calls)


def largest_forces(trajectory: Trajectory) -> Tensor:
    """Of every structure on the way, (T,)."""
    return largest_force(trajectory.structures, trajectory.evaluation)


def lessons_of(trajectory: Trajectory, rule: LessonRule) -> Lessons | None:
    """Every state above the smallest force, with the way to the end; None where the end is no minimum."""
    state, forces = states_of(trajectory), largest_forces(trajectory)
    ended = trajectory.outcome == Outcome.CONVERGED or float(forces[-1]) < rule.end_tolerance_ev_per_angstrom
    if not ended or len(trajectory) < 2:
        return None
    end = state.structures.select(torch.full((len(trajectory),), len(trajectory) - 1))
    goal = way_to(end, state.structures)
    good = (forces > rule.smallest_force_ev_per_angstrom) & torch.isfinite(forces)
    good &= goal.largest_displacements(state.structures) < rule.farthest_angstrom
    return Lessons(state, goal).select(good) if bool(good.any()) else None


@dataclass(frozen=True, eq=False)
class Group:
    """Lessons of one group, and how often each is drawn relative to the others."""

    lessons: Lessons
    weights: Tensor  # (n_lessons,)


def sorted_lessons(
    trajectories: Iterable[Trajectory], rule: LessonRule, group: Callable[[Trajectory], str]
) -> dict[str, Group]:
    """All lessons of the trajectories, in groups.

    A relaxation that took long has many lessons, most of them on the last soft mode. So that they do not drown the
    others, a lesson weighs the less the more its relaxation has: 1/√n.
    """
    parts: dict[str, list[Lessons]] = {}
    n_read = n_useless = 0
    for trajectory in trajectories:
        n_read += 1
        lessons = lessons_of(trajectory, rule)
        if lessons is None:
            n_useless += 1
        else:
            parts.setdefault(group(trajectory), []).append(lessons)
    logger.info("%d relaxations read, %d of them teach nothing", n_read, n_useless)
    return {name: _group(parts[name]) for name in sorted(parts)}


def _group(parts: Sequence[Lessons]) -> Group:
    weights = [torch.full((part.number,), part.number**-0.5) for part in parts]
    return Group(Lessons.concatenate(parts), torch.cat(weights))
