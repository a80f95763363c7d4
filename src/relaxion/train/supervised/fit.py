"""Examples, and the fit of a stiffness to them: B⁻¹F is to be the way to the minimum.

An example is a state of a relaxation with the way from there to its end. Where the relaxation was followed to its
minimum, the way is what B⁻¹F shall be (`towards_minimum`). Where the tolerance was loose, or a relaxation did not
converge, an example is a secant, B·(x_end - x) ≈ F - F_end, exact however loose the tolerance was (`secants_of`).

Gradient steps (Adam, or Muon for the matrices) go down the relative error of the step, measured in the energy of the
springs the network begins with, so that states near the minimum count as much as far ones:

    loss = mean √( e·B₀e / t·B₀t ),   e = B⁻¹(F - F_end) - t,   t = x_end - x  (strain included)

F_end is 0 where a relaxation was followed to its minimum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from ase.data import chemical_symbols
from pydantic import Field
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.files import Stored, joined
from relaxion.model.solve import solve
from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, pulls_of
from relaxion.settings import Settings
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.structures.structures import per_structure_sum
from relaxion.structures.trajectory import Trajectory
from relaxion.train.experience.environment import largest_force
from relaxion.train.experience.structure_replay import state_from_tensors, state_tensors

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
        goal = {"goal_displacements": self.goal.displacements, "goal_strains": self.goal.strains}
        return state_tensors(self.state) | goal

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> Examples:
        """The opposite of `tensors`."""
        return cls(state_from_tensors(named), Move(named["goal_displacements"], named["goal_strains"]))


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


# ---- the fit

NARROWEST = 8  # rows or columns of a matrix that Muon steps
SMALLEST_SQUARE = 1e-10  # of a relative error, where its root would have no gradient
LARGEST_GRADIENT_NORM = 1.0  # longer gradients are shortened: one odd structure must not throw the weights off
LEARNING_RATE = 3e-3  # of Adam at the start
FINAL_LEARNING_RATE = 1e-5
MUON_LEARNING_RATE = 0.02  # beside LEARNING_RATE; it changes as Adam's does


def relative_errors(network: StiffnessNetwork, examples: Examples) -> Tensor:
    """How far B⁻¹(F - F_end) misses the way to the end, relative to its length in the springs' energy, (number,)."""
    structures = examples.state.structures
    frame = SolveInputs.of(examples.state, network.settings, network.dtype)
    pulls = frame.pulls if examples.left_over is None else frame.pulls - examples.left_over
    goal = Unknowns(examples.goal.displacements.double(), strain_vectors(examples.goal.strains).double())
    missed = solve(network.stiffness(frame), pulls) - goal
    with torch.no_grad():
        springs = frame.prior().to(torch.float64)
        size = goal.dot(springs.apply(goal), structures)
    squares = missed.dot(springs.apply(missed), structures) / size.clamp_min(1e-300)
    return torch.sqrt(squares + SMALLEST_SQUARE)


class FitSettings(Settings):
    """How a stiffness is fitted, wherever its examples come from."""

    fit_updates: int = Field(default=0, ge=0)
    """Updates in all, each one of `steps`; the rate falls along half a cosine over them. 0: none; in the task
    stiffness, as many as `steps`."""

    examples_per_update: int = Field(default=64, ge=1)
    """States per update."""

    fit_learning_rate: float = Field(default=LEARNING_RATE, gt=0)
    """Of Adam, at the start."""

    fit_optimizer: Literal["adam", "muon"] = "adam"
    """What steps the matrices of the network (`by_muon`). From nothing Muon (torch 2.9 or newer) learns sooner. Adam
    steps all else always (docs/decisions.md)."""


def by_muon(parameter: Tensor) -> bool:
    """Whether this is a matrix of one network that is not too narrow for orthogonal steps. Filters, which have a third
    index, biases and the narrow matrices of inputs and answers are Adam's. Ours are (inputs, outputs), so that torch
    takes longer steps for matrices with more inputs than outputs; 0.02 was chosen with that."""
    return parameter.ndim == 3 and len(parameter) == 1 and min(parameter.shape[1:]) >= NARROWEST


