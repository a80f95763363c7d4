"""From relaxations to what a metric learns from: each base of a step, with the way to the end of its relaxation.

Where a relaxation converged, its end is where the secants lead: B·(x_end - x) ≈ F - F_end, exact however loose the
tolerance was. One that did not converge teaches from each base to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from ase.data import chemical_symbols
from pydantic import Field
from scipy.linalg import polar
from torch import Tensor

from relaxion.memory.trajectory import Trajectory
from relaxion.networks.metric.network import pulls_of
from relaxion.networks.metric.stiffness import Unknowns
from relaxion.networks.metric.teacher import Lessons
from relaxion.networks.strains import strain_vectors
from relaxion.settings import Settings
from relaxion.structures import Evaluation, Outcome, State
from relaxion.structures.structures import per_structure_sum

TRUST = 0.3  # Å; part of every state, which a metric does not see
SOFTEST = 0.05  # eV/Å²: secants with less curvature bend downwards or are rounding, and no stiffness fits them


class ExampleSettings(Settings):
    """What of a relaxation is learned from."""

    smallest_force_ev_per_angstrom: float = Field(default=0.03, gt=0)
    """Bases below need no example: nobody steps from there."""

    farthest_angstrom: float = Field(default=1.0, gt=0)
    """Bases with an atom farther from the end teach nothing: no quadratic form knows the way."""

    shortest_angstrom: float = Field(default=5e-3, gt=0)
    """Nor do secants that are shorter: rounding."""

    largest_n_atoms: int = Field(default=400, ge=1)
    """Larger structures are not learned from: an update would take seconds."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Of one relaxation."""

    key: str
    formula: str
    lessons: Lessons
    finished: bool
    n_calls: int

    @property
    def number(self) -> int:
        return self.lessons.number

    def thinned(self, number: int) -> Examples:
        """So many of them at most, from first to last."""
        if self.number <= number:
            return self
        return replace(self, lessons=self.lessons.select(torch.linspace(0, self.number - 1, number).round().long()))

    @cached_property
    def singles(self) -> list[Lessons]:
        """One by one, as they are drawn."""
        return [self.lessons.select(torch.tensor([place])) for place in range(self.number)]


def examples_of(trajectory: Trajectory, settings: ExampleSettings) -> Examples | None:
    """What a relaxation teaches; None: nothing."""
    if len(trajectory) < 2 or trajectory.n_atoms > settings.largest_n_atoms or not _is_finite(trajectory):
        return None
    bases, finished = bases_of(trajectory), trajectory.outcome == Outcome.CONVERGED
    later = torch.full_like(bases, len(trajectory) - 1) if finished else torch.cat([bases[1:], bases[-1:]])
    bases, later = bases[bases < later], later[bases < later]
    if not len(bases):
        return None
    lessons = _secants(unturned(trajectory), bases, later, settings)
    return (
        None
        if lessons is None
        else Examples(trajectory.key, formula_of(trajectory), lessons, finished, len(trajectory))
    )


def bases_of(trajectory: Trajectory) -> Tensor:
    """Numbers of the points at which steps began, and of the last one; all points where nobody wrote it down."""
    if trajectory.bases is None:
        return torch.arange(len(trajectory))
    known = trajectory.bases[trajectory.bases >= 0]
    return torch.unique(torch.cat([known, torch.tensor([0, len(trajectory) - 1])]))


def unturned(trajectory: Trajectory) -> Trajectory:
    """The same, turned so that every cell is the first one under a symmetric deformation; forces turn with it."""
    if not trajectory.cell_free:
        return trajectory
    first = trajectory.cells[0].numpy()
    turns = np.stack([polar(np.linalg.solve(first, cell), side="left")[0].T for cell in trajectory.cells.numpy()])
    turn = torch.from_numpy(turns)
    return replace(
        trajectory,
        cells=trajectory.cells @ turn,
        positions=trajectory.positions @ turn,
        forces=trajectory.forces @ turn,
        stresses=turn.mT @ trajectory.stresses @ turn,
    )


def _secants(trajectory: Trajectory, bases: Tensor, later: Tensor, settings: ExampleSettings) -> Lessons | None:
    every = state_of(trajectory)
    return secants_between(every.select(bases), every.select(later), settings)


def secants_between(state: State, later: State, settings: ExampleSettings) -> Lessons | None:
    """From states to later ones of the same relaxations, those that a stiffness can fit; None: there is none."""
    found = Lessons.between(state, later, settings.farthest_angstrom)
    if found is None or found.left_over is None:
        return None
    structures = found.state.structures
    forces = (found.state.evaluation.forces * structures.movable[:, None]).norm(dim=1)
    largest = torch.zeros(found.number, dtype=forces.dtype)
    largest = largest.scatter_reduce(0, structures.structure_index, forces, "amax")
    pulls = pulls_of(found.state) - found.left_over
    way = Unknowns(found.goal.displacements, strain_vectors(found.goal.strains))
    length = per_structure_sum(way.atoms.square().sum(dim=1), structures.structure_index, structures.n_structures)
    good = found.goal.largest_displacements(structures) > settings.shortest_angstrom
    good &= pulls.dot(way, structures) > SOFTEST * length
    good &= structures.cell_free | (largest > settings.smallest_force_ev_per_angstrom)
    return found.select(good) if bool(good.any()) else None


def state_of(trajectory: Trajectory) -> State:
    """All points, as networks see them, without a past."""
    evaluation = Evaluation(trajectory.energies, trajectory.forces.reshape(-1, 3), trajectory.stresses)
    return State.without_past(trajectory.structures, evaluation, TRUST)


def _is_finite(trajectory: Trajectory) -> bool:
    told = (trajectory.energies, trajectory.forces, trajectory.stresses, trajectory.positions, trajectory.cells)
    return all(bool(torch.isfinite(one).all()) for one in told)


def formula_of(trajectory: Trajectory) -> str:
    """The composition of the whole cell."""
    numbers, counts = trajectory.numbers.unique(return_counts=True)
    return "".join(f"{chemical_symbols[int(z)]}{int(n)}" for z, n in zip(numbers, counts, strict=True))
