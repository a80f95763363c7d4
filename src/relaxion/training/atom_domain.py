"""Which moves an agent may make on atoms, in what unit it tries, and the agent itself, from the settings of a run."""

from __future__ import annotations

from typing import TypeAlias

from torch import Generator

from relaxion.agents.agent import PolicyPenalty
from relaxion.agents.d4pg import D4PG
from relaxion.agents.ddpg import DDPG
from relaxion.agents.make import atom_agent
from relaxion.agents.sac import SAC
from relaxion.agents.td3 import TD3
from relaxion.networks.metric.network import MetricSettings
from relaxion.networks.metric.policies import MetricActions
from relaxion.networks.move_actions import ForceMoveActions, MoveActions
from relaxion.training.run_settings import AtomRunSettings, MetricRunSettings

AtomAgent: TypeAlias = TD3 | SAC | DDPG | D4PG


class KnobForceActions(MetricActions, ForceMoveActions):
    """Noise in units of the forces; the choice is that of three knobs."""


def action_domain(settings: AtomRunSettings) -> MoveActions:
    """By the unit of exploration, and by what SAC's entropy counts."""
    world, knobs = settings.environment, isinstance(settings, MetricRunSettings)
    bounds = (world.max_displacement_angstrom, world.max_strain)
    if settings.atoms.exploration_unit == "forces":
        kind = KnobForceActions if knobs else ForceMoveActions
        return kind(*bounds, settings.networks.stiffness_ev_per_angstrom2)
    return MetricActions(*bounds) if knobs else MoveActions(*bounds)


def make_agent(settings: AtomRunSettings, generator: Generator, penalty: PolicyPenalty | None = None) -> AtomAgent:
    """The agent of a run, with fresh networks, whatever kind its policy is."""
    metric = settings.policy if isinstance(settings.policy, MetricSettings) else None
    # a metric that was taught waits until the critics know something of it
    waits = settings.lessons.critic_updates_before if isinstance(settings, MetricRunSettings) else 0
    return atom_agent(
        action_domain(settings),
        generator,
        settings.agent,
        settings.networks,
        penalty,
        metric,
        settings.reinforced,
        waits,
    )
