"""The teacher of a metric: B⁻¹F is to be the way to the minimum.

Gradient steps (Adam, or Muon for the matrices) on the relative error of the step, measured in the energy of the springs
the network begins with, so that states near the minimum count as much as far ones:

    loss = mean √( e·B₀e / t·B₀t ),   e = B⁻¹(F - F_end) - t,   t = x_end - x  (strain included)

Lessons come from live relaxations or a store (`training`), or from the relaxation just finished
(`optimize/adaptation.py`); F_end is 0 where a relaxation was followed to its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.networks.metric.network import Frame, MetricNetwork, pulls_of
from relaxion.networks.metric.solve import solve
from relaxion.networks.metric.stiffness import Unknowns
from relaxion.networks.strains import strain_vectors
from relaxion.settings import Settings
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.structures.structures import per_structure_sum

NARROWEST = 8  # rows or columns of a matrix that Muon steps
SMALLEST_SQUARE = 1e-10  # of a relative error, where its root would have no gradient


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
        if self.left_over is not None:
            named |= {"left_over_atoms": self.left_over.atoms, "left_over_cells": self.left_over.cells}
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
        rest = Unknowns(named["left_over_atoms"], named["left_over_cells"]) if "left_over_atoms" in named else None
        return cls(state, Move(named["goal_displacements"], named["goal_strains"]), rest)


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


def relative_errors(network: MetricNetwork, lessons: Lessons) -> Tensor:
    """How far B⁻¹(F - F_end) misses the way to the end, relative to its length in the springs' energy, (n_lessons,)."""
    structures = lessons.state.structures
    frame = Frame.of(lessons.state, network.settings, network.dtype)
    pulls = frame.pulls if lessons.left_over is None else frame.pulls - lessons.left_over
    goal = Unknowns(lessons.goal.displacements.double(), strain_vectors(lessons.goal.strains).double())
    missed = solve(network.stiffness(frame), pulls) - goal
    with torch.no_grad():
        springs = frame.prior(network.settings).to(torch.float64)
        size = goal.dot(springs.apply(goal), structures)
    squares = missed.dot(springs.apply(missed), structures) / size.clamp_min(1e-300)
    return torch.sqrt(squares + SMALLEST_SQUARE)


class TeachingSettings(Settings):
    """How a metric learns, wherever its lessons come from."""

    lesson_updates: int = Field(default=0, ge=0)
    """Updates in all, each one of `steps`; the rate falls along half a cosine over them. 0: none."""

    lessons_per_update: int = Field(default=64, ge=1)
    """States per update."""

    lesson_learning_rate: float = Field(default=3e-3, gt=0)
    """Of Adam, at the start."""

    lesson_learning_rate_final: float = Field(default=1e-5, gt=0)
    """At the end."""

    lesson_largest_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened: one odd structure must not throw the weights off."""

    lesson_optimizer: Literal["adam", "muon"] = "adam"
    """What steps the matrices of the network (`by_muon`). From nothing Muon (torch 2.9 or newer) learns sooner. Adam
    steps all else always (docs/decisions.md)."""

    lesson_muon_learning_rate: float = Field(default=0.02, gt=0)
    """Of Muon at the start; it falls as Adam's does."""

    younger = ("lesson_optimizer", "lesson_muon_learning_rate")


def by_muon(parameter: Tensor) -> bool:
    """Whether this is a matrix of one network that is not too narrow for orthogonal steps. Filters, which have a third
    index, biases and the narrow matrices of inputs and answers are Adam's. Ours are (inputs, outputs), so that torch
    takes longer steps for matrices with more inputs than outputs; 0.02 was chosen with that."""
    return parameter.ndim == 3 and len(parameter) == 1 and min(parameter.shape[1:]) >= NARROWEST


