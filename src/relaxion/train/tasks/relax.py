"""The task `relax`: an agent learns to relax structures. One step of all of them side by side, replay, updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaxion.errors import CheckpointError
from relaxion.files import Stored, digest, joined
from relaxion.model.layers import with_graph
from relaxion.model.roles import Policy
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.structures import Move, State
from relaxion.structures.minimum_distance import Nearest, correct
from relaxion.structures.structures import per_structure_sum
from relaxion.train.agents.shared import Agent, LinearSchedule, NoisyExplorer, best_actions, scale_learning_rates
from relaxion.train.diagnostics import Diagnosis, Event, Facts
from relaxion.train.diagnostics.diagnosis import lengths
from relaxion.train.experience.environment import MAX_STRAIN, EnvironmentSettings
from relaxion.train.experience.environment import Source as WhoMoved
from relaxion.train.experience.structure_replay import StructureReplay, state_from_tensors, state_tensors
from relaxion.train.experience.vectors import Batch
from relaxion.train.judge.assessment import PART, Assessed, KeptPolicy
from relaxion.train.supervised.dataset import LiveExamples, LiveSource
from relaxion.train.supervised.fit import Fit
from relaxion.train.tasks.progress import (
    Episodes,
    RelaxationResult,
    ReturnsWatch,
    ScalarMeans,
    checked_finite,
    named_generator,
    start_agent_from,
    stored_settings,
    taken_back,
)
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import Collected, RelaxCollector, RelaxTask, make_agent

# settings that have no meaning for a stiffness model alone
GATE = ("environment_information",)
NETWORK = "network."  # of a StiffnessPolicy's own names
LENGTH_FLOOR = 1e-3  # Å: shorter demonstrations count as this long, so that none is worth more than others


class PolicyPenalties:
    """λ‖π(s) - executed‖² (R7.3) plus the fading imitation loss (R8.3), from geometry alone: no potential (R1.4)."""

    def __init__(self, deviation_weight: float, settings: EnvironmentSettings) -> None:
        self.deviation_weight = deviation_weight
        self.settings = settings
        self.imitation_weight = 0.0  # set by its schedule before every round of updates

    def __call__(self, batch: Batch, actions: Move) -> Tensor:
        """(batch,)"""
        total = batch.rewards.new_zeros(len(batch.rewards))
        if self.deviation_weight > 0:
            total = total + self.deviation_weight * deviation(batch.observations, actions, self.settings)
        if self.imitation_weight > 0:
            total = total + self.imitation_weight * imitation(batch, actions)
        return total


def deviation(state: State, proposed: Move, settings: EnvironmentSettings) -> Tensor:
    """Mean squared distance between the proposed move and what bounds and minimum distance leave, (n_structures,).

    The executed move stands still: its gradient would say how the wall moves, not where it is.
    """
    asked = proposed.to(state.structures.dtype)
    with torch.no_grad():
        bounded = asked.bounded(state.structures, settings.max_displacement_angstrom, MAX_STRAIN)
        executed = correct(state.structures, bounded, Nearest(settings.minimum_distance_angstrom)).executed
    return imitation_distance(state, asked, executed)


def imitation(batch: Batch, actions: Move) -> Tensor:
    """Squared distance to what the expert did, relative to the length of that; 0 where it was not the expert."""
    if batch.sources is None:
        return torch.zeros_like(batch.rewards)
    state: State = batch.observations
    demonstrated: Move = batch.actions
    distance = imitation_distance(state, actions, demonstrated)
    nothing = Move(torch.zeros_like(demonstrated.displacements), torch.zeros_like(demonstrated.strains))
    length = imitation_distance(state, nothing, demonstrated) + LENGTH_FLOOR**2
    return distance / length * (batch.sources == WhoMoved.EXPERT)


def imitation_distance(state: State, move: Move, demonstrated: Move) -> Tensor:
    """Mean squared distance to the demonstrated displacements (Å²) plus that of the strains, per structure."""
    index = state.structures.structure_index
    number = state.n_structures
    squares = (move.displacements - demonstrated.displacements).square().sum(dim=1)
    mean = per_structure_sum(squares, index, number) / state.structures.counts
    return mean + (move.strains - demonstrated.strains).square().sum(dim=(1, 2))  # (n_structures,)


class RelaxTrainer:
    """One agent, its structures, its replay; with a stiffness policy also the fit of its stiffness model.

    `step` counts the updates of the fit before, then environment steps.
    """

    def __init__(self, settings: RelaxRunSettings, task: RelaxTask) -> None:
        training = settings.training
        atoms = settings.atoms
        world = settings.environment
        self.settings = settings
        self.task = task
        self.step = 0
        self.n_updates = 0
        self.force_calls = 0
        names = ("exploration", "replay", "starts", "expert")
        self.generators = {name: named_generator(training.seed, name) for name in names}
        self.penalties = PolicyPenalties(atoms.deviation_penalty_per_angstrom2, world)
        self.agent = make_agent(settings, named_generator(training.seed, "agent"), self.penalties)
        self.replay = StructureReplay(
            task.replay_capacity, task.atom_capacity, generator=self.generators["replay"], n_steps=training.n_steps
        )
        self.collector = RelaxCollector(settings, task, self.agent, self.generators)
        self.exploration = self.collector.exploration
        self.environment = self.collector.environment
        self.imitation_weight = LinearSchedule(atoms.imitation_weight, 0.0, atoms.expert_steps)
        self.fit = self._new_fit()
        self.assessor = task.assessor()
        self.validation = task.validation_assessor()
        self.kept = KeptPolicy()
        self.episodes = Episodes(world.n_structures)
        self.means = ScalarMeans()
        self.diagnosis = Diagnosis(
            Facts(
                force_tolerance_ev_per_angstrom=world.force_tolerance_ev_per_angstrom,
                minimum_distance_angstrom=world.minimum_distance_angstrom,
                max_displacement_angstrom=world.max_displacement_angstrom,
                memory_steps=atoms.alarm_memory_steps,
            )
        )
        self.check_returns = ReturnsWatch()
        self.state, self.force_calls = self.collector.begin()

    def _new_fit(self) -> Fit | None:
        """Of a stiffness policy."""
        settings = self.settings
        if settings.fit is None:
            return None
        policy: Any = self.agent.policy
        generator = named_generator(settings.training.seed, "lessons")
        source = LiveSource(self.environment.potential, self.environment.starts)
        self._examples = LiveExamples(policy.network, [source], settings.fit, generator)
        return Fit(policy.network, self._examples, settings.fit)

    @property
    def reinforced_steps(self) -> int:
        """Environment steps of the agent; schedules go by them."""
        return self.step - (0 if self.fit is None else self.fit.n_updates)

    @property
    def steps_per_round(self) -> int:
        return self.settings.environment.n_structures

    def prepare(self, folder: Path) -> None:
        """BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def advance(self) -> None:
        """One update of the fit while there are any; then collect → store → update."""
        if self.fit is not None and not self.fit.done:
            self._advance_fit(self.fit)
            return
        self._collect()
        if not self.exploration.warming_up(len(self.replay)):
            self.penalties.imitation_weight = self.imitation_weight(self.reinforced_steps)
            share = self.settings.training.learning_rate_schedule(self.reinforced_steps)
            scale_learning_rates((self.agent.policy_optimizer, self.agent.critic_optimizer), share)
            for _ in range(self.settings.atoms.updates_per_round):
                self.means.add(self.agent.update(self._sampled()))
                self.n_updates += 1

    def _advance_fit(self, fit: Fit) -> None:
        before = self.task.potential.calls
        self.means.add(fit.update())
        self.force_calls += self.task.potential.calls - before
        self.step += 1
        if fit.done:
            self._examples.forget()
            follow(self.agent)

    def _sampled(self) -> Batch:
        """Every network of an update looks at the same neighbours: they are searched once per side."""
        batch = self.replay.sample(self.settings.training.batch_size)
        cutoff = self.settings.networks.cutoff_angstrom
        return replace(
            batch,
            observations=with_graph(batch.observations, cutoff),
            next_observations=with_graph(batch.next_observations, cutoff),
        )

    def _collect(self) -> None:
        learned_agent = self._learned_agent
        collected = self._next_collected()
        transition = collected.transition
        self.force_calls += collected.force_calls
        self.replay.add(transition)
        self.step += self.steps_per_round
        self.diagnosis.add(transition, learned_agent)
        finished = self.episodes.add(transition.reward, transition.finished)
        self.check_returns(self.agent, finished, self.settings.environment.discount_factor)
        self.state = collected.state

    def _next_collected(self) -> Collected:
        return self.collector.collect(self.state, len(self.replay), self.reinforced_steps)

    @property
    def _learned_agent(self) -> Agent | None:
        """None in the warm-up: what it says means nothing yet."""
        return None if self.exploration.warming_up(len(self.replay)) else self.agent

    def act(self, state: State) -> Move:
        """The policy that is assessed, without exploration."""
        seen = with_graph(state, self.settings.networks.cutoff_angstrom)
        return best_actions(self.acting_policy, self.agent.action_domain, seen)

    @property
    def acting_policy(self) -> Policy:
        """What is assessed, kept and packaged: the slow copy of what learns, where there is one."""
        online = self.agent.policy
        return getattr(self.agent, "target_policy", online) if self.settings.atoms.averaged_policy else online

    def assess(self, stop: Callable[[], bool] | None = None) -> Assessed:
        """From the starts of the results; and from validation starts, by which a policy is kept."""
        relax = self.task.following(self.act)
        assessed = self.assessor(relax, stop)
        validated = assessed if self.validation is None else self.validation(relax, stop)
        self.kept.offer(self.step, validated, assessed, self.acting_policy.state_dict())
        agent = self._learned_agent
        found = {} if agent is None else lengths(agent, self.environment, self.state)
        self.diagnosis.assessed(assessed.beside("BFGS"), self.kept.beside_best(validated), found)
        validation = {"eval/validation_force_calls_mean": float(validated.force_calls.mean())}
        return replace(assessed, extra=validation | self.kept.scalars())

    def scalars(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        own |= {"train/n_updates": self.n_updates, **self.episodes.scalars()}
        if isinstance(self.agent, NoisyExplorer):
            own["rollout/exploration_noise"] = self.agent.exploration_scale
        own |= self.means.take()
        scheduled = {"imitation_weight": self.imitation_weight(self.reinforced_steps)}
        return own | self.diagnosis.scalars(self.step, self.state, self._learned_agent, self.replay, own | scheduled)

    def take_events(self) -> list[Event]:
        return self.diagnosis.take_events()

    def result(self, final: Assessed, wall_time_seconds: float) -> RelaxationResult:
        atoms = self.settings.atoms
        return RelaxationResult.of(
            self.settings,
            final,
            steps=self.step,
            episodes=self.episodes.finished,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(joined({"agent": self.agent.snapshot()})),
            training_force_calls=self.force_calls,
            potential=atoms.potential,
            structures=atoms.structures,
            **({} if self.kept.best is None else self.kept.best.result()),
        )

    def weights(self) -> dict[str, Tensor]:
        """What it takes to act, or to start a new run from; and the kept policy, which is what is packaged."""
        return joined({"agent": self.agent.snapshot(), PART: self.kept.snapshot()})

    def start_from(self, stored: Stored) -> None:
        """Take over old networks; counters and Adam's memory stay at 0 (R10.2).

        Of a run with another agent, or of the task stiffness, a stiffness policy takes the stiffness model alone.
        """
        if self.fit is not None and (stiffness := stiffness_in(stored, self.settings.flat())) is not None:
            self.fit.network.load_state_dict(stiffness)
            follow(self.agent)
        else:
            start_agent_from(self.agent, stored, self.settings.flat())

    def snapshot(self) -> dict[str, Tensor]:
        """A DivergedError when the agent is not worth keeping."""
        parts = {name: part.snapshot() for name, part in self._saved_parts().items()}
        checked_finite(parts["agent"], self.step)
        parts["state"] = state_tensors(self.state)
        if self.fit is not None:
            parts["fit"] = self.fit.snapshot()
        parts["generators"] = {name: generator.get_state() for name, generator in self.generators.items()}
        counters = {"step": self.step, "n_updates": self.n_updates, "force_calls": self.force_calls}
        if self.fit is not None:
            counters["fit_updates"] = self.fit.n_updates
        parts["counters"] = {name: torch.tensor(number) for name, number in counters.items()}
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        self._check_collectors(int(stored.part("collectors").get("counters.number", 1)))
        with taken_back():
            if self.fit is not None:
                self.fit.restore(stored.part("fit"))
            for name, part in self._saved_parts().items():
                part.restore(stored.part(name))
            for name, generator in self.generators.items():
                generator.set_state(stored.part("generators")[name])
            self.state = state_from_tensors(stored.part("state"))
            counters = stored.part("counters")
            self.step = int(counters["step"])
            self.n_updates = int(counters["n_updates"])
            self.force_calls = int(counters["force_calls"])

    def _check_collectors(self, number: int) -> None:
        if number > 1:
            raise CheckpointError(f"this run has {number} collectors; continue with `collectors=ray:{number}`")

    def close(self) -> None:
        """Nothing is open."""

    def _saved_parts(self) -> dict[str, Any]:
        """By their names in a checkpoint."""
        parts = {name: getattr(self, name) for name in ("agent", "replay", "episodes", "diagnosis")}
        return parts | {"stiffness_means": self.means, PART: self.kept}


def follow(agent: Any) -> None:
    """The target becomes what the policy is: it was copied before the fit. (SAC has no target policy.)"""
    if (target := getattr(agent, "target_policy", None)) is not None:
        target.load_state_dict(agent.policy.state_dict())


def stiffness_in(stored: Stored, settings: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Weights of the stiffness model in a run of another kind (agent, gate, task).

    None for a run alike, which is taken over whole.

    `settings` are the flat ones of the new run. A CheckpointError where the old stiffness model is of another shape.
    """
    old = stored_settings(stored)
    same = ("task", "agent", "policy", *GATE)
    if all(name in old and old[name] == settings[name] for name in same):
        return None
    prefix = f"agent.policy.{NETWORK}" if old.get("task") == settings["task"] else f"stiffness.{NETWORK}"
    found = {key.removeprefix(prefix): tensor for key, tensor in stored.tensors.items() if key.startswith(prefix)}
    if not found:
        raise CheckpointError(
            "the old run has no stiffness model to start from; it must have policy = stiffness or task = stiffness"
        )
    names = [name for name in StiffnessSettings.model_fields if name not in (*GATE, "damped")]
    usual = {
        name: StiffnessSettings.model_fields[name].default for name in StiffnessSettings.younger
    }  # not written down
    old, settings = (usual | dict(values) for values in (old, settings))
    changes = [f"{n} (was {old[n]!r}, now {settings[n]!r})" for n in names if n in old and old[n] != settings[n]]
    if changes:
        raise CheckpointError(f"the old stiffness model is another one, because these differ: {', '.join(changes)}")
    return found
