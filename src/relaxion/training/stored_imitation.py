"""Supervised learning of the metric from lessons that are all there: Adam on the relative error of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from relaxion.agents.shared import adam, backward, restore_snapshot, take_snapshot
from relaxion.networks.metric.lessons import Lessons, relative_errors
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.training.universal_settings import UniversalSettings


class StoredImitation:
    """`while not learner.done: learner.update()`. Groups of lessons are drawn from by shares, lessons by weights."""

    def __init__(
        self,
        policy: MetricPolicy,
        lessons: Mapping[str, Lessons],
        shares: Mapping[str, float],
        weights: Mapping[str, Tensor],
        settings: UniversalSettings,
        generator: torch.Generator,
    ) -> None:
        self.policy, self.lessons, self.settings, self.generator = policy, dict(lessons), settings, generator
        self.names = [name for name in self.lessons if shares[name] > 0]
        self.shares = torch.tensor([shares[name] for name in self.names], dtype=torch.float64)
        self.sums = {name: weights[name].double().cumsum(0) for name in self.names}
        self.parameters = list(policy.network.parameters())
        self.optimizer = adam(self.parameters, settings.learning_rate)
        self.counters = torch.zeros(1, dtype=torch.int64)  # updates

    @property
    def n_updates(self) -> int:
        return int(self.counters[0])

    @property
    def done(self) -> bool:
        return self.n_updates >= self.settings.n_updates

    def update(self) -> dict[str, float]:
        """One update, and what it showed."""
        self.optimizer.param_groups[0]["lr"] = learning_rate = self._learning_rate()
        errors = relative_errors(self.policy.network, self.sample(self.settings.n_lessons))
        gradients = backward(errors.mean(), self.optimizer)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        if bool(torch.isfinite(norm)):  # a state that no weights can stand must not end all
            factor = (self.settings.largest_gradient_norm / norm.clamp_min(1e-12)).clamp_max(1)
            for gradient in gradients:
                gradient.mul_(factor)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.counters[0] += 1
        return {
            "imitation/relative_error": float(errors.detach().mean()),
            "imitation/relative_error_median": float(errors.detach().median()),
            "imitation/gradient_norm": float(norm),
            "imitation/learning_rate": learning_rate,
        }

    def sample(self, number: int) -> Lessons:
        """So many lessons, from the groups by their shares."""
        drawn = torch.multinomial(self.shares, number, replacement=True, generator=self.generator)
        parts = []
        for place, name in enumerate(self.names):
            count = int((drawn == place).sum())
            if count:
                sums = self.sums[name]
                places = torch.rand(count, generator=self.generator, dtype=torch.float64) * sums[-1]
                parts.append(self.lessons[name].select(torch.searchsorted(sums, places).clamp_max(len(sums) - 1)))
        return Lessons.concatenate(parts)

    def _learning_rate(self) -> float:
        share = min(1.0, self.n_updates / self.settings.n_updates)
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

    def snapshot(self) -> dict[str, Tensor]:
        """Weights, Adam, generator, counter; the lessons stay in their store."""
        return take_snapshot(self._parts())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on exactly where the snapshot was taken."""
        restore_snapshot(self._parts(), tensors)

    def _parts(self) -> dict:
        return {
            "policy": self.policy,
            "optimizer": self.optimizer,
            "generator": self.generator,
            "counters": self.counters,
        }


def mean_error(policy: MetricPolicy, lessons: Lessons, batch: int = 256) -> float:
    """The mean relative error on all of the lessons, without learning from them."""
    errors = []
    with torch.no_grad():
        for first in range(0, lessons.number, batch):
            which = torch.arange(first, min(first + batch, lessons.number))
            errors.append(relative_errors(policy.network, lessons.select(which)))
    return float(torch.cat(errors).mean())
