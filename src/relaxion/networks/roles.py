"""What an agent may ask of a network. Observations and actions are opaque: vectors here, states and moves for atoms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class Policy(nn.Module, ABC):
    """Observations -> the best action it knows, differentiable."""

    @abstractmethod
    def forward(self, observations: Any) -> Any: ...


class StochasticPolicy(Policy):
    """A policy that can also draw; `forward` is the middle of what it draws."""

    @abstractmethod
    def sample(self, observations: Any, generator: torch.Generator) -> tuple[Any, Tensor, Tensor]:
        """Actions, their log densities (batch,) and action penalties (batch,), all differentiable."""


class Critics(nn.Module, ABC):
    """Several independent values of the same action, as one tensor (R3.2)."""

    @abstractmethod
    def forward(self, observations: Any, actions: Any) -> Tensor:
        """(batch, n_critics)."""

    def first(self, observations: Any, actions: Any) -> Tensor:
        """(batch,): the first critic alone. Override where it can be had without the others."""
        return self(observations, actions)[:, 0]


class CategoricalCritic(nn.Module, ABC):
    """A distribution over values instead of their mean."""

    @abstractmethod
    def forward(self, observations: Any, actions: Any) -> Tensor:
        """Logits of the value bins, (batch, n_bins)."""
