"""Linear networks on one number, small enough to work every loss out by hand; observations are opaque on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relaxion.model.roles import CategoricalCritic, Critics, Policy, StochasticPolicy
from relaxion.train.agents.shared import parameters_of
from relaxion.train.experience.vectors import Batch


@dataclass(frozen=True)
class Seen:
    """No tensor: an agent that indexes, concatenates or measures observations fails here."""

    place: Tensor  # (batch,)


@dataclass(frozen=True)
class Pull:
    """No tensor either."""

    force: Tensor  # (batch,)


class Pulls:
    """The action domain of `Pull`, between `low` and `high`."""

    def __init__(self, low: float = -1.0, high: float = 2.0, dimensions: Tensor | None = None) -> None:
        self.low, self.high = low, high
        self.each = dimensions

    def bound(self, actions: Pull) -> Pull:
        return Pull(actions.force.clamp(self.low, self.high))

    def perturb(
        self,
        actions: Pull,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: Seen | None = None,  # noqa: ARG002
    ) -> Pull:
        noise = scale * torch.randn(actions.force.shape, generator=generator)
        noise = noise if clip is None else noise.clamp(-clip, clip)
        return Pull(actions.force + (self.high - self.low) / 2 * noise)

    def random(self, observations: Seen, generator: torch.Generator) -> Pull:
        return Pull(self.low + (self.high - self.low) * torch.rand(observations.place.shape, generator=generator))

    def dimensions(self, observations: Seen) -> Tensor:
        return torch.ones_like(observations.place) if self.each is None else self.each


class LinearPolicy(Policy):
    """π(s) = w s."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, observations: Seen) -> Pull:
        return Pull(self.slope * observations.place)


class LinearStochasticPolicy(StochasticPolicy):
    """Always draws w s, with "log density" -w s and penalty 0.1 s: made up, so that each term can be told apart."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, observations: Seen) -> Pull:
        return Pull(self.slope * observations.place)

    def sample(self, observations: Seen, generator: torch.Generator) -> tuple[Pull, Tensor, Tensor]:
        torch.randn(1, generator=generator)
        actions = self(observations)
        return actions, -actions.force, 0.1 * observations.place


class LinearCritics(Critics):
    """Q_i(s, a) = u_i s + v_i a."""

    def __init__(self, of_place: list[float], of_force: list[float]) -> None:
        super().__init__()
        self.of_place = nn.Parameter(torch.tensor(of_place))
        self.of_force = nn.Parameter(torch.tensor(of_force))

    def forward(self, observations: Seen, actions: Pull) -> Tensor:
        return torch.outer(observations.place, self.of_place) + torch.outer(actions.force, self.of_force)


class LinearBins(CategoricalCritic):
    """Logits b + v a."""

    def __init__(self, base: list[float], of_force: list[float]) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.tensor(base))
        self.of_force = nn.Parameter(torch.tensor(of_force))

    def forward(self, observations: Seen, actions: Pull) -> Tensor:
        return self.base.expand(len(observations.place), -1) + torch.outer(actions.force, self.of_force)


@pytest.fixture
def hand_batch() -> Batch:
    """Two transitions; the second one ends its episode."""
    return Batch(
        observations=Seen(torch.tensor([1.0, 2.0])),
        actions=Pull(torch.tensor([0.1, -0.2])),
        rewards=torch.tensor([1.0, -1.0]),
        discounts=torch.tensor([0.9, 0.0]),
        next_observations=Seen(torch.tensor([2.0, 1.0])),
    )


@pytest.fixture
def linear() -> dict[str, Any]:
    """The small networks by name, for tests that cannot import from here."""
    return {
        "policy": LinearPolicy,
        "stochastic_policy": LinearStochasticPolicy,
        "critics": LinearCritics,
        "bins": LinearBins,
        "pulls": Pulls,
        "seen": Seen,
        "pull": Pull,
    }


@pytest.fixture
def spy_on_losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[set[int]]]:
    """Records, for every loss an agent's module descends, which parameters got a gradient (ids)."""

    def install(module: Any) -> list[set[int]]:
        stepped: list[set[int]] = []
        original = module.descend

        def spy(loss: Tensor, optimizer: Any, **options: Any) -> Tensor:
            stepped.append({id(parameter) for parameter in parameters_of(optimizer)})
            return original(loss, optimizer, **options)

        monkeypatch.setattr(module, "descend", spy)
        return stepped

    return install
