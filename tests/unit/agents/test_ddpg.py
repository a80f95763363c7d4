"""DDPG by hand: π(s) = 0.5 s, Q = s + 2a; the target policy stands at 0.4 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import relaxion.train.agents.ddpg as module
from relaxion.train.agents.ddpg import DDPG, DDPGSettings
from relaxion.train.experience.vectors import Batch


@pytest.fixture
def make_ddpg(linear: dict[str, Any]) -> Callable[..., DDPG]:
    def make(penalty: Any = None, **settings: Any) -> DDPG:
        values = {"critic_learning_rate": 1e-12} | settings
        critic = linear["critics"]([1.0], [2.0])
        agent = DDPG(linear["policy"](0.5), critic, linear["pulls"](), DDPGSettings(**values), penalty)
        agent.target_policy.slope.fill_(0.4)
        return agent

    return make


def test_r4_1_critic_loss_by_hand(make_ddpg: Callable[..., DDPG], hand_batch: Batch) -> None:
    """a' = 0.8, Q' = 3.6: y = (1 + 0.9·3.6, -1); Q = (1.2, 1.6)."""
    metrics = make_ddpg().update(hand_batch)
    assert float(metrics["train/critic_loss"]) == pytest.approx(((1.2 - 4.24) ** 2 + 2.6**2) / 2)
    assert float(metrics["train/target_mean"]) == pytest.approx((4.24 - 1) / 2)


def test_r4_1_policy_loss_by_hand(make_ddpg: Callable[..., DDPG], hand_batch: Batch) -> None:
    agent = make_ddpg(policy_learning_rate=0.01)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(-3.0)
    assert agent.policy.slope.item() == pytest.approx(0.51)


def test_r4_1_targets_keep_all_but_a_thousandth_at_every_update(
    make_ddpg: Callable[..., DDPG], hand_batch: Batch
) -> None:
    agent = make_ddpg(policy_learning_rate=0.01, critic_learning_rate=0.01)
    agent.update(hand_batch)
    assert DDPGSettings().target_update_rate == 1e-3
    assert agent.target_policy.slope.item() == pytest.approx(0.4 + 1e-3 * (0.51 - 0.4), abs=1e-7)
    assert agent.target_critic.of_force.item() == pytest.approx(2 + 1e-3 * 0.01, abs=1e-6)


def test_r4_2_the_policy_steps_by_its_own_gradient_only(
    make_ddpg: Callable[..., DDPG], hand_batch: Batch, spy_on_losses: Callable[[Any], list[set[int]]]
) -> None:
    """Leftovers put into .grad by someone else must not matter either."""
    agent = make_ddpg(policy_learning_rate=0.01)
    stepped = spy_on_losses(module)
    for parameter in [*agent.policy.parameters(), *agent.critic.parameters()]:
        parameter.grad = torch.full_like(parameter, 1e6)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/policy_gradient_norm"]) == pytest.approx(3.0)
    assert agent.policy.slope.item() == pytest.approx(0.51)
    assert stepped == [{id(p) for p in agent.critic.parameters()}, {id(p) for p in agent.policy.parameters()}]


def test_explore_is_noisy_and_act_is_not(make_ddpg: Callable[..., DDPG], linear: dict[str, Any]) -> None:
    agent = make_ddpg(exploration_noise=0.2)
    seen = linear["seen"](torch.ones(20_000))
    tried = agent.explore(seen, torch.Generator().manual_seed(0)).force
    assert float(tried.std()) == pytest.approx(0.2 * 1.5, rel=0.03)
    assert torch.equal(agent.act(seen).force, torch.full((20_000,), 0.5))


def test_a_penalty_joins_the_policy_loss(make_ddpg: Callable[..., DDPG], hand_batch: Batch) -> None:
    agent = make_ddpg(penalty=lambda batch, actions: 10 * (actions.force - batch.actions.force).square())
    assert float(agent.update(hand_batch)["train/actor_loss"]) == pytest.approx(-3 + 8)
