"""One or two updates on the same weights, batch and noise: Stable-Baselines3 as the oracle.

Its buffer holds actions scaled to -1 … 1, ours the environment's: the bounds here are crooked on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor, nn

from relaxion.train.agents import DDPGSettings, SACSettings, TD3Settings, vector_agent
from relaxion.train.agents.ddpg import DDPG
from relaxion.train.agents.sac import SAC
from relaxion.train.agents.td3 import TD3
from relaxion.train.agents.vector_networks import BoxActions, Layers, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch

LOW, HIGH = np.array([-2.0, 0.5], np.float32), np.array([3.0, 0.75], np.float32)
DISCOUNT, WIDTHS, BATCH = 0.97, (16, 8), 32


class Spaces(gymnasium.Env[np.ndarray, np.ndarray]):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(LOW, HIGH)


@pytest.fixture
def actions() -> BoxActions:
    return BoxActions(LOW, HIGH)


def make_samples(generator: torch.Generator) -> ReplayBufferSamples:
    return ReplayBufferSamples(
        observations=torch.randn(BATCH, 3, generator=generator),
        actions=2 * torch.rand(BATCH, 2, generator=generator) - 1,
        next_observations=torch.randn(BATCH, 3, generator=generator),
        dones=(torch.rand(BATCH, 1, generator=generator) < 0.3).float(),
        rewards=torch.randn(BATCH, 1, generator=generator),
    )


def as_batch(samples: ReplayBufferSamples, actions: BoxActions) -> Batch:
    return Batch(
        samples.observations,
        actions.centre + actions.half_range * samples.actions,
        samples.rewards[:, 0],
        DISCOUNT * (1 - samples.dones[:, 0]),
        samples.next_observations,
    )


def oracle(algorithm: Any, **settings: Any) -> Any:
    model = algorithm(
        "MlpPolicy", Spaces(), seed=1, device="cpu", gamma=DISCOUNT, batch_size=BATCH, buffer_size=10,
        policy_kwargs={"net_arch": list(WIDTHS), **settings.pop("policy_kwargs", {})}, **settings,
    )  # fmt: skip
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def train(model: Any, samples: list[ReplayBufferSamples]) -> dict[str, float]:
    source = iter(samples)
    model.replay_buffer.sample = lambda *_arguments, **_keywords: next(source)
    model.train(gradient_steps=len(samples), batch_size=BATCH)
    return model.logger.name_to_value


def linears(*modules: nn.Module) -> list[nn.Linear]:
    return [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]


def stacked(networks: list[list[nn.Linear]]) -> Iterator[Tensor]:
    """Their weights in our order and shape: (n_networks, n_in, n_out) and (n_networks, 1, n_out), layer by layer."""
    for layer in zip(*networks, strict=True):
        yield torch.stack([linear.weight.detach().T for linear in layer])
        yield torch.stack([linear.bias.detach()[None] for linear in layer])


def copy_into(layers: Layers, networks: list[list[nn.Linear]]) -> None:
    with torch.no_grad():
        for ours, theirs in zip(layers.parameters(), stacked(networks), strict=True):
            ours.copy_(theirs)


def assert_same(layers: Layers, networks: list[list[nn.Linear]]) -> None:
    for ours, theirs in zip(layers.parameters(), stacked(networks), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=2e-6)


def gaussian_linears(actor: Any) -> list[nn.Linear]:
    """Their two heads as our one last layer."""
    mean, log_deviation = actor.mu, actor.log_std
    last = nn.Linear(mean.in_features, 2 * mean.out_features)
    last.weight = nn.Parameter(torch.cat([mean.weight, log_deviation.weight]).detach())
    last.bias = nn.Parameter(torch.cat([mean.bias, log_deviation.bias]).detach())
    return [*linears(actor.latent_pi), last]


@pytest.mark.parametrize("policy_delay", [1, 2])
def test_td3_equals_stable_baselines3(policy_delay: int, actions: BoxActions, generator: torch.Generator) -> None:
    model = oracle(sb3.TD3, target_policy_noise=0.0, policy_delay=policy_delay, learning_rate=1e-3, tau=0.005)
    settings = TD3Settings(target_noise=0.0, policy_delay=policy_delay)
    agent = vector_agent(3, actions, generator, settings, VectorNetworkSettings(widths=WIDTHS))
    assert isinstance(agent, TD3)
    pairs = [
        (agent.policy.layers, lambda: [linears(model.actor)]),
        (agent.target_policy.layers, lambda: [linears(model.actor_target)]),
        (agent.critics.layers, lambda: [linears(q) for q in model.critic.q_networks]),
        (agent.target_critics.layers, lambda: [linears(q) for q in model.critic_target.q_networks]),
    ]
    for layers, networks in pairs:
        copy_into(layers, networks())
    samples = [make_samples(generator) for _ in range(2)]
    theirs = train(model, samples)
    ours = [agent.update(as_batch(one, actions)) for one in samples]
    critic_loss = sum(float(metrics["train/critic_loss"]) for metrics in ours) / 2
    actor_losses = [float(metrics["train/actor_loss"]) for metrics in ours if "train/actor_loss" in metrics]
    assert critic_loss == pytest.approx(theirs["train/critic_loss"], rel=1e-5)
    assert sum(actor_losses) / len(actor_losses) == pytest.approx(theirs["train/actor_loss"], rel=1e-5)
    assert len(actor_losses) == 2 // policy_delay
    assert int(ours[-1]["train/n_updates"]) == theirs["train/n_updates"]
    for layers, networks in pairs:
        assert_same(layers, networks())


def test_td3_smoothing_equals_stable_baselines3(
    actions: BoxActions, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same standard noise on both sides: scale, clip and bounds must then agree, on crooked bounds too."""
    model = oracle(sb3.TD3, target_policy_noise=0.5, target_noise_clip=0.6, policy_delay=1)
    settings = TD3Settings(target_noise=0.5, target_noise_clip=0.6, policy_delay=1)
    agent = vector_agent(3, actions, generator, settings, VectorNetworkSettings(widths=WIDTHS))
    assert isinstance(agent, TD3)
    for policy in (agent.policy, agent.target_policy):
        copy_into(policy.layers, [linears(model.actor)])
    for critics in (agent.critics, agent.target_critics):
        copy_into(critics.layers, [linears(q) for q in model.critic.q_networks])
    samples = make_samples(generator)
    agent.generator.manual_seed(5)
    noise = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(Tensor, "normal_", lambda self, mean, deviation: self.copy_(mean + deviation * noise))
    theirs = train(model, [samples])
    ours = agent.update(as_batch(samples, actions))
    assert float(ours["train/critic_loss"]) == pytest.approx(theirs["train/critic_loss"], rel=1e-5)
    assert_same(agent.critics.layers, [linears(q) for q in model.critic.q_networks])


