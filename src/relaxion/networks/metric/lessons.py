"""What a metric learns from: states, each with the way to the minimum it belongs to, and how far B⁻¹F misses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from relaxion.networks.metric.network import Frame, MetricNetwork, pulls_of
from relaxion.networks.metric.solve import solve
from relaxion.networks.metric.stiffness import Unknowns
from relaxion.networks.strains import strain_vectors
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.structures.structures import per_structure_sum

SMALLEST_SQUARE = 1e-10  # of a relative error, where its root would have no gradient
SMALLEST_SIZE = 1e-8  # eV: secants that cost the springs less are rounding in float32
SMALLEST_CURVATURE = 0.02  # of the springs' own: softer ones, and those that bend downwards, are no stiffness


@dataclass(frozen=True, eq=False)
class Lessons:
    """States without graph, and for each the way to the end of its relaxation.

    `left_over`: what still pulls at that end, where it is no minimum. Then a lesson is a secant, B·(x_end - x) ≈
    F - F_end, true however loose the tolerance was.
    """

    state: State
    goal: Move
    left_over: Unknowns | None = None  # float64

    @property
    def number(self) -> int:
        return self.state.n_structures

    def select(self, which: Tensor) -> Lessons:
        """Those numbered or masked by `which`."""
        counts = self.state.structures.counts
        rest = None
        if self.left_over is not None:
            pulls = Move(self.left_over.atoms, self.left_over.cells).select(counts, which)
            rest = Unknowns(pulls.displacements, pulls.strains)
        return Lessons(self.state.select(which), self.goal.select(counts, which), rest)

    @classmethod
    def concatenate(cls, parts: Sequence[Lessons]) -> Lessons:
        """One object from several, in order; all of them with something left over, or none."""
        rests = [part.left_over for part in parts if part.left_over is not None]
        rest = Unknowns(torch.cat([r.atoms for r in rests]), torch.cat([r.cells for r in rests])) if rests else None
        return cls(State.concatenate([p.state for p in parts]), Move.concatenate([p.goal for p in parts]), rest)

    @classmethod
    def between(cls, state: State, later: State, farthest_angstrom: float) -> Lessons | None:
        """Secants from states to later ones of their relaxations, where no atom has farther to go; None: there none."""
        goal = way_to(later.structures, state.structures)
        near = goal.largest_displacements(state.structures) < farthest_angstrom
        return cls(state, goal, pulls_of(later)).select(near) if bool(near.any()) else None

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


def relative_errors(network: MetricNetwork, lessons: Lessons, *, convex_only: bool = False) -> Tensor:
    """How far B⁻¹(F - F_end) misses the way to the end, relative to its length, in the springs' energy, (n_lessons,).

    `convex_only`: secants from anywhere, of which some bend downwards or are mere rounding, are left out, (n_of_use,).
    """
    structures = lessons.state.structures
    frame = Frame.of(lessons.state, network.settings, network.dtype)
    pulls = frame.pulls if lessons.left_over is None else frame.pulls - lessons.left_over
    goal = Unknowns(lessons.goal.displacements.double(), strain_vectors(lessons.goal.strains).double())
    missed = solve(network.stiffness(frame), pulls) - goal
    with torch.no_grad():
        springs = frame.prior(network.settings).to(torch.float64)
        size = goal.dot(springs.apply(goal), structures)
    squares = missed.dot(springs.apply(missed), structures) / size.clamp_min(SMALLEST_SIZE if convex_only else 1e-300)
    if convex_only:
        squares = squares[(size > SMALLEST_SIZE) & (goal.dot(pulls, structures) > SMALLEST_CURVATURE * size)]
    return torch.sqrt(squares + SMALLEST_SQUARE)