class Teacher:
    """`update(lessons)`: one step of the parameter optimizers. Who calls it chooses the lessons."""

    def __init__(self, network: MetricNetwork, settings: TeachingSettings) -> None:
        self.network, self.settings, self.n_updates = network, settings, 0
        self.parameters = list(network.parameters())
        wide = [by_muon(parameter) and settings.lesson_optimizer == "muon" for parameter in self.parameters]
        self.matrices = [parameter for parameter, own in zip(self.parameters, wide, strict=True) if own]
        self.others = [parameter for parameter, own in zip(self.parameters, wide, strict=True) if not own]
        self.optimizer = torch.optim.Adam(self.others, lr=settings.lesson_learning_rate, fused=True)
        for parameter in self.others:  # made here, where torch would with the first step: it can be restored
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self.optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        self.muon = self._new_muon()

    def _new_muon(self) -> torch.optim.Optimizer | None:
        """Of the matrices as Muon wants them, without the place of the network; they share the parameters' memory."""
        if not self.matrices:
            return None
        if not hasattr(torch.optim, "Muon"):
            raise SettingsError(
                f"lesson_optimizer = muon needs torch 2.9 or newer, this is {torch.__version__}; update torch, or "
                "choose lesson_optimizer = adam, which takes twice the updates"
            )
        flat = [torch.nn.Parameter(parameter.detach()[0]) for parameter in self.matrices]
        muon = torch.optim.Muon(flat, lr=self.settings.lesson_muon_learning_rate, weight_decay=0.0)
        for matrix in flat:
            muon.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix, requires_grad=False)}
        return muon

    @property
    def learning_rate(self) -> float:
        """At this point of the schedule."""
        share = min(1.0, self.n_updates / max(1, self.settings.lesson_updates))
        first, last = self.settings.lesson_learning_rate, self.settings.lesson_learning_rate_final
        return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

    @torch.enable_grad()
    def update(self, lessons: Lessons) -> dict[str, float]:
        """Learn from these, and what it showed."""
        rate = self.learning_rate
        errors = relative_errors(self.network, lessons)
        gradients = torch.autograd.grad(errors.mean(), self.parameters, allow_unused=True, materialize_grads=True)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        if bool(torch.isfinite(norm)):  # a state that no weights can stand must not end all
            self._step(gradients, (self.settings.lesson_largest_gradient_norm / norm.clamp_min(1e-12)).clamp_max(1))
        self.n_updates += 1
        return {
            "imitation/relative_error": float(errors.detach().mean()),
            "imitation/relative_error_median": float(errors.detach().median()),
            "imitation/gradient_norm": float(norm),
            "imitation/learning_rate": rate,
        }

    def _step(self, gradients: tuple[Tensor, ...], factor: Tensor) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = (gradient * factor).contiguous()  # the fused kernel walks memory
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        self.optimizer.step()
        if self.muon is not None:
            [group] = self.muon.param_groups
            for flat, parameter in zip(group["params"], self.matrices, strict=True):
                assert parameter.grad is not None
                flat.grad = parameter.grad[0]
            share = self.learning_rate / self.settings.lesson_learning_rate
            group["lr"] = share * self.settings.lesson_muon_learning_rate
            self.muon.step()
            self.muon.zero_grad()
        for parameter in self.parameters:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """What Adam and Muon remember, for a checkpoint."""
        memory = [self.optimizer.state[parameter] for parameter in self.others]
        named = {"n_steps": memory[0]["step"]}
        for number, own in enumerate(memory):
            named |= {f"means.{number}": own["exp_avg"], f"squares.{number}": own["exp_avg_sq"]}
        named |= {f"momenta.{number}": momentum for number, momentum in enumerate(self._momenta())}
        return {name: tensor.clone() for name, tensor in named.items()}

    def _momenta(self) -> list[Tensor]:
        if self.muon is None:
            return []
        return [self.muon.state[matrix]["momentum_buffer"] for matrix in self.muon.param_groups[0]["params"]]

    def restore(self, tensors: Mapping[str, Tensor], n_updates: int) -> None:
        """The opposite of `tensors`; a KeyError or a RuntimeError where they do not fit."""
        self.n_updates = n_updates
        for number, momentum in enumerate(self._momenta()):
            momentum.copy_(tensors[f"momenta.{number}"])
        for number, parameter in enumerate(self.others):
            own = self.optimizer.state[parameter]
            own["step"].copy_(tensors["n_steps"])
            own["exp_avg"].copy_(tensors[f"means.{number}"])
            own["exp_avg_sq"].copy_(tensors[f"squares.{number}"])