def test_ddpg_equals_stable_baselines3(actions: BoxActions, generator: torch.Generator) -> None:
    model = oracle(sb3.DDPG, learning_rate=1e-3, tau=1e-3)
    settings = DDPGSettings(policy_learning_rate=1e-3)
    agent = vector_agent(3, actions, generator, settings, VectorNetworkSettings(widths=WIDTHS))
    assert isinstance(agent, DDPG)
    pairs = [
        (agent.policy.layers, lambda: [linears(model.actor)]),
        (agent.target_policy.layers, lambda: [linears(model.actor_target)]),
        (agent.critic.layers, lambda: [linears(model.critic)]),
        (agent.target_critic.layers, lambda: [linears(model.critic_target)]),
    ]
    for layers, networks in pairs:
        copy_into(layers, networks())
    samples = make_samples(generator)
    theirs = train(model, [samples])
    ours = agent.update(as_batch(samples, actions))
    for name in ("train/critic_loss", "train/actor_loss"):
        assert float(ours[name]) == pytest.approx(theirs[name], rel=1e-5)
    for layers, networks in pairs:
        assert_same(layers, networks())


def test_sac_equals_stable_baselines3(
    actions: BoxActions, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draw for the policy first, we for the critics: the same two draws, handed out in that order."""
    model = oracle(sb3.SAC, learning_rate=3e-4, ent_coef="auto_0.3")
    settings = SACSettings(initial_entropy_weight=0.3)
    agent = vector_agent(3, actions, generator, settings, VectorNetworkSettings(widths=WIDTHS))
    assert isinstance(agent, SAC)
    copy_into(agent.policy.layers, [gaussian_linears(model.actor)])
    for critics in (agent.critics, agent.target_critics):
        copy_into(critics.layers, [linears(q) for q in model.critic.q_networks])
    same_draws = torch.Generator().manual_seed(5)
    for_critics, for_policy = (torch.randn(BATCH, 2, generator=same_draws) for _ in range(2))
    agent.generator.manual_seed(5)
    their_draws = iter([for_policy, for_critics])
    samples = make_samples(torch.Generator().manual_seed(6))
    monkeypatch.setattr(
        torch.distributions.Normal, "rsample", lambda self, *_args: self.loc + self.scale * next(their_draws)
    )
    theirs = train(model, [samples])
    ours = agent.update(as_batch(samples, actions))
    for name in ("train/critic_loss", "train/actor_loss", "train/ent_coef_loss", "train/ent_coef"):
        assert float(ours[name]) == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name  # they add 1e-6 in a log
    assert_same(agent.policy.layers, [gaussian_linears(model.actor)])
    assert_same(agent.critics.layers, [linears(q) for q in model.critic.q_networks])
    assert_same(agent.target_critics.layers, [linears(q) for q in model.critic_target.q_networks])
    torch.testing.assert_close(agent.log_entropy_weight.detach(), model.log_ent_coef.detach()[0])
