"""Lessons from a store of finished relaxations: dear force calls are paid once and learned from often."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from relaxion.experience.evaluated import Trajectory
from relaxion.networks.metric_lessons import Lessons, way_to
from relaxion.physics.reward import largest_force
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.training.universal_settings import LessonRule

logger = logging.getLogger(__name__)

VALIDATION_MODULUS = 20  # one trajectory in so many is not trained on
TRUST_ANGSTROM = 0.3  # written into states, which must have one; the metric does not see it


def is_validation(key: str) -> bool:
    """By the key alone, so that a store that grows keeps its two sides apart."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % VALIDATION_MODULUS == 0


def repeated(trajectory: Trajectory, frames: Sequence[int]) -> Structures:
    """Some of its structures as one batch."""
    number, n_atoms = len(frames), len(trajectory.numbers)
    chosen = torch.as_tensor(frames)
    return Structures(
        positions=trajectory.positions[chosen].reshape(-1, 3),
        cells=trajectory.cells[chosen],
        periodic=trajectory.pbc.expand(number, 3).clone(),
        atomic_numbers=trajectory.numbers.repeat(number),
        structure_index=torch.repeat_interleave(torch.arange(number), n_atoms),
        movable=trajectory.movable.repeat(number),
        cell_free=torch.full((number,), bool(trajectory.cell_free)),
    )


def states_of(trajectory: Trajectory, frames: Sequence[int]) -> State:
    """The frames as states without a past."""
    structures, chosen = repeated(trajectory, frames), torch.as_tensor(frames)
    forces = trajectory.forces[chosen].reshape(-1, 3)
    evaluation = Evaluation(trajectory.energies[chosen], forces, trajectory.stresses[chosen])
    trust = torch.full((len(frames),), TRUST_ANGSTROM, dtype=structures.dtype)
    return State(structures, evaluation, None, Move.zero(structures), forces, trust, chosen + 1)


def largest_forces(trajectory: Trajectory) -> Tensor:
    """Of every structure on the way, (T,)."""
    state = states_of(trajectory, range(len(trajectory.energies)))
    return largest_force(state.structures, state.evaluation)


def lessons_of(trajectory: Trajectory, rule: LessonRule) -> Lessons | None:
    """Every state above the smallest force, with the way to the end; None where the end is no minimum."""
    frames = range(len(trajectory.energies))
    state = states_of(trajectory, frames)
    forces = largest_force(state.structures, state.evaluation)
    ended = trajectory.outcome == Outcome.CONVERGED or float(forces[-1]) < rule.end_tolerance_ev_per_angstrom
    if not ended or len(frames) < 2:
        return None
    end = repeated(trajectory, [frames[-1]] * len(frames))
    goal = way_to(end, state.structures)
    good = (forces > rule.smallest_force_ev_per_angstrom) & torch.isfinite(forces)
    good &= goal.largest_displacements(state.structures) < rule.farthest_angstrom
    return Lessons(state, goal).select(good) if bool(good.any()) else None


def sorted_lessons(
    trajectories: Iterable[Trajectory], rule: LessonRule, group: Callable[[Trajectory], str]
) -> dict[str, Lessons]:
    """All lessons of the trajectories, in groups."""
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
    return {name: Lessons.concatenate(parts[name]) for name in sorted(parts)}
