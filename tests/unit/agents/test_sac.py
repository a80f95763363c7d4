"""SAC by hand: draws 0.4 s with log density -0.4 s and penalty 0.1 s; Q1 = s + 2a, Q2 = s/2 + 3a; α = 0.5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import relaxion.train.agents.sac as module
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import StiffnessActions
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.train.agents import atom_agent, vector_agent
from relaxion.train.agents.sac import SAC, SACSettings
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch

STILL = 1e-12


@pytest.fixture
def make_sac(linear: dict[str, Any], generator: torch.Generator) -> Callable[..., SAC]:
    def make(penalty: Any = None, dimensions: torch.Tensor | None = None, **settings: Any) -> SAC:
        values = {"critic_learning_rate": STILL, "initial_entropy_weight": 0.5} | settings
        critics = linear["critics"]([1.0, 0.5], [2.0, 3.0])
        domain = linear["pulls"](dimensions=dimensions)
        return SAC(linear["stochastic_policy"](0.4), critics, domain, generator, SACSettings(**values), penalty)

    return make


def test_r3_3_and_r3_4_critic_loss_by_hand(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    """a' = 0.8: min Q' = 3.4, minus α log π = +0.4: y = (1 + 0.9·3.8, -1)."""
    metrics = make_sac().update(hand_batch)
    by_hand = 0.5 * (((1.2 - 4.42) ** 2 + 2.6**2) / 2 + ((0.8 - 4.42) ** 2 + 1.4**2) / 2)
    assert by_hand == pytest.approx(8.0482)
    assert float(metrics["train/critic_loss"]) == pytest.approx(8.0482, rel=1e-6)
    assert float(metrics["train/target_mean"]) == pytest.approx((4.42 - 1) / 2)


def test_r3_3_the_next_action_comes_from_the_online_policy(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    agent = make_sac()
    assert not hasattr(agent, "target_policy")
    with torch.no_grad():
        agent.policy.slope.fill_(0.0)  # a' = 0, log π = 0: min Q' = 1
    assert float(agent.update(hand_batch)["train/target_mean"]) == pytest.approx((1 + 0.9 * 1 - 1) / 2)


def test_r3_5_policy_loss_by_hand_with_the_smallest_critic_and_the_penalty(
    make_sac: Callable[..., SAC], hand_batch: Batch
) -> None:
    """mean(0.5·-0.4 - 1.7 + 0.1, 0.5·-0.8 - 3.4 + 0.2); dL/dw = mean(-0.5 s - 3 s) = -5.25."""
    agent = make_sac(policy_learning_rate=0.01)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(-2.7)
    assert float(metrics["train/policy_gradient_norm"]) == pytest.approx(5.25)
    assert float(metrics["train/entropy"]) == pytest.approx(0.6)
    assert agent.policy.slope.item() == pytest.approx(0.41)


def test_r3_5_the_policy_step_gives_the_critics_no_gradient(
    make_sac: Callable[..., SAC], hand_batch: Batch, spy_on_losses: Callable[[Any], list[set[int]]]
) -> None:
    agent = make_sac()
    stepped = spy_on_losses(module)
    agent.update(hand_batch)
    networks = [agent.critics.parameters(), agent.policy.parameters(), [agent.log_entropy_weight]]
    assert stepped == [{id(parameter) for parameter in network} for network in networks]
    for network in (agent.policy, agent.critics, agent.target_critics):
        assert all(parameter.grad is None for parameter in network.parameters())


def test_r3_6_entropy_weight_loss_by_hand_in_log_space(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    """-log 0.5 · mean(-0.4 - 1, -0.8 - 1): entropy 0.6 is above the target -1, so α falls."""
    agent = make_sac(entropy_weight_learning_rate=0.01)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/ent_coef_loss"]) == pytest.approx(-math.log(0.5) * -1.6)
    assert float(metrics["train/ent_coef"]) == pytest.approx(0.5)
    assert agent.log_entropy_weight.item() == pytest.approx(math.log(0.5) - 0.01)


def test_r3_6_target_entropy_is_minus_the_dimensions_of_each_action(
    make_sac: Callable[..., SAC], hand_batch: Batch
) -> None:
    agent = make_sac(dimensions=torch.tensor([1.0, 4.0]))
    loss = agent.update(hand_batch)["train/ent_coef_loss"]
    assert float(loss) == pytest.approx(-math.log(0.5) * ((-0.4 - 1) + (-0.8 - 4)) / 2)


def test_r3_6_target_entropy_per_dimension_is_a_setting(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    agent = make_sac(dimensions=torch.tensor([1.0, 4.0]), target_entropy_per_dimension=-0.5)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/target_entropy"]) == pytest.approx(-1.25)
    assert float(metrics["train/ent_coef_loss"]) == pytest.approx(-math.log(0.5) * ((-0.4 - 0.5) + (-0.8 - 2)) / 2)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_r3_5_the_action_penalty_is_a_setting(weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    settings = SACSettings(action_penalty=weight)
    vectors = vector_agent(3, BoxActions([-1.0], [1.0]), generator, settings, VectorNetworkSettings(widths=(8,)))
    atoms = atom_agent(MoveActions(), generator, settings)
    stiffness = atom_agent(StiffnessActions(), generator, settings, stiffness=StiffnessSettings())
    assert [agent.policy.penalty_weight for agent in (vectors, atoms, stiffness)] == [weight] * 3


def test_r3_6_entropy_below_the_target_raises_the_weight(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    agent = make_sac(dimensions=torch.full((2,), -3.0))  # target +3, above the entropy 0.6
    agent.update(hand_batch)
    assert agent.log_entropy_weight.item() > math.log(0.5)


def test_r3_7_soft_update_of_the_target_critics_at_every_update(
    make_sac: Callable[..., SAC], hand_batch: Batch
) -> None:
    agent = make_sac(critic_learning_rate=0.01)
    agent.update(hand_batch)
    torch.testing.assert_close(agent.critics.of_force.detach(), torch.tensor([2.01, 3.01]))
    torch.testing.assert_close(agent.target_critics.of_force, torch.tensor([2.00005, 3.00005]), rtol=0, atol=1e-6)
    assert SACSettings().target_update_rate == 0.005


def test_r3_2_more_than_two_critics_take_the_smallest(
    linear: dict[str, Any], generator: torch.Generator, hand_batch: Batch
) -> None:
    critics = linear["critics"]([1.0, 0.5, 0.0], [2.0, 3.0, 1.0])  # the third says 0.8 at (2, 0.8)
    settings = SACSettings(critic_learning_rate=STILL, initial_entropy_weight=0.5)
    agent = SAC(linear["stochastic_policy"](0.4), critics, linear["pulls"](), generator, settings)
    metrics = agent.update(hand_batch)
    assert float(metrics["train/target_mean"]) == pytest.approx((1 + 0.9 * (0.8 + 0.4) - 1) / 2)


def test_act_is_the_middle_and_explore_draws(make_sac: Callable[..., SAC], linear: dict[str, Any]) -> None:
    agent = make_sac()
    seen = linear["seen"](torch.tensor([1.0, 100.0]))
    assert agent.act(seen).force.tolist() == pytest.approx([0.4, 2.0])  # 40 is out of bounds
    drawing = torch.Generator().manual_seed(3)
    before = drawing.get_state()
    assert agent.explore(seen, drawing).force.tolist() == pytest.approx([0.4, 2.0])
    assert not torch.equal(before, drawing.get_state())


def test_a_penalty_joins_the_policy_loss(make_sac: Callable[..., SAC], hand_batch: Batch) -> None:
    agent = make_sac(penalty=lambda batch, actions: (actions.force - batch.actions.force).square())
    metrics = agent.update(hand_batch)
    assert float(metrics["train/actor_loss"]) == pytest.approx(-2.7 + (0.3**2 + 1.0**2) / 2)
