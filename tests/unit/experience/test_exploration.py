"""Warm-up, noise in units of the action, schedules."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from relaxion.train.agents.shared import Exploration, LinearSchedule
from relaxion.train.agents.vector_networks import BoxActions

LOW, HIGH = [-1.0, 10.0], [3.0, 10.5]


class Noisy:
    """Explores around the middle of the bounds, as TD3 does around its policy."""

    exploration_scale = 99.0

    def __init__(self, domain: BoxActions) -> None:
        self.domain = domain

    def explore(self, observations: Tensor, generator: Generator) -> Tensor:
        middle = self.domain.centre.expand(len(observations), -1)
        return self.domain.bound(self.domain.perturb(middle, self.exploration_scale, generator))


def make_exploration(generator: Generator, noise: LinearSchedule | None) -> Exploration:
    domain = BoxActions(LOW, HIGH)
    return Exploration(Noisy(domain), domain, generator, warmup_steps=10, noise=noise)


def test_schedule() -> None:
    schedule = LinearSchedule(0.5, 0.1, 100)
    assert [schedule(step) for step in (0, 50, 100, 1000)] == [0.5, 0.3, 0.1, 0.1]
    assert [LinearSchedule(0.3, 0.3, 7)(step) for step in (0, 3, 9)] == pytest.approx([0.3] * 3)


def test_warm_up_is_uniform_within_the_bounds(generator: Generator) -> None:
    actions = make_exploration(generator, None)(torch.zeros(20_000, 3), 9, 0)
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    assert bool(((actions >= low) & (actions <= high)).all())
    shares = (actions - low) / (high - low)
    torch.testing.assert_close(shares.mean(dim=0), torch.full((2,), 0.5), atol=0.01, rtol=0)
    torch.testing.assert_close(shares.var(dim=0), torch.full((2,), 1 / 12), atol=0.003, rtol=0)


def test_warm_up_ends_when_enough_is_stored(generator: Generator) -> None:
    exploration = make_exploration(generator, LinearSchedule(0.0, 0.0, 1))
    assert exploration.warming_up(9)
    assert not exploration.warming_up(10)
    assert exploration(torch.zeros(1, 3), 10, 10).tolist() == [[1.0, 10.25]]


@pytest.mark.parametrize(("step", "scale"), [(0, 0.2), (50, 0.15), (100, 0.1)])
def test_noise_follows_the_schedule_in_half_ranges(step: int, scale: float, generator: Generator) -> None:
    actions = make_exploration(generator, LinearSchedule(0.2, 0.1, 100))(torch.zeros(20_000, 3), 10, step)
    expected = scale * torch.tensor([2.0, 0.25])
    torch.testing.assert_close(actions.std(dim=0), expected, rtol=0.03, atol=0)
