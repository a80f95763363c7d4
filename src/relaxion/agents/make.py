"""Agents by the name of their settings, put together with fresh networks, for vectors and for atoms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Generator, nn

from relaxion.agents.d4pg import D4PG, D4PGSettings
from relaxion.agents.ddpg import DDPG, DDPGSettings
from relaxion.agents.sac import SAC, SACSettings
from relaxion.agents.shared import PolicyPenalty
from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.networks.vector import (
    BoxActions,
    VectorCategoricalCritic,
    VectorCritics,
    VectorGaussianPolicy,
    VectorNetworkSettings,
    VectorPolicy,
)

if TYPE_CHECKING:
    from relaxion.networks.metric.network import MetricSettings
    from relaxion.networks.move_actions import MoveActions
    from relaxion.networks.observer import AtomNetworkSettings

AnyAgent: TypeAlias = TD3 | SAC | DDPG | D4PG
AgentSettings: TypeAlias = TD3Settings | SACSettings | DDPGSettings | D4PGSettings

AGENT_SETTINGS: dict[str, type[AgentSettings]] = {
    "ddpg": DDPGSettings,
    "td3": TD3Settings,
    "d4pg": D4PGSettings,
    "sac": SACSettings,
}
N_ATOM_CRITICS = 2  # of TD3 and SAC, as in both papers


def vector_agent(
    n_observations: int,
    actions: BoxActions,
    generator: Generator,
    settings: AgentSettings,
    networks: VectorNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
) -> AnyAgent:
    """The agent that `settings` belong to, for control tasks.

    `generator` draws the first weights and then stays with the agent for the noise inside its updates.
    """
    networks = networks or VectorNetworkSettings()
    sizes = (n_observations, actions, networks.widths)
    if isinstance(settings, SACSettings):
        policy = VectorGaussianPolicy(*sizes, generator, settings.action_penalty)
    else:
        policy = VectorPolicy(*sizes, generator)
    if isinstance(settings, D4PGSettings):
        critics = VectorCategoricalCritic(*sizes, settings.n_bins, generator)
    else:
        critics = VectorCritics(*sizes, _n_critics(settings, networks.n_critics), generator)
    return _put_together(settings, policy, critics, actions, generator, policy_penalty=policy_penalty)


def atom_agent(
    actions: MoveActions,
    generator: Generator,
    settings: AgentSettings,
    networks: AtomNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
    metric: MetricSettings | None = None,
    critic_updates_before: int = 0,
) -> AnyAgent:
    """The agent that `settings` belong to, for atoms: a direct policy, or with `metric` one that follows it.

    SAC with a metric wants `MetricActions`.
    """
    from relaxion.networks.atom_critics import AtomCategoricalCritic, AtomCritics  # control tasks need none of it

    policy = _atom_policy(actions, generator, networks, metric, settings)
    if isinstance(settings, D4PGSettings):
        critics = AtomCategoricalCritic(networks, settings.n_bins, generator)
    else:
        critics = AtomCritics(networks, _n_critics(settings, N_ATOM_CRITICS), generator)
    return _put_together(
        settings,
        policy,
        critics,
        actions,
        generator,
        policy_penalty=policy_penalty,
        critic_updates_before=critic_updates_before,
    )


def _n_critics(settings: AgentSettings, several: int) -> int:
    return several if isinstance(settings, TD3Settings | SACSettings) else 1


def _atom_policy(
    actions: MoveActions,
    generator: Generator,
    networks: AtomNetworkSettings | None,
    metric: MetricSettings | None,
    settings: AgentSettings,
) -> nn.Module:
    from relaxion.networks.atom_policies import AtomGaussianPolicy, AtomPolicy
    from relaxion.networks.metric.policies import MetricGaussianPolicy, MetricPolicy

    penalty = settings.action_penalty if isinstance(settings, SACSettings) else None
    if metric is not None:
        if penalty is None:
            return MetricPolicy(actions, metric, generator)
        return MetricGaussianPolicy(actions, metric, generator, penalty)
    if penalty is None:
        return AtomPolicy(actions, networks, generator)
    return AtomGaussianPolicy(actions, networks, generator, penalty)


def _put_together(
    settings: AgentSettings, policy: Any, critics: Any, actions: Any, generator: Generator, **options: Any
) -> AnyAgent:
    match settings:
        case TD3Settings():
            return TD3(policy, critics, actions, generator, settings, **options)
        case SACSettings():
            return SAC(policy, critics, actions, generator, settings, **options)
        case DDPGSettings():
            return DDPG(policy, critics, actions, settings, **options)
        case D4PGSettings():
            return D4PG(policy, critics, actions, settings, **options)
