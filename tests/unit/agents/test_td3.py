"""TD3 by hand: π(s) = 0.5 s, Q1 = s + 2a, Q2 = s/2 + 3a; the target policy stands at 0.4 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import relaxion.train.agents.td3 as module
from relaxion.train.agents.shared import parameters_of
from relaxion.train.agents.td3 import TD3, TD3Settings
from relaxion.train.experience.vectors import Batch

STILL = 1e-12  # a learning rate that leaves the critics where they are


@pytest.fixture
def make_td3(linear: dict[str, Any], generator: torch.Generator) -> Callable[..., TD3]:
    def make(penalty: Any = None, **settings: Any) -> TD3:
        values = {"target_noise": 0.0, "policy_delay": 1, "critic_learning_rate": STILL} | settings
        critics = linear["critics"]([1.0, 0.5], [2.0, 3.0])
        agent = TD3(linear["policy"](0.5), critics, linear["pulls"](), generator, TD3Settings(**values), penalty)
        agent.target_policy.slope.fill_(0.4)
        return agent

    return make


def test_r2_1_three_networks_a_target_of_each_and_two_parameter_optimizers(make_td3: Callable[..., TD3]) -> None:
    agent = make_td3()
    assert {id(p) for p in parameters_of(agent.policy_optimizer)} == {id(p) for p in agent.policy.parameters()}
    assert {id(p) for p in parameters_of(agent.critic_optimizer)} == {id(p) for p in agent.critics.parameters()}
    for target, online in ((agent.target_policy, agent.policy), (agent.target_critics, agent.critics)):
        assert target is not online
        assert not any(parameter.requires_grad for parameter in target.parameters())


def test_r2_3_and_r2_4_critic_loss_by_hand(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    """a' = 0.8: min(3.6, 3.4) = 3.4, y = (1 + 0.9·3.4, -1); Q1 = (1.2, 1.6), Q2 = (0.8, 0.4)."""
    metrics = make_td3().update(hand_batch)
    by_hand = ((1.2 - 4.06) ** 2 + 2.6**2) / 2 + ((0.8 - 4.06) ** 2 + 1.4**2) / 2
    assert by_hand == pytest.approx(13.7636)
    assert float(metrics["train/critic_loss"]) == pytest.approx(13.7636, rel=1e-6)
    assert float(metrics["train/target_mean"]) == pytest.approx((4.06 - 1) / 2)
    assert float(metrics["train/q_mean"]) == pytest.approx((1.2 + 1.6 + 0.8 + 0.4) / 4)


def test_r2_4_critics_step_against_the_gradient_on_the_stored_action(
    make_td3: Callable[..., TD3], hand_batch: Batch
) -> None:
    """dL/dv_i = mean 2 (Q_i - y) a: Q1 (2·-2.86·0.1 + 2·2.6·-0.2)/2 = -0.806, so v_1 grows by Adam's first step."""
    agent = make_td3(critic_learning_rate=0.01, policy_delay=2)
    agent.update(hand_batch)
    torch.testing.assert_close(agent.critics.of_force.detach(), torch.tensor([2.01, 3.01]))
    torch.testing.assert_close(agent.critics.of_place.detach(), torch.tensor([0.99, 0.51]))


