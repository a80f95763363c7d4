"""Finished relaxations as lessons: every state on the way, and the move that would have led to the end at once.

The policy that learns makes the relaxations itself, so it learns from the states that it comes to; each state is
labelled with the minimum that its own relaxation ended in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from ase import Atoms
from ase.filters import FrechetCellFilter
from torch import Tensor

from relaxion.experience.environment import Environment
from relaxion.networks.metric.lessons import Lessons, way_to
from relaxion.optimize.ase_interface import read_point
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.potentials.ase import PotentialCalculator
from relaxion.potentials.potential import Potential
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State, Structures


@dataclass(frozen=True, eq=False)
class Relaxations:
    """What a policy did from given starts."""

    visited: list[tuple[Tensor, State]]  # numbers of the relaxations still running, and their states
    ends: State  # in the order of the starts
    outcomes: Tensor  # (n_starts,) int64
    calls: Tensor  # (n_starts,) int64

    def lessons(self, smallest_force: float, farthest: float) -> Lessons | None:
        """From relaxations that converged: states with a force above (eV/Å) and no atom farther from its end (Å)."""
        parts = []
        for numbers, state in self.visited:
            goal = way_to(self.ends.select(numbers).structures, state.structures)
            good = self.outcomes[numbers] == Outcome.CONVERGED
            good &= largest_force(state.structures, state.evaluation) > smallest_force
            good &= goal.largest_displacements(state.structures) < farthest
            if bool(good.any()):
                parts.append(Lessons(state, goal).select(good))
        return Lessons.concatenate(parts) if parts else None


def finished_by_core(found: Relaxations, potential: Potential, tolerance: float, max_force_calls: int) -> Relaxations:
    """The same, those that the policy did not bring to an end carried on by the classical core.

    What a policy cannot finish it would never learn from, and so never learn: the states where it went astray are those
    that it needs a lesson for.
    """
    unfinished = (found.outcomes == Outcome.STEP_LIMIT).nonzero().flatten()
    if len(unfinished) == 0:
        return found
    outcomes, calls, calculator = found.outcomes.clone(), found.calls.clone(), PotentialCalculator(potential)
    ends = list(found.ends.structures.to_ase())
    for number in unfinished.tolist():
        atoms = ends[number]
        atoms.calc = calculator
        target = FrechetCellFilter(atoms) if bool(found.ends.structures.cell_free[number]) else atoms
        spent = _core_calls(target, tolerance, max_force_calls)
        calls[number] += spent
        if spent < max_force_calls:
            outcomes[number] = int(Outcome.CONVERGED)
    free = found.ends.structures.cell_free.tolist()
    structures = Structures.from_ase(ends, cell_free=free).to(found.ends.structures.dtype)
    return replace(found, ends=replace(found.ends, structures=structures), outcomes=outcomes, calls=calls)


def _core_calls(target: Atoms | FrechetCellFilter, tolerance: float, cap: int) -> int:
    """Force calls of the core to the tolerance; `cap` where it takes as many or more."""
    core = Stepper(QuasiNewtonSettings())
    for call in range(1, cap):
        point = read_point(target)
        if point.largest_force < tolerance:
            return call
        proposal = core.propose(point)
        target.set_positions(proposal.base.coordinates + proposal.step)
    return cap


def first_state(potential: Potential, structures: Structures, trust_angstrom: float = 0.3) -> State:
    """The structures evaluated, without a past."""
    evaluation = potential(structures)
    return State(
        structures,
        evaluation,
        None,
        Move.zero(structures),
        evaluation.forces,
        torch.full_like(evaluation.energies, trust_angstrom),
        torch.ones(structures.n_structures, dtype=torch.int64),
    )


def relax(environment: Environment, policy: Callable[[State], Move], state: State) -> Relaxations:
    """Follow the policy from the given states to the end of each relaxation."""
    running, visited = torch.arange(state.n_structures), list[tuple[Tensor, State]]()
    outcomes, calls = torch.zeros_like(running), torch.zeros_like(running)
    finished: list[tuple[Tensor, State]] = []
    while len(running):
        visited.append((running, state))
        with torch.no_grad():
            transition = environment.step(state, policy(state))
        done, after = transition.finished, transition.next_state
        outcomes[running], calls[running] = transition.outcome, after.calls
        if bool(done.any()):
            finished.append((running[done], after.select(done)))
        running, state = running[~done], after.select(~done)
    order = torch.argsort(torch.cat([numbers for numbers, _ in finished]))
    ends = State.concatenate([ended for _, ended in finished]).select(order)
    return Relaxations(visited, ends, outcomes, calls)
