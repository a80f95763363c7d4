"""Finished relaxations as lessons: every state on the way, and the move that would have led to the end at once.

The policy that learns makes the relaxations itself, so it learns from the states that it comes to; each state is
labelled with the minimum that its own relaxation ended in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from relaxion.experience.environment import Environment
from relaxion.physics.potential import Potential
from relaxion.physics.reward import largest_force
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum


@dataclass(frozen=True, eq=False)
class Lessons:
    """States without graph, and for each the way to the minimum it belongs to."""

    state: State
    goal: Move

    @property
    def number(self) -> int:
        return self.state.n_structures

    def select(self, which: Tensor) -> Lessons:
        """Those numbered or masked by `which`."""
        return Lessons(self.state.select(which), self.goal.select(self.state.structures.counts, which))

    @classmethod
    def concatenate(cls, parts: Sequence[Lessons]) -> Lessons:
        """One object from several, in order."""
        return cls(State.concatenate([p.state for p in parts]), Move.concatenate([p.goal for p in parts]))

    def tensors(self) -> dict[str, Tensor]:
        """All of it as flat tensors, for a checkpoint."""
        state = self.state
        named = {f"structures.{f.name}": getattr(state.structures, f.name) for f in fields(state.structures)}
        evaluation = state.evaluation
        assert evaluation.stresses is not None  # lessons come from potentials that give it
        return named | {
            "energies": evaluation.energies,
            "forces": evaluation.forces,
            "stresses": evaluation.stresses,
            "last_displacements": state.last_move.displacements,
            "last_strains": state.last_move.strains,
            "last_forces": state.last_forces,
            "trust_radii": state.trust_radii,
            "calls": state.calls,
            "goal_displacements": self.goal.displacements,
            "goal_strains": self.goal.strains,
        }

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> Lessons:
        """The opposite of `tensors`."""
        structures = Structures(**{f.name: named[f"structures.{f.name}"] for f in fields(Structures)})
        state = State(
            structures,
            Evaluation(named["energies"], named["forces"], named["stresses"]),
            None,
            Move(named["last_displacements"], named["last_strains"]),
            named["last_forces"],
            named["trust_radii"],
            named["calls"],
        )
        return cls(state, Move(named["goal_displacements"], named["goal_strains"]))


def way_to(minimum: Structures, structures: Structures) -> Move:
    """The move that leads to the minimum, but for a turn and a shift of all, which cost nothing.

    h⁻¹·h_min = S·Q with S symmetric: the strain is S - 1, and the minimum is turned back by Q.
    """
    identity = torch.eye(3, dtype=structures.dtype)
    strains = torch.zeros_like(structures.cells)
    turns = identity.expand_as(structures.cells).clone()
    free = structures.cell_free
    if bool(free.any()):
        deformation = torch.linalg.solve(structures.cells[free], minimum.cells[free])
        left, sizes, right = torch.linalg.svd(deformation)
        strains[free] = (left * sizes[:, None]) @ left.mT - identity
        turns[free] = left @ right
    index, number = structures.structure_index, structures.n_structures
    turned_back = torch.bmm(minimum.positions[:, None], turns[index].mT)[:, 0]
    strained = structures.moved(Move(torch.zeros_like(structures.positions), strains)).positions
    displacements = turned_back - strained
    floating = per_structure_sum((~structures.movable).long(), index, number) == 0
    means = per_structure_sum(displacements, index, number) / structures.counts[:, None]
    return Move(displacements - (means * floating[:, None])[index], strains).allowed(structures)


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
