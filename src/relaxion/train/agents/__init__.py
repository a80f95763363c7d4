"""Agents: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers. This file is their registry.

A new agent is a file of its own and an entry of `AGENTS`. Networks and generators are handed to the algorithms, and
they see only batches. `relaxion.train.TD3` and so on are the same with a task around them, for scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Generator

from relaxion.errors import SettingsError
from relaxion.model.roles import ActionDomain
from relaxion.settings import Settings, by_name
from relaxion.train.agents.d4pg import D4PG, D4PGSettings
from relaxion.train.agents.ddpg import DDPG, DDPGSettings
from relaxion.train.agents.sac import SAC, SACSettings
from relaxion.train.agents.shared import Agent, LearningAgent, PolicyPenalty, TwinSettings
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
    from relaxion.model.actions import MoveActions
    from relaxion.model.backbone import AtomNetworkSettings
    from relaxion.model.stiffness_network import StiffnessSettings


@dataclass(frozen=True)
class AgentKind:
    """An algorithm, and which networks it learns with."""

    algorithm: Any  # the class: policy, critics, action domain, [generator], settings -> LearningAgent
    settings: type[Settings]
    gaussian_policy: bool = False  # else a deterministic one
    categorical_critic: bool = False  # else values
    draws: bool = False  # its updates draw from the generator
    training: Mapping[str, Any] = field(default_factory=dict)  # settings of a training that default otherwise with it


AGENTS: dict[str, AgentKind] = {
    "ddpg": AgentKind(DDPG, DDPGSettings),
    "td3": AgentKind(TD3, TD3Settings, draws=True),
    "d4pg": AgentKind(D4PG, D4PGSettings, categorical_critic=True, training={"n_steps": 5}),  # as in its paper
    "sac": AgentKind(SAC, SACSettings, gaussian_policy=True, draws=True),
}
AGENT_SETTINGS: dict[str, type[Settings]] = {name: kind.settings for name, kind in AGENTS.items()}

__all__ = [
    "AGENTS", "AGENT_SETTINGS", "ActionDomain", "Agent", "D4PGSettings", "DDPGSettings", "LearningAgent",
    "PolicyPenalty", "SACSettings", "TD3Settings", "atom_agent", "kind_of_agent", "own_agent", "vector_agent",
]  # fmt: skip


def own_agent(spec: str) -> str:
    """Make an `AgentKind` of the user, named by `module:name`, known by that name."""
    found = by_name(spec, "agent")
    if not isinstance(found, AgentKind):
        raise SettingsError(f"the agent '{spec}' is a {type(found).__name__}; give a relaxion.train.agents.AgentKind")
    if any(found.settings is kind.settings for name, kind in AGENTS.items() if name != spec):
        raise SettingsError(f"the agent '{spec}' needs a class of settings of its own; derive one")
    AGENTS[spec] = found
    AGENT_SETTINGS[spec] = found.settings
    return spec


def kind_of_agent(settings: Settings) -> AgentKind:
    """The agent that these settings belong to."""
    return next(kind for kind in AGENTS.values() if type(settings) is kind.settings)


def n_critics(settings: Settings) -> int:
    """Side by side; an agent without `TwinSettings` has one."""
    return settings.n_critics if isinstance(settings, TwinSettings) else 1


def vector_agent(
    n_observations: int,
    actions: BoxActions,
    generator: Generator,
    settings: Settings,
    networks: VectorNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
) -> LearningAgent:
    """The agent that `settings` belong to, for control tasks.

    n_observations: numbers in one observation.
    actions: bounds of the actions.
    generator: draws the first weights and then stays with the agent for the noise inside its updates.
    networks: sizes of policy and critics.
    policy_penalty: an extra term of the policy's loss.
    """
    sizes = (n_observations, actions, (networks or VectorNetworkSettings()).widths)
    kind = kind_of_agent(settings)
    given: Any = settings
    if kind.gaussian_policy:
        policy = VectorGaussianPolicy(*sizes, generator, given.action_penalty)
    else:
        policy = VectorPolicy(*sizes, generator)
    if kind.categorical_critic:
        critics = VectorCategoricalCritic(*sizes, given.n_bins, generator)
    else:
        critics = VectorCritics(*sizes, n_critics(settings), generator)
    drawing = (generator,) if kind.draws else ()
    return kind.algorithm(policy, critics, actions, *drawing, settings, policy_penalty)


def atom_agent(
    actions: MoveActions,
    generator: Generator,
    settings: Settings,
    networks: AtomNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
    stiffness: StiffnessSettings | None = None,
    critic_updates_before: int = 0,
) -> LearningAgent:
    """The agent that `settings` belong to, for atoms: with a direct policy, or with a stiffness policy.

    actions: bounds of the moves, Å and strain; SAC with a stiffness policy needs `StiffnessActions`.
    generator: draws the first weights and then stays with the agent for the noise inside its updates.
    networks: sizes of the critics, and of a direct policy.
    policy_penalty: an extra term of the policy's loss.
    stiffness: the shape of the stiffness model; None: a direct policy.
    critic_updates_before: updates at the beginning in which only the critics learn.
    """
    # control tasks load none of these
    from relaxion.model.atom_policies import (
        AtomGaussianPolicy,
        AtomPolicy,
        StiffnessGaussianPolicy,
        StiffnessPolicy,
    )
    from relaxion.train.agents.atom_critics import AtomCategoricalCritic, AtomCritics

    kind = kind_of_agent(settings)
    given: Any = settings
    shape: Any = networks if stiffness is None else stiffness
    if kind.gaussian_policy:
        gaussian = AtomGaussianPolicy if stiffness is None else StiffnessGaussianPolicy
        policy = gaussian(actions, shape, generator, given.action_penalty)
    else:
        deterministic = AtomPolicy if stiffness is None else StiffnessPolicy
        policy = deterministic(actions, shape, generator)
    if kind.categorical_critic:
        critics = AtomCategoricalCritic(networks, given.n_bins, generator)
    else:
        critics = AtomCritics(networks, n_critics(settings), generator)
    drawing = (generator,) if kind.draws else ()
    return kind.algorithm(
        policy, critics, actions, *drawing, settings, policy_penalty, critic_updates_before=critic_updates_before
    )
