"""One step of all structures side by side: what is tried, what comes of it, where the next step begins.

Knows neither replay nor updates, so that it can run beside the learner or on another machine. Everything that changes
is handed in: the state, the generators, the agent's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from relaxion.model.layers import with_graph
from relaxion.model.roles import ForceMoveActions, MoveActions
from relaxion.model.stiffness_network import MetricSettings
from relaxion.model.stiffness_policy import MetricActions
from relaxion.structures import Move, State
from relaxion.train.agents.make import AnyAgent, atom_agent
from relaxion.train.agents.shared import PolicyPenalty
from relaxion.train.experience.expert import Expert, guided
from relaxion.train.experience.exploration import Exploration, LinearSchedule
from relaxion.train.experience.transition import Source, Transition
from relaxion.train.runs.checkpoint import DivergedError
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import RelaxTask

GENERATORS = ("exploration", "starts", "expert")  # those that collecting draws from


@dataclass(frozen=True, eq=False)
class Collected:
    """What one step brought."""

    transition: Transition
    state: State  # where the next step begins: new starts in place of what is finished
    force_calls: int  # of the step and of the new starts


class RelaxCollector:
    """`collect` is a function of state, generators, weights, `n_stored` and `step`, and of nothing else."""

    def __init__(
        self, settings: RelaxRunSettings, task: RelaxTask, agent: Any, generators: Mapping[str, Generator]
    ) -> None:
        training, atoms = settings.training, settings.atoms
        self.settings, self.potential, self.generators = settings, task.potential, generators
        self.environment = task.environment()
        self.exploration = Exploration(
            agent,
            action_domain(settings),
            generators["exploration"],
            warmup_steps=training.warmup_steps,
            noise=training.noise_schedule(agent),
            random_warmup=settings.metric is None,  # a metric goes downhill, learned or not
        )
        self.expert = Expert()
        self.expert_share = LinearSchedule(atoms.expert_share, atoms.expert_share_final, atoms.expert_steps)

    def begin(self) -> tuple[State, int]:
        """New relaxations, and the force calls of their starts."""
        before = self.potential.calls
        return self.environment.reset(self.generators["starts"]), self.potential.calls - before

    def collect(self, state: State, n_stored: int, step: int) -> Collected:
        """`n_stored` transitions and `step` environment steps are what the learner has at the moment."""
        before = self.potential.calls
        transition = self.environment.step(state, *self.proposed(state, n_stored, step))
        renewed = self.environment.renew(transition, self.generators["starts"])
        return Collected(transition, renewed, self.potential.calls - before)

    def proposed(self, state: State, n_stored: int, step: int) -> tuple[Move, Tensor]:
        """What the policy, chance or the expert wants to do, and who of them it was."""
        seen = with_graph(state, self.settings.networks.cutoff_angstrom)
        own = self._lengthened(self.exploration(seen, n_stored, step).to(state.structures.dtype), state)
        if not (torch.isfinite(own.displacements).all() and torch.isfinite(own.strains).all()):
            raise DivergedError("the policy's move", {"step": step, "displacements": own.displacements.tolist()})
        who = Source.RANDOM if self.exploration.at_random(n_stored) else Source.POLICY
        return guided(state, own, who, self.expert, self.expert_share(step), self.generators["expert"])

    def _lengthened(self, move: Move, state: State) -> Move:
        """Whole moves longer or shorter by chance, inside the bounds."""
        if (size := self.settings.atoms.exploration_length_noise) == 0:
            return move
        noise = torch.randn(state.n_structures, generator=self.generators["exploration"], dtype=state.structures.dtype)
        world, longer = self.settings.environment, move.scaled(torch.exp(size * noise), state.structures)
        return longer.bounded(state.structures, world.max_displacement_angstrom, world.max_strain)


class MetricForceActions(MetricActions, ForceMoveActions):
    """Noise in units of the forces; the choice has the dimensions of a metric's gate."""


def action_domain(settings: RelaxRunSettings) -> MoveActions:
    """By the unit of exploration, and by what SAC's entropy counts."""
    world, follows_metric = settings.environment, settings.metric is not None
    bounds = (world.max_displacement_angstrom, world.max_strain)
    if settings.atoms.exploration_unit == "forces":
        kind = MetricForceActions if follows_metric else ForceMoveActions
        return kind(*bounds, settings.networks.stiffness_ev_per_angstrom2)
    return MetricActions(*bounds) if follows_metric else MoveActions(*bounds)


def make_agent(settings: RelaxRunSettings, generator: Generator, penalty: PolicyPenalty | None = None) -> AnyAgent:
    """The agent of a run, with fresh networks, whatever kind its policy is."""
    policy = settings.policy
    return atom_agent(
        action_domain(settings),
        generator,
        settings.agent,
        settings.networks,
        penalty,
        policy if isinstance(policy, MetricSettings) else None,
        # a metric that was fitted waits until the critics know something of it
        0 if settings.fit is None else settings.fit.critic_updates_before,
    )
