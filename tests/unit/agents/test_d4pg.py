"""D4PG by hand: three bins at -1, 0, 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from relaxion.errors import SettingsError
from relaxion.train.agents.d4pg import D4PG, D4PGSettings
from relaxion.train.experience.vectors import Batch
from relaxion.train.tasks.settings import read_settings


@pytest.fixture
def make_d4pg(linear: dict[str, Any]) -> Callable[..., D4PG]:
    def make(penalty: Any = None, **settings: Any) -> D4PG:
        values = {"critic_learning_rate": 1e-12, "n_bins": 3, "lowest_value": -1.0, "highest_value": 1.0} | settings
        critic = linear["bins"]([0.0, math.log(2), 0.0], [0.0, 0.0, 1.0])
        agent = D4PG(linear["policy"](0.0), critic, linear["pulls"](), D4PGSettings(**values), penalty)
        agent.target_critic.base.fill_(0.0)  # the target critic believes in all bins alike
        return agent

    return make


@pytest.fixture
def bin_batch(hand_batch: Batch, linear: dict[str, Any]) -> Batch:
    """Action 0, so that the critic says (¼, ½, ¼)."""
    return replace(
        hand_batch,
        actions=linear["pull"](torch.zeros(2)),
        rewards=torch.tensor([0.5, -1.0]),
        discounts=torch.tensor([0.5, 0.0]),
    )


def test_r5_1_and_r5_4_critic_loss_by_hand(make_d4pg: Callable[..., D4PG], bin_batch: Batch) -> None:
    """0.5 + 0.5 z = (0, ½, 1) each ⅓: target (0, ½, ½). The end at -1: target (1, 0, 0)."""
    metrics = make_d4pg().update(bin_batch)
    first, second = 0.5 * math.log(2) + 0.5 * math.log(4), math.log(4)
    assert float(metrics["train/critic_loss"]) == pytest.approx((first + second) / 2)
    assert float(metrics["train/target_mean"]) == pytest.approx((0.5 - 1) / 2)
    assert float(metrics["train/q_mean"]) == pytest.approx(0.0, abs=1e-7)
    assert float(metrics["train/support_edge_mass"]) == pytest.approx((0.5 + 1) / 2)


def test_r5_4_the_policy_climbs_the_expected_value(make_d4pg: Callable[..., D4PG], bin_batch: Batch) -> None:
    """E = (e^a - 1) / (3 + e^a): at a = 0 zero, with slope ¼ + 0; dL/dw = -mean(s / 4)."""
    agent = make_d4pg(policy_learning_rate=0.01)
    metrics = agent.update(bin_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(0.0, abs=1e-7)
    assert float(metrics["train/policy_gradient_norm"]) == pytest.approx((1 + 2) / 2 / 4)
    assert agent.policy.slope.item() == pytest.approx(0.01)


def test_r5_2_the_discount_of_several_steps_is_the_batchs(make_d4pg: Callable[..., D4PG], bin_batch: Batch) -> None:
    agent = make_d4pg()
    agent.target_critic.base.copy_(torch.tensor([-50.0, -50.0, 0.0]))  # surely 1
    three_steps = replace(bin_batch, rewards=torch.zeros(2), discounts=torch.full((2,), 0.9**3))
    assert float(agent.update(three_steps)["train/target_mean"]) == pytest.approx(0.729)


def test_critic_learns_and_policy_step_leaves_it_alone(make_d4pg: Callable[..., D4PG], bin_batch: Batch) -> None:
    agent = make_d4pg(critic_learning_rate=0.01)
    agent._update_policy(bin_batch)
    torch.testing.assert_close(agent.critic.base.detach(), torch.tensor([0.0, math.log(2), 0.0]), rtol=0, atol=0)
    losses = [float(agent.update(bin_batch)["train/critic_loss"]) for _ in range(100)]
    assert losses[0] == pytest.approx(1.2130, abs=1e-4)
    assert losses[-1] == pytest.approx(1.0397, abs=5e-3)  # the entropy of (½, ¼, ¼), the mean of both targets


def test_returns_outside_the_support_are_reported_with_the_numbers(make_d4pg: Callable[..., D4PG]) -> None:
    agent = make_d4pg(lowest_value=-10.0, highest_value=20.0)
    assert agent.check_returns(torch.tensor([-10.0, 0.0, 20.0])) is None
    sentence = agent.check_returns(torch.tensor([-12.5, 0.0, 21.0]))
    assert sentence is not None
    for part in ("2 of 3", "-12.5", "21", "-10 to 20", "lowest_value"):
        assert part in sentence


def test_mass_at_the_edges_shows_a_support_that_is_too_narrow(make_d4pg: Callable[..., D4PG], bin_batch: Batch) -> None:
    metrics = make_d4pg().update(replace(bin_batch, rewards=torch.tensor([5.0, -5.0])))
    assert float(metrics["train/support_edge_mass"]) == pytest.approx(1.0)


def test_a_support_upside_down_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"lowest_value 5\.0 must lie below highest_value 1\.0"):
        D4PGSettings.read({"lowest_value": 5.0, "highest_value": 1.0})


def test_a_critic_with_other_bins_is_refused_at_once(linear: dict[str, Any], bin_batch: Batch) -> None:
    agent = D4PG(linear["policy"](0.0), linear["bins"]([0.0] * 3, [0.0] * 3), linear["pulls"]())
    with pytest.raises(SettingsError, match="3 bins, the support 51"):
        agent.update(bin_batch)


@pytest.mark.parametrize(("agent", "given", "expected"), [("d4pg", {}, 5), ("d4pg", {"n_steps": 2}, 2), ("td3", {}, 1)])
def test_r5_2_several_steps_are_the_default(agent: str, given: dict[str, int], expected: int) -> None:
    settings = read_settings({"task": "Pendulum-v1", "agent": agent, **given})
    assert settings.flat()["n_steps"] == expected
    assert read_settings(settings.flat()) == settings
