"""The teacher of a metric: B⁻¹F is to be the way to the minimum.

Adam on the relative error of the step, measured in the energy of the springs the network begins with, so that states
near the minimum count as much as far ones:

    loss = mean √( e·B₀e / t·B₀t ),   e = B⁻¹(F - F_end) - t,   t = x_end - x  (strain included)

Lessons come from live relaxations, a store or replay (`training`), or from the relaxation just finished
(`optimize/adaptation.py`); F_end is 0 where a relaxation was followed to its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from relaxion.networks.metric.lessons import Lessons, relative_errors
from relaxion.networks.metric.network import MetricNetwork
from relaxion.settings import Settings


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


class Teacher:
    """`update(lessons)`: one step of Adam. Who calls it chooses the lessons."""

    def __init__(self, network: MetricNetwork, settings: TeachingSettings) -> None:
        self.network, self.settings, self.n_updates = network, settings, 0
        self.parameters = list(network.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.lesson_learning_rate, fused=True)
        for parameter in self.parameters:  # made here, where torch would with the first step: it can be restored
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self.optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

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
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Adam's memory, for a checkpoint."""
        memory = [self.optimizer.state[parameter] for parameter in self.parameters]
        named = {"n_steps": memory[0]["step"]}
        for number, own in enumerate(memory):
            named |= {f"means.{number}": own["exp_avg"], f"squares.{number}": own["exp_avg_sq"]}
        return {name: tensor.clone() for name, tensor in named.items()}

    def restore(self, tensors: Mapping[str, Tensor], n_updates: int) -> None:
        """The opposite of `tensors`; a KeyError or a RuntimeError where they do not fit."""
        self.n_updates = n_updates
        for number, parameter in enumerate(self.parameters):
            own = self.optimizer.state[parameter]
            own["step"].copy_(tensors["n_steps"])
            own["exp_avg"].copy_(tensors[f"means.{number}"])
            own["exp_avg_sq"].copy_(tensors[f"squares.{number}"])
