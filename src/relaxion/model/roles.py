"""What an agent may ask of networks and actions. Observations are opaque: vectors here, states for atoms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class Policy(nn.Module, ABC):
    """Observations -> the best action it knows, differentiable."""

    @abstractmethod
    def forward(self, observations: Any) -> Any: ...


class StochasticPolicy(Policy):
    """A policy that can also draw; `forward` is the middle of what it draws."""

    @abstractmethod
    def sample(self, observations: Any, generator: torch.Generator) -> tuple[Any, Tensor, Tensor]:
        """Actions, their log densities (batch,) and action penalties (batch,), all differentiable."""


def log_tanh_slope(values: Tensor) -> Tensor:
    """log(1 - tanh² u) = 2 (log 2 - u - softplus(-2u)), for every u; log(1 - a² + 1e-6) is off by 15 at u = 15."""
    return 2 * (math.log(2) - values - softplus(-2 * values))


def squashed_log_density(before_tanh: Tensor, noise: Tensor, log_deviation: Tensor) -> Tensor:
    """log p(tanh u) = log N(u) - Σ log(1 - tanh² u), u = mean + deviation · noise, (batch,)."""
    gaussian = -0.5 * noise.square() - log_deviation - 0.5 * math.log(2 * math.pi)
    return (gaussian - log_tanh_slope(before_tanh)).sum(dim=-1)


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


class ActionDomain(Protocol):
    """What an agent must be able to do with actions, be they vectors or moves of atoms."""

    def bound(self, actions: Any) -> Any:
        """The nearest actions inside the bounds."""
        ...

    def perturb(
        self,
        actions: Any,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: Any = None,
    ) -> Any:
        """Actions plus Gaussian noise, `scale` and `clip` in units of the action's half range; not yet bounded.

        The observations the actions belong to are for domains whose unit depends on them.
        """
        ...

    def random(self, observations: Any, generator: torch.Generator) -> Any:
        """Uniform actions within the bounds, for warm-up."""
        ...

    def dimensions(self, observations: Any) -> Tensor:
        """Number of components of each action, (batch,): SAC's target entropy is minus this."""
        ...
