"""Who learns: DDPG, TD3, D4PG and SAC, one file each, in the order of their papers."""

from relaxion.agents.agent import ActionDomain, Agent, NoisyExplorer, PolicyPenalty
from relaxion.agents.d4pg import D4PG, D4PGSettings
from relaxion.agents.ddpg import DDPG, DDPGSettings
from relaxion.agents.sac import SAC, SACSettings
from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.agents.vector_agents import AGENT_SETTINGS, AgentSettings, vector_agent

__all__ = [
    "AGENT_SETTINGS", "D4PG", "DDPG", "SAC", "TD3", "ActionDomain", "Agent", "AgentSettings", "D4PGSettings",
    "DDPGSettings", "NoisyExplorer", "PolicyPenalty", "SACSettings", "TD3Settings", "vector_agent",
]  # fmt: skip