def test_r2_5_only_the_first_critic_guides_a_fresh_action(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    """-mean Q1(s, 0.5 s) = -mean(2, 4); dL/dw = -mean(2 s) = -3."""
    agent = make_td3(policy_learning_rate=0.01)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(-3.0)
    assert float(metrics["train/policy_gradient_norm"]) == pytest.approx(3.0)
    assert agent.policy.slope.item() == pytest.approx(0.51)


def test_r2_5_policy_and_targets_wait_for_every_second_update(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    agent = make_td3(policy_delay=2, policy_learning_rate=0.01, critic_learning_rate=0.01)
    for number in range(1, 5):
        before = {name: tensor for name, tensor in agent.snapshot().items() if "policy" in name or "target" in name}
        metrics = agent.update(hand_batch)
        after = agent.snapshot()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert ("train/actor_loss" in metrics) == (number % 2 == 0)
        assert bool(moved) == (number % 2 == 0)
        assert int(metrics["train/n_updates"]) == number


def test_r2_5_the_policy_step_gives_the_critics_no_gradient(
    make_td3: Callable[..., TD3], hand_batch: Batch, spy_on_losses: Callable[[Any], list[set[int]]]
) -> None:
    agent = make_td3(critic_learning_rate=0.01)
    stepped = spy_on_losses(module)
    agent._update_policy(hand_batch)
    torch.testing.assert_close(agent.critics.of_force.detach(), torch.tensor([2.0, 3.0]), rtol=0, atol=0)
    agent._update_critics(hand_batch)
    assert stepped == [{id(p) for p in agent.policy.parameters()}, {id(p) for p in agent.critics.parameters()}]
    for network in (agent.policy, agent.critics, agent.target_policy, agent.target_critics):
        assert all(parameter.grad is None for parameter in network.parameters())


def test_r2_6_soft_update_by_hand(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    """w' = 0.4 + 0.005 (0.501 - 0.4)."""
    agent = make_td3(policy_learning_rate=1e-3, critic_learning_rate=0.01)
    agent.update(hand_batch)
    assert agent.target_policy.slope.item() == pytest.approx(0.400505, abs=1e-7)
    torch.testing.assert_close(agent.target_critics.of_force, torch.tensor([2.00005, 3.00005]), rtol=0, atol=1e-6)
    assert TD3Settings().target_update_rate == 0.005


def test_r2_2_smoothing_noise_is_in_units_of_the_action_clipped_and_bounded(
    make_td3: Callable[..., TD3], linear: dict[str, Any]
) -> None:
    agent = make_td3(target_noise=0.2, target_noise_clip=0.3)
    agent.action_domain = linear["pulls"](low=-30.0, high=70.0)  # half range 50
    next_observations = linear["seen"](torch.zeros(20_000))
    noise = agent._smoothed_target_actions(next_observations).force
    assert float(noise.abs().max()) == pytest.approx(0.3 * 50)
    inside = noise[noise.abs() < 0.3 * 50 - 1e-3]
    assert len(inside) / len(noise) == pytest.approx(0.8664, abs=0.01)  # |N(0,1)| < 1.5
    assert float(inside.std()) == pytest.approx(0.2 * 50 * 0.7426, rel=0.03)  # of a Gaussian cut at 1.5
    near_the_bound = agent._smoothed_target_actions(linear["seen"](torch.full((1000,), 170.0))).force  # π' = 68
    assert float(near_the_bound.max()) == 70.0
    assert float(near_the_bound.min()) >= 68 - 0.3 * 50 - 1e-3


def test_the_smoothing_noise_reaches_the_target(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    quiet = make_td3().update(hand_batch)["train/target_mean"]
    noisy = [make_td3(target_noise=0.2).update(hand_batch)["train/target_mean"] for _ in range(2)]
    assert float(noisy[0]) != float(noisy[1])
    assert float(quiet) not in {float(value) for value in noisy}


def test_explore_adds_noise_of_the_scheduled_size_and_stays_inside(
    make_td3: Callable[..., TD3], linear: dict[str, Any], make_generator: Callable[[int], torch.Generator]
) -> None:
    agent = make_td3(exploration_noise=0.1)
    still = linear["seen"](torch.full((20_000,), 1.0))  # π = 0.5, the middle of -1 … 2
    first = agent.explore(still, make_generator(0)).force
    assert float(first.std()) == pytest.approx(0.1 * 1.5, rel=0.03)
    agent.exploration_scale = 0.0
    assert torch.equal(agent.explore(still, make_generator(0)).force, agent.act(still).force)
    agent.exploration_scale = 10.0
    wild = agent.explore(still, make_generator(0)).force
    assert (float(wild.min()), float(wild.max())) == (-1.0, 2.0)
    assert not wild.requires_grad


def test_a_penalty_joins_the_policy_loss(make_td3: Callable[..., TD3], hand_batch: Batch) -> None:
    """λ (a_fresh - a_stored)² with λ = 10: mean(10·0.4², 10·1.2²) = 8; dL/dw = -3 + mean(20·0.4·1, 20·1.2·2) = 25."""
    agent = make_td3(penalty=lambda batch, actions: 10 * (actions.force - batch.actions.force).square())
    metrics = agent.update(hand_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(-3 + 8)
    assert float(metrics["train/policy_gradient_norm"]) == pytest.approx(25)


def test_metrics_have_no_gradient_and_later_updates_do_not_change_them(
    make_td3: Callable[..., TD3], hand_batch: Batch
) -> None:
    agent = make_td3(critic_learning_rate=0.1, policy_learning_rate=0.1)
    metrics = agent.update(hand_batch)
    before = {name: tensor.clone() for name, tensor in metrics.items()}
    agent.update(hand_batch)
    assert all(torch.equal(metrics[name], before[name]) for name in metrics)
    assert not any(tensor.requires_grad for tensor in metrics.values())
