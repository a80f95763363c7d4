"""Who learns: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers; `make` is their registry.

Networks and generators are handed to the algorithms, and they see only batches. `relaxion.train.TD3` and so on are the
same with a task around them, for scripts.
"""

from relaxion.model.roles import ActionDomain
from relaxion.train.agents.d4pg import D4PGSettings
from relaxion.train.agents.ddpg import DDPGSettings
from relaxion.train.agents.make import AGENT_SETTINGS, AGENTS, AgentSettings, atom_agent, vector_agent
from relaxion.train.agents.sac import SACSettings
from relaxion.train.agents.shared import Agent, PolicyPenalty
from relaxion.train.agents.td3 import TD3Settings
from relaxion.train.experience.exploration import NoisyExplorer

__all__ = [
    "AGENTS", "AGENT_SETTINGS", "ActionDomain", "Agent", "AgentSettings", "D4PGSettings", "DDPGSettings",
    "NoisyExplorer", "PolicyPenalty", "SACSettings", "TD3Settings", "atom_agent", "vector_agent",
]  # fmt: skip
