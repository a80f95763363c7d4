"""Agents for atoms by name: networks for structures, put together with the algorithm."""

from __future__ import annotations

from typing import Any, Literal

import torch

from relaxion.agents.adam import Adam
from relaxion.agents.agent import PolicyPenalty
from relaxion.agents.d4pg import D4PG, D4PGSettings
from relaxion.agents.ddpg import DDPG, DDPGSettings
from relaxion.agents.sac import SAC, SACSettings
from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.agents.vector_agents import AgentSettings
from relaxion.errors import SettingsError
from relaxion.networks.atom_critics import AtomCategoricalCritic, AtomCritics
from relaxion.networks.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.networks.metric.network import MetricSettings
from relaxion.networks.metric.policies import MetricGaussianPolicy, MetricPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.networks.observer import AtomNetworkSettings

N_CRITICS = 2  # of TD3 and SAC, as in both papers


def atom_agent(
    actions: MoveActions,
    generator: torch.Generator,
    settings: AgentSettings,
    networks: AtomNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
    metric: MetricSettings | None = None,
    reinforced: Literal["all", "gate"] = "all",
) -> TD3 | SAC | DDPG | D4PG:
    """The agent that `settings` belong to, with fresh networks: a direct policy, or with `metric` one that follows it.

    `generator` draws the first weights and then stays with the agent for the noise inside its updates. With
    `reinforced="gate"` the agent never moves the metric itself; SAC with a metric wants `MetricActions`.
    """
    policy: Any = _policy(actions, generator, networks, metric, stochastic=isinstance(settings, SACSettings))
    match settings:
        case TD3Settings():
            agent = TD3(
                policy, AtomCritics(networks, N_CRITICS, generator), actions, generator, settings, policy_penalty
            )
        case SACSettings():
            agent = SAC(
                policy, AtomCritics(networks, N_CRITICS, generator), actions, generator, settings, policy_penalty
            )
        case DDPGSettings():
            agent = DDPG(policy, AtomCritics(networks, 1, generator), actions, settings, policy_penalty)
        case D4PGSettings():
            critic = AtomCategoricalCritic(networks, settings.n_bins, generator)
            agent = D4PG(policy, critic, actions, settings, policy_penalty)
    if reinforced == "gate":
        agent.policy_optimizer = Adam(_knob_parameters(policy), settings.policy_learning_rate)
    return agent


def _policy(
    actions: MoveActions,
    generator: torch.Generator,
    networks: AtomNetworkSettings | None,
    metric: MetricSettings | None,
    *,
    stochastic: bool,
) -> AtomPolicy | MetricPolicy:
    if metric is not None:
        return (MetricGaussianPolicy if stochastic else MetricPolicy)(actions, metric, generator)
    return (AtomGaussianPolicy if stochastic else AtomPolicy)(actions, networks, generator)


def _knob_parameters(policy: Any) -> list[torch.nn.Parameter]:
    """All but the metric."""
    found = [parameter for name, parameter in policy.named_parameters() if not name.startswith("network.")]
    if not isinstance(policy, MetricPolicy) or not found:
        raise SettingsError(
            "reinforced = gate: the policy has no gate to learn; name some environment_information, for example "
            "['log_largest_force'], or let the agent move all"
        )
    return found
