"""Finished relaxations as lessons: every state on the way, and the move that would have led to the end at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.experience.environment import Environment
from relaxion.physics.reward import largest_force
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum


@dataclass(frozen=True, eq=False)
class Lessons:
    """States, and for each the way to the minimum it belongs to."""

    state: State
    goal: Move

    @property
    def number(self) -> int:
        return self.state.n_structures

    def select(self, which: Tensor) -> Lessons:
        return Lessons(self.state.select(which), self.goal.select(self.state.structures.counts, which))

    @classmethod
    def concatenate(cls, parts: Sequence[Lessons]) -> Lessons:
        return cls(State.concatenate([p.state for p in parts]), Move.concatenate([p.goal for p in parts]))


def way_to(minimum: Structures, structures: Structures) -> Move:
    """The move that leads to the minimum, but for a turn and a shift of all, which cost nothing.

    h⁻¹·h_min = S·Q with S symmetric: the strain is S - 1, and the minimum is turned back by Q.
    """
    strains = torch.zeros_like(structures.cells)
    turns = torch.eye(3, dtype=structures.dtype).expand_as(structures.cells).clone()
    free = structures.cell_free
    if bool(free.any()):
        deformation = torch.linalg.solve(structures.cells[free], minimum.cells[free])
        left, sizes, right = torch.linalg.svd(deformation)
        strains[free] = (left * sizes[:, None]) @ left.mT - torch.eye(3, dtype=structures.dtype)
        turns[free] = left @ right
    index, number = structures.structure_index, structures.n_structures
    back = torch.bmm(minimum.positions[:, None], turns[index].mT)[:, 0]
    strained = structures.moved(Move(torch.zeros_like(structures.positions), strains)).positions
    displacements = back - strained
    floating = per_structure_sum((~structures.movable).long(), index, number) == 0
    means = per_structure_sum(displacements, index, number) / structures.counts[:, None]
    displacements = displacements - means[index] * floating[index, None]
    return Move(displacements, strains)


@dataclass(frozen=True, eq=False)
class Relaxations:
    """What a policy did from given starts."""

    visited: list[tuple[Tensor, State]]  # numbers of the relaxations still running, and their states
    ends: State  # in the order of the starts
    outcomes: Tensor  # (n_starts,) int64
    calls: Tensor  # (n_starts,) int64

    def lessons(self, smallest_force: float, farthest: float) -> Lessons | None:
        """From relaxations that converged: states with forces above (eV/Å) and within (Å) of their end."""
        parts = []
        for numbers, state in self.visited:
            goal = way_to(self.ends.select(numbers).structures, state.structures)
            good = self.outcomes[numbers] == Outcome.CONVERGED
            good &= largest_force(state.structures, state.evaluation) > smallest_force
            good &= goal.largest_displacements(state.structures) < farthest
            if bool(good.any()):
                parts.append(Lessons(state, goal).select(good))
        return Lessons.concatenate(parts) if parts else None


def relax(environment: Environment, policy: Callable[[State], Move], state: State) -> Relaxations:
    """Follow the policy from the given states to the end of each relaxation."""
    running, visited = torch.arange(state.n_structures), []
    ends: list[State | None] = [None] * state.n_structures
    outcomes, calls = (
        torch.zeros(state.n_structures, dtype=torch.int64),
        torch.zeros(state.n_structures, dtype=torch.int64),
    )
    finished_numbers, finished_states = [], []
    del ends
    while len(running):
        visited.append((running, state))
        with torch.no_grad():
            transition = environment.step(state, policy(state))
        done = transition.finished
        after = transition.next_state
        outcomes[running] = transition.outcome
        calls[running] = after.calls
        if bool(done.any()):
            finished_numbers.append(running[done])
            finished_states.append(after.select(done))
        running, state = running[~done], after.select(~done)
    order = torch.argsort(torch.cat(finished_numbers))
    return Relaxations(visited, State.concatenate(finished_states).select(order), outcomes, calls)
