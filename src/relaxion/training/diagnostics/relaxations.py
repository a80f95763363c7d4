"""Relaxations under way: what the critic expected of each at its start, and what it has brought since (R9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = ("values", "returns", "discounts", "bonus_discounts", "steps")


@dataclass(frozen=True, eq=False)
class Finished:
    """Relaxations that have ended, one number each."""

    values: Tensor  # the critic's expectation at the start; NaN where it was not asked
    returns: Tensor  # discounted, really obtained
    bonus_discounts: Tensor  # Σ γ^k over the steps after the first: what an entropy of 1 per step would have added


class Relaxations:
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
