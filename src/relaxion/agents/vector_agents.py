"""Agents for control tasks by name: networks for vectors, put together with the algorithm."""

from __future__ import annotations

from typing import TypeAlias

import torch

from relaxion.agents.d4pg import D4PG, D4PGSettings
from relaxion.agents.ddpg import DDPG, DDPGSettings
from relaxion.agents.sac import SAC, SACSettings
from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.networks.vector import (
    VectorCategoricalCritic,
    VectorCritics,
    VectorGaussianPolicy,
    VectorNetworkSettings,
    VectorPolicy,
)
from relaxion.networks.vector_actions import BoxActions

AgentSettings: TypeAlias = TD3Settings | SACSettings | DDPGSettings | D4PGSettings

AGENT_SETTINGS: dict[str, type[AgentSettings]] = {
    "ddpg": DDPGSettings,
    "td3": TD3Settings,
    "d4pg": D4PGSettings,
    "sac": SACSettings,
}


def vector_agent(
    n_observations: int,
    actions: BoxActions,
    generator: torch.Generator,
    settings: AgentSettings,
    networks: VectorNetworkSettings | None = None,
) -> TD3 | SAC | DDPG | D4PG:
    """The agent that `settings` belong to, with fresh networks.

    `generator` draws the first weights and then stays with the agent for the noise inside its updates.
    """
    networks = networks or VectorNetworkSettings()
    sizes = (n_observations, actions, networks.widths)
    match settings:
        case TD3Settings():
            policy = VectorPolicy(*sizes, generator)
            return TD3(policy, VectorCritics(*sizes, networks.n_critics, generator), actions, generator, settings)
        case SACSettings():
            policy = VectorGaussianPolicy(*sizes, generator)
            return SAC(policy, VectorCritics(*sizes, networks.n_critics, generator), actions, generator, settings)
        case DDPGSettings():
            policy = VectorPolicy(*sizes, generator)
            return DDPG(policy, VectorCritics(*sizes, 1, generator), actions, settings)
        case D4PGSettings():
            policy = VectorPolicy(*sizes, generator)
            return D4PG(policy, VectorCategoricalCritic(*sizes, settings.n_bins, generator), actions, settings)
