"""Every agent through one list: the protocol, a toy all of them solve, the same seed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from relaxion.model.roles import ActionDomain
from relaxion.train.agents import AGENT_SETTINGS, Agent, SACSettings, vector_agent
from relaxion.train.agents.shared import NoisyExplorer
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch

AGENTS = sorted(AGENT_SETTINGS)
LOW, HIGH = [-1.5, -2.0], [2.0, 1.25]  # crooked on purpose; -s always lies inside

# Quicker than the papers: the toy has to be done in seconds.
QUICK = {"policy_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "target_update_rate": 0.02}
TOY_SETTINGS: dict[str, dict[str, Any]] = {
    "ddpg": QUICK,
    "td3": QUICK,
    "d4pg": QUICK | {"lowest_value": -20.0, "highest_value": 0.0},
    "sac": QUICK | {"entropy_weight_learning_rate": 1e-2, "initial_entropy_weight": 0.1},
}


def make_agent(name: str, seed: int = 0) -> Agent:
    settings = AGENT_SETTINGS[name].read(TOY_SETTINGS[name])
    generator = torch.Generator().manual_seed(seed)
    return vector_agent(2, BoxActions(LOW, HIGH), generator, settings, VectorNetworkSettings(widths=(64, 64)))


def pull(observations: Tensor, actions: Tensor, discount: float = 0.3) -> Batch:
    """A mass on a spring in the plane: s' = s + a, reward -|s'|². The end is where it comes to rest."""
    next_observations = observations + actions
    squared = next_observations.square().sum(dim=1)
    return Batch(observations, actions, -squared, discount * (squared > 0.01).float(), next_observations)


def train(agent: Agent, n_updates: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Off policy in earnest: all transitions are random ones."""
    generator = torch.Generator().manual_seed(seed)
    observations = 2 * torch.rand(4000, 2, generator=generator) - 1
    actions = BoxActions(LOW, HIGH).random(observations, generator)
    scalars = []
    for _ in range(n_updates):
        rows = torch.randperm(4000, generator=generator)[:128]
        scalars.append(dict(agent.update(pull(observations[rows], actions[rows]))))
    return scalars


@pytest.mark.parametrize("name", AGENTS)
def test_protocol(name: str) -> None:
    agent = make_agent(name)
    assert isinstance(agent, Agent)
    assert isinstance(agent, NoisyExplorer) == (AGENT_SETTINGS[name] is not SACSettings)
    domain: ActionDomain = BoxActions(LOW, HIGH)
    observations = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    best = agent.act(observations)
    tried = agent.explore(observations, torch.Generator().manual_seed(1))
    for actions in (best, tried):
        assert actions.shape == (7, 2)
        assert not actions.requires_grad
        assert torch.equal(domain.bound(actions), actions)
    assert not torch.equal(best, tried)
    assert torch.equal(best, agent.act(observations))
    assert torch.equal(tried, agent.explore(observations, torch.Generator().manual_seed(1)))


def rebuilt(made: Any, **options: Any) -> Any:
    """The same agent with options of its constructor."""
    noise = [made.generator] if hasattr(made, "generator") else []
    critics = made.critics if hasattr(made, "critics") else made.critic
    return type(made)(made.policy, critics, made.action_domain, *noise, made.settings, **options)


def moved(agent: Any, n_updates: int) -> dict[str, bool]:
    """Which of policy and critics the updates changed, by the names in a snapshot."""
    before = agent.snapshot()
    train(agent, n_updates)
    after = agent.snapshot()
    kept = [name for name in before if name.split(".")[0] in ("policy", "target_policy", "critic", "critics")]
    return {name: not torch.equal(before[name], after[name]) for name in kept if "_range" not in name}


@pytest.mark.parametrize("name", AGENTS)
def test_critics_learn_alone_before_the_policy_moves(name: str) -> None:
    agent = rebuilt(make_agent(name), critic_updates_before=6)
    changes = moved(agent, 6)
    assert not any(moves for part, moves in changes.items() if "policy" in part)
    assert any(moves for part, moves in changes.items() if part.startswith("critic"))
    resumed = rebuilt(make_agent(name), critic_updates_before=6)
    resumed.restore(agent.snapshot())
    for later in (agent, resumed):  # the count is the agent's, and goes on after a restore
        assert any(moves for part, moves in moved(later, 2).items() if part.startswith("policy"))


@pytest.mark.parametrize("name", AGENTS)
def test_acting_and_exploring_disturb_no_update(name: str) -> None:
    """Bit for bit: the generator of exploration is the caller's, that of updates the agent's."""
    watched, alone = make_agent(name), make_agent(name)
    for _ in range(4):
        watched.act(torch.randn(5, 2))
        watched.explore(torch.randn(5, 2), torch.Generator().manual_seed(0))
    for ours, theirs in zip(train(watched, 4), train(alone, 4), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", AGENTS)
def test_no_update_touches_global_randomness_or_the_batch(name: str) -> None:
    agent, before = make_agent(name), torch.get_rng_state()
    batch = pull(torch.ones(8, 2), torch.zeros(8, 2))
    kept = {key: getattr(batch, key).clone() for key in ("observations", "actions", "rewards", "discounts")}
    agent.update(batch)
    agent.update(batch)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(getattr(batch, key), kept[key]) for key in kept)


@pytest.mark.parametrize("name", AGENTS)
def test_updates_answer_finite_scalars_without_gradient_under_the_names_of_sb3(name: str) -> None:
    metrics = {key: tensor for one in train(make_agent(name), 2) for key, tensor in one.items()}
    expected = {"train/actor_loss", "train/critic_loss", "train/n_updates", "train/q_mean"}
    expected |= {"train/critic_gradient_norm", "train/policy_gradient_norm", "train/target_mean"}
    assert expected <= metrics.keys()
    if name == "sac":
        assert {"train/ent_coef", "train/ent_coef_loss", "train/entropy"} <= metrics.keys()
    if name == "d4pg":
        assert "train/support_edge_mass" in metrics
    for tensor in metrics.values():
        assert tensor.shape == ()
        assert not tensor.requires_grad
        assert bool(torch.isfinite(tensor))


@pytest.mark.parametrize("name", AGENTS)
def test_the_spring_is_pulled_to_rest(name: str) -> None:
    agent = make_agent(name)
    starts = 2 * torch.rand(500, 2, generator=torch.Generator().manual_seed(7)) - 1

    def distance() -> float:
        return float((starts + agent.act(starts)).norm(dim=1).mean())

    assert distance() > 0.5  # 0.77 for who stands still
    train(agent, 1000)
    assert distance() < 0.25  # 0.07 to 0.20 over three seeds of all agents


@pytest.mark.parametrize("name", AGENTS)
def test_same_seed_twice_gives_identical_parameters(name: str) -> None:
    first, again, other = make_agent(name, 1), make_agent(name, 1), make_agent(name, 2)
    for agent in (first, again, other):
        train(agent, 20)
    ours, theirs, different = first.snapshot(), again.snapshot(), other.snapshot()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert not torch.equal(ours["policy.layers.weight_0"], different["policy.layers.weight_0"])
