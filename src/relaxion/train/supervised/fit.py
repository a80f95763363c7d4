"""The fit of a stiffness to examples: B⁻¹F is to be the way to the minimum.

Gradient steps (Adam, or Muon for the matrices) on the relative error of the step, measured in the energy of the springs
the network begins with, so that states near the minimum count as much as far ones:

    loss = mean √( e·B₀e / t·B₀t ),   e = B⁻¹(F - F_end) - t,   t = x_end - x  (strain included)

F_end is 0 where a relaxation was followed to its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.files import Stored, joined
from relaxion.model.solve import solve
from relaxion.model.stiffness import Unknowns, strain_vectors
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork
from relaxion.settings import Settings
from relaxion.train.supervised.examples import Examples

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
