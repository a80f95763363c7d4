"""Who learns: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers.

The algorithms are `relaxion.agents.td3.TD3` and so on: networks and generators are handed to them, and they see only
batches. `relaxion.agents.TD3` and so on, as listed here, are the same with a task around them, for scripts: `learn`,
`predict`, `save`, `load`. They live in `relaxion.training.facade`, above this room, and are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relaxion.agents.d4pg import D4PGSettings
from relaxion.agents.ddpg import DDPGSettings
from relaxion.agents.make import AGENT_SETTINGS, AgentSettings, atom_agent, vector_agent
from relaxion.agents.sac import SACSettings
from relaxion.agents.shared import Agent, PolicyPenalty
from relaxion.agents.td3 import TD3Settings
from relaxion.experience.exploration import NoisyExplorer
from relaxion.networks.roles import ActionDomain

if TYPE_CHECKING:
    from relaxion.training.facade import D4PG, DDPG, SAC, TD3

__all__ = [
    "AGENT_SETTINGS", "D4PG", "DDPG", "SAC", "TD3", "ActionDomain", "Agent", "AgentSettings", "D4PGSettings",
    "DDPGSettings", "NoisyExplorer", "PolicyPenalty", "SACSettings", "TD3Settings", "atom_agent",
    "vector_agent",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("D4PG", "DDPG", "SAC", "TD3"):
        return getattr(import_module("relaxion.training.facade"), name)
    raise AttributeError(f"module 'relaxion.agents' has no attribute '{name}'")
