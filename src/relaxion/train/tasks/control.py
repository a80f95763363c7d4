"""Gymnasium tasks: settings, assessment, and the trainer, whose `advance` is collect, store, update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor

from relaxion.errors import AssessmentStopped, CheckpointError, RelaxionWarning, RunError, SettingsError
from relaxion.files import Stored, digest, joined
from relaxion.settings import Settings
from relaxion.train.agents import AGENT_SETTINGS, vector_agent
from relaxion.train.agents.shared import Exploration, NoisyExplorer, scale_learning_rates
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Normaliser, VectorEnvironments, VectorReplay, VectorTask, task
from relaxion.train.tasks.progress import (
    DIVERGED,
    DivergedError,
    Episodes,
    NonFiniteError,
    Result,
    ReturnsWatch,
    ScalarMeans,
    checked_finite,
    named_generator,
    start_agent_from,
    taken_back,
)
from relaxion.train.tasks.settings import AgentRunSettings, TrainingSettings

STARTS_SEED = 20  # of all assessments, whatever the run's seed: every agent meets the same starts
MAX_STEPS = 10_000  # of an assessed episode that has no end of its own


class VectorTrainingSettings(TrainingSettings):
    """For Gymnasium tasks."""

    n_environments: int = Field(default=1, ge=1)
    """Environments side by side, all stepped in this process; one update follows each step of one of them."""

    discount_factor: float = Field(default=0.99, ge=0, le=1)
    """γ per step."""

    normalise_observations: bool = True
    """By the running mean and variance (R3.1); part of the policy from then on."""

    def _check_together(self) -> None:
        super()._check_together()
        if self.capacity() % self.n_environments:
            raise SettingsError(
                f"replay_capacity {self.capacity()} must be a multiple of n_environments {self.n_environments}"
            )


@dataclass(frozen=True)
class VectorRunSettings(AgentRunSettings):
    """A Gymnasium task."""

    training: VectorTrainingSettings
    networks: VectorNetworkSettings

    COUNTS_FORCE_CALLS = False

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:
        return {
            "training": VectorTrainingSettings,
            "networks": VectorNetworkSettings,
            "agent": AGENT_SETTINGS[values["agent"]],
        }

    def trainer(self) -> Trainer:
        return Trainer(self, task(self.training.task))


@dataclass(frozen=True)
class AssessedReturns:
    """Undiscounted returns and lengths of the episodes."""

    returns: Tensor  # (n_starts,) float64
    lengths: Tensor  # (n_starts,)

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def worst(self) -> float:
        return float(self.returns.min())

    @property
    def record(self) -> Self:
        return self

    def as_plain(self) -> dict[str, Any]:
        """Start by start, for assessment.json, which has no word for what is not finite."""
        returns = [value if math.isfinite(value) else None for value in self.returns.tolist()]
        return {"returns": returns, "lengths": self.lengths.tolist()}

    def scalars(self) -> dict[str, float]:
        """Under the names of Stable-Baselines3, and the worst of all."""
        lengths = float(self.lengths.to(torch.float64).mean())
        return {"eval/mean_reward": self.mean, "eval/worst_reward": self.worst, "eval/mean_ep_length": lengths}


class ReturnsAssessor:
    """One episode from each of the fixed starts, side by side: one call of the policy serves all."""

    def __init__(self, task: VectorTask, n_starts: int, max_steps: int = MAX_STEPS) -> None:
        self.task = task
        self.n_starts = n_starts
        self.max_steps = max_steps
        self._warned = False
        self._environments: VectorEnvironments | None = None  # made when first needed, then kept

    def __call__(self, act: Callable[[Tensor], Tensor], stop: Callable[[], bool] | None = None) -> AssessedReturns:
        """Episodes are cut after `max_steps`; `stop` is asked before every step."""
        environments = self._from_the_start()
        returns = torch.zeros(self.n_starts, dtype=torch.float64)
        lengths = torch.zeros(self.n_starts, dtype=torch.int64)
        running = torch.ones(self.n_starts, dtype=torch.bool)
        while running.any():
            if stop is not None and stop():
                raise AssessmentStopped
            if (step := int(lengths.max())) == self.max_steps:
                self._warn_of_cut(int(running.sum()))
                break
            _check_assessed("the environment's observation", environments.observations, step)
            actions = act(environments.observations)
            _check_assessed("the policy's action", actions, step, DIVERGED)
            stepped = environments.step(actions)
            _check_assessed("the environment's reward", stepped.rewards, step)
            returns += torch.where(running, stepped.rewards, 0.0)
            lengths += running
            running &= ~stepped.ended
            if running.any():
                environments.renew(stepped.ended)  # episodes beyond the first are not counted
        return AssessedReturns(returns, lengths)

    def _warn_of_cut(self, n_cut: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.task.name} did not end by itself: {n_cut} of {self.n_starts} episodes of an assessment were cut "
            f"after {self.max_steps} steps, and their returns count up to there",
            RelaxionWarning,
            stacklevel=3,
        )

    def _from_the_start(self) -> VectorEnvironments:
        generator = named_generator(STARTS_SEED, "assessment")
        if self._environments is None:
            self._environments = VectorEnvironments(self.task.make, self.n_starts, generator)
        else:
            self._environments.generator = generator
            self._environments.renew(torch.ones(self.n_starts, dtype=torch.bool))
        return self._environments

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def _check_assessed(what: str, numbers: Tensor, step: int, advice: str = "look into the environment") -> None:
    if not torch.isfinite(numbers).all():
        raise RunError(f"{what} in step {step} of an assessment is not finite; {advice}")


def assess(
    act: Callable[[Tensor], Tensor], task: VectorTask, n_starts: int, max_steps: int = MAX_STEPS
) -> AssessedReturns:
    """Once, with environments that are closed afterwards."""
    assessor = ReturnsAssessor(task, n_starts, max_steps)
    try:
        return assessor(act)
    finally:
        assessor.close()


class Trainer:
    """One agent, its task, its replay. `advance` is one step of every environment and the updates it pays for."""

    def __init__(self, settings: VectorRunSettings, task: VectorTask) -> None:
        training = settings.training
        self.settings = settings
        self.task = task
        self.step = 0
        self.n_updates = 0
        self.generators = {name: named_generator(training.seed, name) for name in ("exploration", "replay", "starts")}
        domain = BoxActions(task.lowest_action, task.highest_action)
        self.agent = vector_agent(
            task.observation_size, domain, named_generator(training.seed, "agent"), settings.agent, settings.networks
        )
        self.normaliser = Normaliser(task.observation_size, enabled=training.normalise_observations)
        self.replay = VectorReplay(
            training.capacity(),
            task.observation_size,
            task.action_size,
            generator=self.generators["replay"],
            discount_factor=training.discount_factor,
            n_steps=training.n_steps,
            n_environments=training.n_environments,
        )
        self.exploration = Exploration(
            self.agent,
            domain,
            self.generators["exploration"],
            warmup_steps=training.warmup_steps,
            noise=training.noise_schedule(self.agent),
        )
        self.environments = VectorEnvironments(task.make, training.n_environments, self.generators["starts"])
        self.assessor = ReturnsAssessor(task, training.assessment_starts)
        self.episodes = Episodes(training.n_environments)
        self.means = ScalarMeans()
        self.check_returns = ReturnsWatch()

    @property
    def steps_per_round(self) -> int:
        return self.settings.training.n_environments

    def prepare(self, folder: Path) -> None:
        """Nothing is needed beforehand."""

    def advance(self) -> None:
        """Collect → store → update."""
        self._collect()
        if not self.exploration.warming_up(len(self.replay)):
            training = self.settings.training
            agent = self.agent
            share = training.learning_rate_schedule(self.step)
            scale_learning_rates((agent.policy_optimizer, agent.critic_optimizer), share)
            for _ in range(training.n_environments):
                self.means.add(self.agent.update(self.replay.sample(training.batch_size, self.normaliser)))
                self.n_updates += 1

    def _collect(self) -> None:
        observations = self.environments.observations  # (n_environments, observation_size), raw
        known = {"observations": observations}
        self._check_finite("the environment's observation", observations, known)
        self.normaliser.update(observations)
        known["actions"] = actions = self.exploration(self.normaliser(observations), len(self.replay), self.step)
        self._check_finite("the policy's action", actions, known, DivergedError)
        stepped = self.environments.step(actions)
        known |= vars(stepped)
        rewards = stepped.rewards.to(self.replay.rewards.dtype)  # as they are kept
        self._check_finite("the environment's reward", rewards, known)
        self._check_finite("the environment's observation", stepped.next_observations, known)
        self.replay.add(**known)
        self.step += self.settings.training.n_environments
        finished = self.episodes.add(stepped.rewards, stepped.ended)
        self.check_returns(self.agent, finished, self.settings.training.discount_factor)
        self.environments.renew(stepped.ended)

    def _check_finite(
        self, what: str, numbers: Tensor, known: Mapping[str, Tensor], error: type[NonFiniteError] = NonFiniteError
    ) -> None:
        if not torch.isfinite(numbers).all():
            raise error(what, {"step": self.step} | {name: value.tolist() for name, value in known.items()})

    def act(self, observations: Tensor) -> Tensor:
        """The policy without exploration, on raw observations."""
        return self.agent.act(self.normaliser(observations))

    def assess(self, stop: Callable[[], bool] | None = None) -> AssessedReturns:
        """Episodes without noise from fixed starts, in environments of their own."""
        return self.assessor(self.act, stop)

    def result(self, final: AssessedReturns, wall_time_seconds: float) -> Result:
        return Result(
            agent=self.settings.agent_name,
            task=self.settings.training.task,
            seed=self.settings.training.seed,
            steps=self.step,
            final_return_mean=final.mean,
            final_return_worst=final.worst,
            episodes=self.episodes.finished,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
        )

    def take_events(self) -> list[Any]:
        """Diagnoses are for structures."""
        return []

    def close(self) -> None:
        self.assessor.close()
        self.environments.close()

    def scalars(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "train/n_updates": self.n_updates}
        own |= self.episodes.scalars()
        if isinstance(self.agent, NoisyExplorer):
            own["rollout/exploration_noise_half_ranges"] = self.agent.exploration_scale
        return own | self.means.take()

    def weights(self) -> dict[str, Tensor]:
        """Agent and normaliser: what it takes to act, or to start a new run from."""
        return joined({"agent": self.agent.snapshot(), "normaliser": self.normaliser.snapshot()})

    def start_from(self, stored: Stored) -> None:
        """Take over old networks and normaliser; counters and Adam's memory stay at 0 (R10.2)."""
        normaliser = stored.part("normaliser")
        if "mean" not in normaliser or normaliser["mean"].shape != self.normaliser.mean.shape:
            size = self.task.observation_size
            raise CheckpointError(f"the old weights do not fit this task, whose observations have {size} numbers")
        with taken_back():
            start_agent_from(self.agent, stored, self.settings.flat())
            self.normaliser.restore(normaliser)

    def snapshot(self) -> dict[str, Tensor]:
        """A DivergedError when the agent is not worth keeping."""
        parts = {name: part.snapshot() for name, part in self._parts().items()}
        checked_finite(parts["agent"], self.step)
        parts["generators"] = {name: generator.get_state() for name, generator in self.generators.items()}
        parts["counters"] = {"step": torch.tensor(self.step), "n_updates": torch.tensor(self.n_updates)}
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        """The opposite of `snapshot`; warns when the environment does not repeat its episode."""
        repeated: list[bool | None] = []
        with taken_back():
            repeated += [part.restore(stored.part(name)) for name, part in self._parts().items()]
            for name, generator in self.generators.items():
                generator.set_state(stored.part("generators")[name])
            counters: Mapping[str, Tensor] = stored.part("counters")
            self.step = int(counters["step"])
            self.n_updates = int(counters["n_updates"])
        if False in repeated:
            self._cut_episodes()
            warnings.warn(
                f"{self.task.name} did not repeat its episode from the same seed and actions: the run continues with "
                "new episodes, not bit for bit as it would have without the stop",
                RelaxionWarning,
                stacklevel=2,
            )

    def _cut_episodes(self) -> None:
        """What was under way has no continuation: replay sees a time limit there, and new episodes begin."""
        self.replay.cut()
        self.environments.renew(torch.ones(self.settings.training.n_environments, dtype=torch.bool))
        episodes = self.episodes.snapshot()
        nothing = {"lengths": torch.zeros_like(episodes["lengths"]), "rewards": episodes["rewards"][:0]}
        self.episodes.restore(episodes | nothing)

    def _parts(self) -> dict[str, Any]:
        """By their names in a checkpoint."""
        parts = {name: getattr(self, name) for name in ("agent", "normaliser", "replay", "environments", "episodes")}
        return parts | {"stiffness_means": self.means}
