"""The loop's body on atoms: one step of all structures side by side, replay, updates; resumable to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaxion.agents.agent import Agent, NoisyExplorer
from relaxion.errors import CheckpointError, RelaxionWarning
from relaxion.experience.batch import Batch
from relaxion.experience.exploration import LinearSchedule
from relaxion.experience.state_rows import state_from_tensors, state_tensors
from relaxion.experience.structure_replay import StructureReplay
from relaxion.files import Stored, digest, joined
from relaxion.networks.surroundings import with_graph
from relaxion.structures import Move, State
from relaxion.training.atom_assessment import AtomAssessed, AtomAssessor
from relaxion.training.atom_collector import AtomCollector, Collected
from relaxion.training.atom_domain import make_agent
from relaxion.training.atom_task import AtomTask
from relaxion.training.diagnostics import Diagnosis, Event, Facts
from relaxion.training.metric_teacher import MetricTeacher, follow, metric_in, take_over
from relaxion.training.policy_penalties import PolicyPenalties
from relaxion.training.result import RelaxationResult
from relaxion.training.run_settings import AtomRunSettings, MetricRunSettings
from relaxion.training.seeds import named_generator
from relaxion.training.statistics import Episode, Episodes, MetricMeans
from relaxion.training.trainer import ReturnsChecker, checked_finite, start_agent_from, taken_back


class AtomTrainer:
    """One agent, its structures, its replay; where its policy follows a metric, also who teaches that.

    `step` counts the updates of the lessons before, then environment steps.
    """

    def __init__(self, settings: AtomRunSettings, task: AtomTask) -> None:
        training, atoms, world = settings.training, settings.atoms, settings.environment
        self.settings, self.task = settings, task
        self.step, self.n_updates, self.force_calls = 0, 0, 0
        names = ("exploration", "replay", "starts", "expert")
        self.generators = {name: named_generator(training.seed, name) for name in names}
        self.penalties = PolicyPenalties(atoms.deviation_penalty_per_angstrom2, world)
        self.agent = make_agent(settings, named_generator(training.seed, "agent"), self.penalties)
        self.replay = StructureReplay(
            training.replay_capacity, task.atom_capacity, generator=self.generators["replay"], n_steps=training.n_steps
        )
        self.collector = AtomCollector(settings, task, self.agent, self.generators)
        self.exploration, self.environment = self.collector.exploration, self.collector.environment
        self.imitation_weight = LinearSchedule(atoms.imitation_weight, 0.0, atoms.expert_steps)
        self.anchor_weight = LinearSchedule(0.0, 0.0, atoms.expert_steps)
        self.teacher = self._make_teacher()
        self.assessor = AtomAssessor(task, training.assessment_starts)
        self.episodes = Episodes(world.n_structures)
        self.metric_means = MetricMeans()
        self.diagnosis = Diagnosis(
            Facts(
                force_tolerance_ev_per_angstrom=world.force_tolerance_ev_per_angstrom,
                minimum_distance_angstrom=world.minimum_distance_angstrom,
                max_displacement_angstrom=world.max_displacement_angstrom,
                expert_fades_within_steps=atoms.expert_steps,
                memory_steps=atoms.alarm_memory_steps,
            )
        )
        self._warned = False
        self.state, self.force_calls = self.collector.begin()

    def _make_teacher(self) -> MetricTeacher | None:
        settings = self.settings
        if not isinstance(settings, MetricRunSettings):
            return None
        seed, lessons = settings.training.seed, settings.lessons
        policy: Any = self.agent.policy
        teacher = MetricTeacher(policy, self.environment, lessons, named_generator(seed, "lessons"))
        self.generators["anchor"] = named_generator(seed, "anchor")
        self.penalties.anchor = teacher.anchor(self.replay, self.generators["anchor"])
        steps = settings.atoms.expert_steps
        self.anchor_weight = LinearSchedule(lessons.lesson_weight, lessons.lesson_weight_final, steps)
        return teacher

    @property
    def reinforced_steps(self) -> int:
        """Environment steps of the agent; schedules go by them."""
        return self.step - (0 if self.teacher is None else self.teacher.n_updates)

    @property
    def steps_per_round(self) -> int:
        return self.settings.environment.n_structures

    def prepare(self, folder: Path) -> None:
        """BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def advance(self) -> None:
        """One lesson while there are any; then collect → store → update."""
        if self.teacher is not None and not self.teacher.done:
            self._teach(self.teacher)
            return
        self._collect()
        if not self.exploration.warming_up(len(self.replay)):
            self.penalties.imitation_weight = self.imitation_weight(self.reinforced_steps)
            self.penalties.anchor_weight = self.anchor_weight(self.reinforced_steps)
            for _ in range(self.settings.atoms.updates_per_round):
                self.metric_means.add(self.agent.update(self._sampled()))
                self.n_updates += 1

    def _teach(self, teacher: MetricTeacher) -> None:
        before = self.task.potential.calls
        self.metric_means.add_numbers(teacher.update())
        self.force_calls += self.task.potential.calls - before
        self.step += 1
        if teacher.done:
            follow(self.agent.policy, getattr(self.agent, "target_policy", None))

    def _sampled(self) -> Batch:
        """Every network of an update looks at the same neighbours: they are searched once per side."""
        batch, cutoff = self.replay.sample(self.settings.training.batch_size), self.settings.networks.cutoff_angstrom
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
        self._warn_of_returns(self.episodes.add(transition.reward, transition.finished))
        self.state = collected.state

    def _next_collected(self) -> Collected:
        return self.collector.collect(self.state, len(self.replay), self.reinforced_steps)

    @property
    def _learned_agent(self) -> Agent | None:
        """None in the warm-up: what it says means nothing yet."""
        return None if self.exploration.warming_up(len(self.replay)) else self.agent

    def _warn_of_returns(self, finished: list[Episode]) -> None:
        """Once per run: the first time is when something can still be done."""
        if self._warned or not finished or not isinstance(self.agent, ReturnsChecker):
            return
        gamma = self.settings.environment.discount_factor
        sentence = self.agent.check_returns(torch.cat([e.discounted_returns(gamma) for e in finished]))
        if sentence is not None:
            self._warned = True
            warnings.warn(sentence, RelaxionWarning, stacklevel=2)

    def act(self, state: State) -> Move:
        """The policy without exploration."""
        return self.agent.act(with_graph(state, self.settings.networks.cutoff_angstrom))

    def assess(self, stop: Callable[[], bool] | None = None) -> AtomAssessed:
        assessed = self.assessor(self.act, stop)
        if "BFGS" in assessed.baselines:
            self.diagnosis.assessed(assessed.mean_force_calls, assessed.baselines["BFGS"])
        return assessed

    def metrics(self) -> dict[str, float]:
        """What has built up since the last call; one line of the log."""
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        own |= {"train/n_updates": self.n_updates, **self.episodes.metrics()}
        if isinstance(self.agent, NoisyExplorer):
            own["rollout/exploration_noise"] = self.agent.exploration_scale
        own |= self.metric_means.take()
        scheduled = {"imitation_weight": self.imitation_weight(self.reinforced_steps)}
        return own | self.diagnosis.metrics(self.step, self.state, self._learned_agent, self.replay, own | scheduled)

    def take_events(self) -> list[Event]:
        """Alarms that began or ended since the last call."""
        return self.diagnosis.take_events()

    def result(self, final: AtomAssessed, wall_time_seconds: float) -> RelaxationResult:
        atoms, measured = self.settings.atoms, final.metrics()
        return RelaxationResult(
            agent=self.settings.agent_name,
            task=self.settings.training.task,
            seed=self.settings.training.seed,
            steps=self.step,
            final_return_mean=final.mean,
            final_return_worst=final.worst,
            episodes=self.episodes.finished,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=self.weights_sha256(),
            final_force_calls_mean=measured["eval/force_calls_mean"],
            final_force_calls_median=measured["eval/force_calls_median"],
            final_success_rate=final.success_rate,
            force_calls_bfgs=final.baselines["BFGS"],
            force_calls_fire=final.baselines["FIRE"],
            training_force_calls=self.force_calls,
            potential=atoms.potential,
            structures=atoms.structures,
        )

    def weights(self) -> dict[str, Tensor]:
        """What it takes to act, or to start a new run from. Networks for atoms normalise by themselves."""
        return joined({"agent": self.agent.snapshot()})

    def weights_sha256(self) -> str:
        return digest(self.weights())

    def start_from(self, stored: Stored) -> None:
        """Take over old networks; counters and Adam's memory stay at 0 (R10.2).

        Of a run with another agent, or of the task metals, a metric policy takes the metric alone.
        """
        policy: Any = self.agent.policy
        if self.teacher is not None and (metric := metric_in(stored, self.settings.flat())) is not None:
            take_over(policy, getattr(self.agent, "target_policy", None), metric)
        else:
            start_agent_from(self.agent, stored, self.settings.flat())

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs, as tensors. A DivergedError when the agent is not worth keeping."""
        parts = {name: getattr(self, name).snapshot() for name in _PARTS}
        checked_finite(parts["agent"], self.step)
        parts["state"] = state_tensors(self.state)
        if self.teacher is not None:
            parts["teacher"] = self.teacher.snapshot()
        parts["generators"] = {name: generator.get_state() for name, generator in self.generators.items()}
        counters = {"step": self.step, "n_updates": self.n_updates, "force_calls": self.force_calls}
        if self.teacher is not None:
            counters["lessons"] = self.teacher.n_updates
        parts["counters"] = {name: torch.tensor(number) for name, number in counters.items()}
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        """The opposite of `snapshot`."""
        self._check_collectors(int(stored.part("collectors").get("counters.number", 1)))
        with taken_back():
            if self.teacher is not None:  # first: its memory of the policy may be older than the agent's
                self.teacher.restore(stored.part("teacher"))
            for name in _PARTS:
                getattr(self, name).restore(stored.part(name))
            for name, generator in self.generators.items():
                generator.set_state(stored.part("generators")[name])
            self.state = state_from_tensors(stored.part("state"))
            counters = stored.part("counters")
            self.step, self.n_updates = int(counters["step"]), int(counters["n_updates"])
            self.force_calls = int(counters["force_calls"])

    def _check_collectors(self, number: int) -> None:
        if number > 1:
            raise CheckpointError(f"this run has {number} collectors; go on with --collectors ray:{number}")

    def close(self) -> None:
        """Nothing is open."""


_PARTS = ("agent", "replay", "episodes", "metric_means", "diagnosis")
