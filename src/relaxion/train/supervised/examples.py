"""Examples: a state of a relaxation, and the way from there to the end of that relaxation.

Two kinds come from relaxations. Where a relaxation was followed to its minimum, the way is what B⁻¹F shall be
(`towards_minimum`). Where the tolerance was loose, or a relaxation did not converge, an example is a secant,
B·(x_end - x) ≈ F - F_end, exact however loose the tolerance was (`secants_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from ase.data import chemical_symbols
from torch import Tensor

from relaxion.database.trajectory import Trajectory
from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import pulls_of
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum
from relaxion.train.experience.reward import largest_force

SMALLEST_FORCE = 0.03  # eV/Å: nobody steps from states below, and single precision blurs their way
FARTHEST = 1.0  # Å: from states with an atom farther from the end no quadratic form leads there
SHORTEST = 5e-3  # Å: shorter secants are rounding
SOFTEST = 0.05  # eV/Å²: secants with less curvature bend downwards or are rounding, and no stiffness fits them
LARGEST_N_ATOMS = 400  # of a relaxation that secants are taken from: an update would take seconds
TRUST = 0.3  # Å; part of every state, which a stiffness does not see


@dataclass(frozen=True, eq=False)
class Examples:
    """States without graph, and for each the way to the end of its relaxation.

    `left_over`: what still pulls at that end, where it is no minimum.
    """

    state: State
    goal: Move
    left_over: Unknowns | None = None  # float64

    @property
    def number(self) -> int:
        return self.state.n_structures

    def select(self, which: Tensor) -> Examples:
        """Those numbered or masked by `which`."""
        counts = self.state.structures.counts
        rest = None
        if self.left_over is not None:
            pulls = Move(self.left_over.atoms, self.left_over.cells).select(counts, which)
            rest = Unknowns(pulls.displacements, pulls.strains)
        return Examples(self.state.select(which), self.goal.select(counts, which), rest)

    @classmethod
    def concatenate(cls, parts: Sequence[Examples]) -> Examples:
        """One object from several, in order; all of them with something left over, or none."""
        rests = [part.left_over for part in parts if part.left_over is not None]
        rest = None
        if rests:
            rest = Unknowns(torch.cat([r.atoms for r in rests]), torch.cat([r.cells for r in rests]))
        return cls(State.concatenate([p.state for p in parts]), Move.concatenate([p.goal for p in parts]), rest)

    def tensors(self) -> dict[str, Tensor]:
        """All of it as flat tensors, for a checkpoint; examples with something left over are in none."""
        state = self.state
        evaluation = state.evaluation
        assert evaluation.stresses is not None  # examples come from potentials that give it
        named = {f"structures.{f.name}": getattr(state.structures, f.name) for f in fields(state.structures)}
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
    def of_tensors(cls, named: Mapping[str, Tensor]) -> Examples:
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
    index = structures.structure_index
    number = structures.n_structures
    turned_back = torch.bmm(minimum.positions[:, None], turns[index].mT)[:, 0]
    strained = structures.moved(Move(torch.zeros_like(structures.positions), strains)).positions
    displacements = turned_back - strained
    floating = per_structure_sum((~structures.movable).long(), index, number) == 0
    means = per_structure_sum(displacements, index, number) / structures.counts[:, None]
    return Move(displacements - (means * floating[:, None])[index], strains).allowed(structures)


def towards_minimum(minima: Structures, state: State) -> Examples | None:
    """From states to the minima of their relaxations, those with a force that is worth a step and near enough."""
    goal = way_to(minima, state.structures)
    forces = largest_force(state.structures, state.evaluation)
    good = (forces > SMALLEST_FORCE) & torch.isfinite(forces)
    good &= goal.largest_displacements(state.structures) < FARTHEST
    return Examples(state, goal).select(good) if bool(good.any()) else None


def state_of(trajectory: Trajectory) -> State:
    """All points, as networks see them, without a past."""
    return State.without_past(trajectory.structures, trajectory.evaluation, TRUST)


@dataclass(frozen=True, eq=False)
class RelaxationExamples:
    """The secants of one relaxation."""

    key: str
    formula: str
    examples: Examples
    finished: bool
    n_calls: int

    @property
    def number(self) -> int:
        return self.examples.number

    def thinned(self, number: int) -> RelaxationExamples:
        """So many of them at most, from first to last."""
        if self.number <= number:
            return self
        return replace(self, examples=self.examples.select(torch.linspace(0, self.number - 1, number).round().long()))

    @cached_property
    def singles(self) -> list[Examples]:
        """One by one, as they are drawn."""
        return [self.examples.select(torch.tensor([place])) for place in range(self.number)]


def secants_of(trajectory: Trajectory) -> RelaxationExamples | None:
    """From the base of each step to the end of the relaxation, or to the next base where it did not converge."""
    if len(trajectory) < 2 or trajectory.n_atoms > LARGEST_N_ATOMS or not _is_finite(trajectory):
        return None
    bases = bases_of(trajectory)
    finished = trajectory.outcome == Outcome.CONVERGED
    later = torch.full_like(bases, len(trajectory) - 1) if finished else torch.cat([bases[1:], bases[-1:]])
    earlier = bases < later
    if not bool(earlier.any()):
        return None
    every = state_of(trajectory.unturned())
    found = secants_between(every.select(bases[earlier]), every.select(later[earlier]))
    if found is None:
        return None
    return RelaxationExamples(trajectory.key, formula_of(trajectory), found, finished, len(trajectory))


def bases_of(trajectory: Trajectory) -> Tensor:
    """Numbers of the points at which steps began, and of the last one; all points where nobody wrote it down."""
    if trajectory.bases is None:
        return torch.arange(len(trajectory))
    known = trajectory.bases[trajectory.bases >= 0]
    return torch.unique(torch.cat([known, torch.tensor([0, len(trajectory) - 1])]))


def secants_between(state: State, later: State) -> Examples | None:
    """From states to later ones of the same relaxations, those that a stiffness can fit; None: there is none."""
    structures = state.structures
    goal = way_to(later.structures, structures)
    left_over = pulls_of(later)
    forces = (state.evaluation.forces * structures.movable[:, None]).norm(dim=1)
    largest = torch.zeros(structures.n_structures, dtype=forces.dtype)
    largest = largest.scatter_reduce(0, structures.structure_index, forces, "amax")
    way = Unknowns(goal.displacements, strain_vectors(goal.strains))
    length = per_structure_sum(way.atoms.square().sum(dim=1), structures.structure_index, structures.n_structures)
    longest = goal.largest_displacements(structures)
    good = (longest < FARTHEST) & (longest > SHORTEST)
    good &= (pulls_of(state) - left_over).dot(way, structures) > SOFTEST * length
    good &= structures.cell_free | (largest > SMALLEST_FORCE)
    return Examples(state, goal, left_over).select(good) if bool(good.any()) else None


def _is_finite(trajectory: Trajectory) -> bool:
    known = (trajectory.energies, trajectory.forces, trajectory.stresses, trajectory.positions, trajectory.cells)
    return all(bool(torch.isfinite(one).all()) for one in known)


def formula_of(trajectory: Trajectory) -> str:
    """The composition of the whole cell."""
    numbers, counts = trajectory.numbers.unique(return_counts=True)
    return "".join(f"{chemical_symbols[int(z)]}{int(n)}" for z, n in zip(numbers, counts, strict=True))


def is_validation(key: str, one_in: int, digits: int = 12) -> bool:
    """Whether this relaxation or structure is held out, by its key alone: it stays on its side, whatever comes later.

    `one_in`: one key in so many; `digits`: of the hash that decides.
    """
    return int(hashlib.sha256(key.encode()).hexdigest()[:digits], 16) % one_in == 0