class ExampleDataset:
    """Examples to draw from; all that is random comes from its own generator.

    Two kinds: relaxations made between the updates (`LiveExamples`), and those that a policy is fine-tuned with
    (`RelaxationSet`).
    """

    force_calls = 0  # spent on them

    def draw(self, _n_updates: int, /) -> tuple[Examples, dict[str, float]]:
        """Examples for the next update, so many having been made; and scalars for the log."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Tensor]:
        """What is nowhere else, for a checkpoint."""
        return {}

    def restore(self, stored: Stored) -> None:
        """The opposite of `snapshot`."""


class Fit:
    """`while not fit.done: fit.update()`."""

    def __init__(
        self,
        network: StiffnessNetwork,
        dataset: ExampleDataset,
        settings: FitSettings,
        final_learning_rate: float = FINAL_LEARNING_RATE,
    ) -> None:
        self.network = network
        self.dataset = dataset
        self.settings = settings
        self.final_learning_rate = final_learning_rate
        self.n_updates = 0
        self.parameters = list(network.parameters())
        wide = [by_muon(parameter) and settings.fit_optimizer == "muon" for parameter in self.parameters]
        self.matrices = [parameter for parameter, own in zip(self.parameters, wide, strict=True) if own]
        self.others = [parameter for parameter, own in zip(self.parameters, wide, strict=True) if not own]
        self.adam = torch.optim.Adam(self.others, lr=settings.fit_learning_rate, fused=True)
        for parameter in self.others:  # made here, where torch would with the first step: it can be restored
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self.adam.state[parameter] = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        self.muon = self._new_muon()

    def _new_muon(self) -> torch.optim.Optimizer | None:
        """Of the matrices as Muon takes them, without the place of the network; they share the parameters' memory."""
        if not self.matrices:
            return None
        if not hasattr(torch.optim, "Muon"):
            raise SettingsError(
                f"fit_optimizer = muon needs torch 2.9 or newer, this is {torch.__version__}; update torch, or "
                "choose fit_optimizer = adam, which takes twice the updates"
            )
        flat = [torch.nn.Parameter(parameter.detach()[0]) for parameter in self.matrices]
        muon = torch.optim.Muon(flat, lr=MUON_LEARNING_RATE, weight_decay=0.0)
        for matrix in flat:
            muon.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix, requires_grad=False)}
        return muon

    @property
    def done(self) -> bool:
        return self.n_updates >= self.settings.fit_updates

    @property
    def learning_rate(self) -> float:
        """At this point of the schedule."""
        share = min(1.0, self.n_updates / max(1, self.settings.fit_updates))
        first = self.settings.fit_learning_rate
        last = self.final_learning_rate
        return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

    def update(self) -> dict[str, float]:
        """One update with examples of the dataset; scalars for the log."""
        examples, scalars = self.dataset.draw(self.n_updates)
        return scalars | self.learn_from(examples)

    @torch.enable_grad()
    def learn_from(self, examples: Examples) -> dict[str, float]:
        """One update with these examples; scalars for the log."""
        rate = self.learning_rate
        errors = relative_errors(self.network, examples)
        gradients = torch.autograd.grad(errors.mean(), self.parameters, allow_unused=True, materialize_grads=True)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        if bool(torch.isfinite(norm)):  # a state that no weights can stand must not end all
            self._step(gradients, (LARGEST_GRADIENT_NORM / norm.clamp_min(1e-12)).clamp_max(1))
        self.n_updates += 1
        return {
            "fit/relative_error": float(errors.detach().mean()),
            "fit/relative_error_median": float(errors.detach().median()),
            "fit/gradient_norm": float(norm),
            "fit/learning_rate": rate,
        }

    def _step(self, gradients: tuple[Tensor, ...], factor: Tensor) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = (gradient * factor).contiguous()  # the fused kernel walks memory
        self.adam.param_groups[0]["lr"] = self.learning_rate
        self.adam.step()
        if self.muon is not None:
            [group] = self.muon.param_groups
            for flat, parameter in zip(group["params"], self.matrices, strict=True):
                assert parameter.grad is not None
                flat.grad = parameter.grad[0]
            first = MUON_LEARNING_RATE * (self.settings.fit_learning_rate / LEARNING_RATE)
            group["lr"] = self.learning_rate / self.settings.fit_learning_rate * first
            self.muon.step()
            self.muon.zero_grad()
        for parameter in self.parameters:
            parameter.grad = None

    def snapshot(self) -> dict[str, Tensor]:
        """Everything but the weights: what Adam and Muon remember, the dataset, counters."""
        memory = [self.adam.state[parameter] for parameter in self.others]
        optimizer = {"n_steps": memory[0]["step"]}
        for number, own in enumerate(memory):
            optimizer |= {f"means.{number}": own["exp_avg"], f"squares.{number}": own["exp_avg_sq"]}
        optimizer |= {f"momenta.{number}": momentum for number, momentum in enumerate(self._momenta())}
        optimizer = {name: tensor.clone() for name, tensor in optimizer.items()}
        counters = torch.tensor([self.n_updates, self.dataset.force_calls])
        return joined({"optimizer": optimizer, "dataset": self.dataset.snapshot()}) | {"counters": counters}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or a RuntimeError where they do not fit."""
        stored = Stored(dict(tensors), {})
        self.n_updates, self.dataset.force_calls = tensors["counters"].tolist()
        self.dataset.restore(Stored(stored.part("dataset"), {}))
        optimizer = stored.part("optimizer")
        for number, momentum in enumerate(self._momenta()):
            momentum.copy_(optimizer[f"momenta.{number}"])
        for number, parameter in enumerate(self.others):
            own = self.adam.state[parameter]
            own["step"].copy_(optimizer["n_steps"])
            own["exp_avg"].copy_(optimizer[f"means.{number}"])
            own["exp_avg_sq"].copy_(optimizer[f"squares.{number}"])

    def _momenta(self) -> list[Tensor]:
        if self.muon is None:
            return []
        return [self.muon.state[matrix]["momentum_buffer"] for matrix in self.muon.param_groups[0]["params"]]
