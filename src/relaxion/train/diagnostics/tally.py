"""What builds up: sums between two lines of the log, averages that outlive them, and relaxations under way (R9.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("values", "returns", "discounts", "bonus_discounts", "steps")
SLOW = 5  # the slow average remembers so many times longer: what "before" means when something is said to rise


@dataclass(frozen=True)
class Mean:
    """A mean and how many numbers it is of."""

    value: float
    count: float


class Tally:
    """Means, totals and minima since the last line."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}  # sum.NAME: sum and count; total.NAME and lowest.NAME: a number

    def mean(self, name: str, values: Tensor) -> None:
        """Numbers to be averaged; none is no number."""
        total, count = self._kept.get(f"sum.{name}", (0.0, 0.0))
        self._kept[f"sum.{name}"] = (total + float(values.double().sum()), count + values.numel())

    def total(self, name: str, value: float) -> None:
        self._kept[f"total.{name}"] = self._kept.get(f"total.{name}", 0.0) + value

    def lowest(self, name: str, values: Tensor) -> None:
        self._kept[f"lowest.{name}"] = min(self._kept.get(f"lowest.{name}", math.inf), float(values.min()))

    def take(self) -> tuple[dict[str, Mean], dict[str, float]]:
        """Means with their counts; totals and minima. Then everything begins anew."""
        kept = {tuple(key.split(".", 1)): value for key, value in self._kept.items()}
        self._kept = {}
        sums = {name: value for (kind, name), value in kept.items() if kind == "sum"}
        means = {name: Mean(total / count, count) for name, (total, count) in sums.items() if count}
        return means, {name: value for (kind, name), value in kept.items() if kind != "sum"}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: _exact(value) for name, value in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = {name: tensor.tolist() for name, tensor in tensors.items()}


class Averages:
    """Averages that forget: fast ones to judge by, slow ones to compare with. Counted in numbers, not in lines, so
    that the same run with another log interval is judged alike."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, float, float, float]] = {}  # fast sum, fast weight, slow sum, slow weight

    def add(self, name: str, mean: Mean, memory: float) -> None:
        """`memory`: how many of these numbers it takes to forget most of the old ones."""
        fast_sum, fast_weight, slow_sum, slow_weight = self._kept.get(name, (0.0, 0.0, 0.0, 0.0))
        kept, kept_slowly = math.exp(-mean.count / memory), math.exp(-mean.count / (SLOW * memory))
        self._kept[name] = (
            kept * fast_sum + (1 - kept) * mean.value,
            kept * fast_weight + (1 - kept),
            kept_slowly * slow_sum + (1 - kept_slowly) * mean.value,
            kept_slowly * slow_weight + (1 - kept_slowly),
        )

    def now(self) -> dict[str, float]:
        """Fast averages of what has been seen long enough, one memory at least, to be judged by."""
        enough = 1 - math.exp(-1) - 1e-9
        return {name: kept[0] / kept[1] for name, kept in self._kept.items() if kept[1] >= enough}

    def before(self) -> dict[str, float]:
        """Slow averages of all."""
        return {name: kept[2] / kept[3] for name, kept in self._kept.items()}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: _exact(kept) for name, kept in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = {name: tuple(tensor.tolist()) for name, tensor in tensors.items()}


def _exact(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Finished:
    """Relaxations that have ended, one number each."""

    values: Tensor  # the critic's expectation at the start; NaN where it was not asked
    returns: Tensor  # discounted, really obtained
    bonus_discounts: Tensor  # Σ γ^k over the steps after the first: what an entropy of 1 per step would have added


class RelaxationsUnderWay:
    """One place per structure of the environment."""

    def __init__(self) -> None:
        self._set_up(0)

    def _set_up(self, number: int) -> None:
        self.values, self.returns = torch.full((number,), torch.nan).double(), torch.zeros(number).double()
        self.discounts, self.bonus_discounts = torch.ones(number).double(), torch.zeros(number).double()
        self.steps = torch.zeros(number, dtype=torch.int64)

    def fresh(self, number: int) -> Tensor:
        """Places whose relaxation makes its first step now."""
        if len(self.steps) != number:
            self._set_up(number)
        return (self.steps == 0).nonzero().flatten()

    def begin(self, places: Tensor, values: Tensor | None) -> None:
        """What the critic expects of relaxations at their first step; None: it was not asked."""
        self.values[places] = torch.nan if values is None else values.double()

    def add(self, rewards: Tensor, discounts: Tensor, finished: Tensor) -> Finished:
        """One step of each; those that ended with it, whose places are free again."""
        self.bonus_discounts += torch.where(self.steps > 0, self.discounts, 0.0)
        self.returns += self.discounts * rewards.double()
        self.discounts *= discounts.double()
        self.steps += 1
        which = finished.nonzero().flatten()
        ended = Finished(self.values[which], self.returns[which], self.bonus_discounts[which])
        self.returns[which], self.discounts[which], self.bonus_discounts[which] = 0.0, 1.0, 0.0
        self.steps[which] = 0
        return ended

    def snapshot(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in COLUMNS}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in COLUMNS:
            setattr(self, name, tensors[name].clone())
