"""Agents for atoms by name: networks for structures, put together with the algorithm."""

from __future__ import annotations

import torch

from relaxion.agents.agent import PolicyPenalty
from relaxion.agents.d4pg import D4PG, D4PGSettings
from relaxion.agents.ddpg import DDPG, DDPGSettings
from relaxion.agents.sac import SAC, SACSettings
from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.agents.vector_agents import AgentSettings
from relaxion.networks.atom_critics import AtomCategoricalCritic, AtomCritics
from relaxion.networks.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.networks.observer import AtomNetworkSettings

N_CRITICS = 2  # of TD3 and SAC, as in both papers


def atom_agent(
    actions: MoveActions,
    generator: torch.Generator,
    settings: AgentSettings,
    networks: AtomNetworkSettings | None = None,
    policy_penalty: PolicyPenalty | None = None,
) -> TD3 | SAC | DDPG | D4PG:
    """The agent that `settings` belong to, with fresh networks.

    `generator` draws the first weights and then stays with the agent for the noise inside its updates.
    """
    match settings:
        case TD3Settings():
            policy, critics = AtomPolicy(actions, networks, generator), AtomCritics(networks, N_CRITICS, generator)
            return TD3(policy, critics, actions, generator, settings, policy_penalty)
        case SACSettings():
            policy = AtomGaussianPolicy(actions, networks, generator)
            critics = AtomCritics(networks, N_CRITICS, generator)
            return SAC(policy, critics, actions, generator, settings, policy_penalty)
        case DDPGSettings():
            policy, critic = AtomPolicy(actions, networks, generator), AtomCritics(networks, 1, generator)
            return DDPG(policy, critic, actions, settings, policy_penalty)
        case D4PGSettings():
            policy = AtomPolicy(actions, networks, generator)
            critic = AtomCategoricalCritic(networks, settings.n_bins, generator)
            return D4PG(policy, critic, actions, settings, policy_penalty)
