"""Who learns: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers; `make` is their registry.

The algorithms are `relaxion.agents.td3.TD3` and so on: networks and generators are handed to them, and they see only
batches. `relaxion.agents.TD3` and so on are the same with a task around them, for scripts: `learn`, `predict`, `save`,
`load`. They are made in `relaxion.training.facade`, above this room, on first use.
"""

from importlib import import_module
from typing import Any

from relaxion.agents.make import AGENT_SETTINGS, AGENTS, AgentSettings, atom_agent, vector_agent
from relaxion.agents.shared import Agent, PolicyPenalty
from relaxion.experience.exploration import NoisyExplorer
from relaxion.networks.roles import ActionDomain

__all__ = [
    "AGENTS", "AGENT_SETTINGS", "ActionDomain", "Agent", "AgentSettings", "NoisyExplorer", "PolicyPenalty",
    "atom_agent", "vector_agent",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for word, kind in AGENTS.items():
        if name == kind.settings.__name__:
            return kind.settings
        if name == kind.algorithm.__name__:
            return import_module("relaxion.training.facade").learner(word)
    raise AttributeError(f"module 'relaxion.agents' has no attribute '{name}'")
