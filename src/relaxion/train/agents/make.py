"""The registry of agents; and agents put together with fresh networks, for vectors and for atoms.

A new agent is a file of its own and an entry of `AGENTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Generator, nn

from relaxion.train.agents.d4pg import D4PG, D4PGSettings
from relaxion.train.agents.ddpg import DDPG, DDPGSettings
from relaxion.train.agents.sac import SAC, SACSettings
from relaxion.train.agents.shared import PolicyPenalty
from relaxion.train.agents.td3 import TD3, TD3Settings
from relaxion.train.agents.vector_networks import (
    BoxActions,
    VectorCategoricalCritic,
    VectorCritics,
    VectorGaussianPolicy,
    VectorNetworkSettings,
    VectorPolicy,
)

if TYPE_CHECKING:
    from relaxion.model.backbone import AtomNetworkSettings
    from relaxion.model.roles import MoveActions
    from relaxion.model.stiffness_network import MetricSettings

AnyAgent: TypeAlias = TD3 | SAC | DDPG | D4PG
AgentSettings: TypeAlias = TD3Settings | SACSettings | DDPGSettings | D4PGSettings


@dataclass(frozen=True)
class AgentKind:
    """An algorithm, and which networks it learns with."""

    algorithm: type[AnyAgent]
    settings: type[AgentSettings]
    gaussian_policy: bool = False  # else a deterministic one
    categorical_critic: bool = False  # else values
    several_critics: bool = False  # else one
    draws: bool = False  # its updates draw from the generator


AGENTS: dict[str, AgentKind] = {
    "ddpg": AgentKind(DDPG, DDPGSettings),
    "td3": AgentKind(TD3, TD3Settings, several_critics=True, draws=True),
    "d4pg": AgentKind(D4PG, D4PGSettings, categorical_critic=True),
    "sac": AgentKind(SAC, SACSettings, gaussian_policy=True, several_critics=True, draws=True),
}
AGENT_SETTINGS: dict[str, type[AgentSettings]] = {name: kind.settings for name, kind in AGENTS.items()}
N_ATOM_CRITICS = 2  # of agents with several, as in the papers of TD3 and SAC


def kind_of_agent(settings: AgentSettings) -> AgentKind:
    """The agent that these settings belong to."""
    return next(kind for kind in AGENTS.values() if isinstance(settings, kind.settings))


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
    kind = kind_of_agent(settings)
    given: Any = settings
    if kind.gaussian_policy:
        policy = VectorGaussianPolicy(*sizes, generator, given.action_penalty)
    else:
        policy = VectorPolicy(*sizes, generator)
    if kind.categorical_critic:
        critics = VectorCategoricalCritic(*sizes, given.n_bins, generator)
    else:
        critics = VectorCritics(*sizes, networks.n_critics if kind.several_critics else 1, generator)
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
    from relaxion.train.agents.atom_critics import AtomCategoricalCritic, AtomCritics  # control tasks need none of it

    policy = _atom_policy(actions, generator, networks, metric, settings)
    kind = kind_of_agent(settings)
    given: Any = settings
    if kind.categorical_critic:
        critics = AtomCategoricalCritic(networks, given.n_bins, generator)
    else:
        critics = AtomCritics(networks, N_ATOM_CRITICS if kind.several_critics else 1, generator)
    return _put_together(
        settings,
        policy,
        critics,
        actions,
        generator,
        policy_penalty=policy_penalty,
        critic_updates_before=critic_updates_before,
    )


def _atom_policy(
    actions: MoveActions,
    generator: Generator,
    networks: AtomNetworkSettings | None,
    metric: MetricSettings | None,
    settings: AgentSettings,
) -> nn.Module:
    from relaxion.model.direct_policy import AtomGaussianPolicy, AtomPolicy
    from relaxion.model.stiffness_policy import MetricGaussianPolicy, MetricPolicy

    given: Any = settings
    if not kind_of_agent(settings).gaussian_policy:
        return AtomPolicy(actions, networks, generator) if metric is None else MetricPolicy(actions, metric, generator)
    if metric is None:
        return AtomGaussianPolicy(actions, networks, generator, given.action_penalty)
    return MetricGaussianPolicy(actions, metric, generator, given.action_penalty)


def _put_together(
    settings: AgentSettings, policy: Any, critics: Any, actions: Any, generator: Generator, **options: Any
) -> AnyAgent:
    kind = kind_of_agent(settings)
    algorithm: Any = kind.algorithm
    drawing = (generator,) if kind.draws else ()
    return algorithm(policy, critics, actions, *drawing, settings, **options)
