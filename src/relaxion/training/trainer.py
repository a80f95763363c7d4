"""The loop's body: collect, store, update. Everything that changes can be taken out and put back, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from relaxion.agents.agent import Agent, PolicyPenalty
from relaxion.agents.make import vector_agent
from relaxion.errors import CheckpointError, RelaxionWarning
from relaxion.experience.exploration import Exploration, LinearSchedule, NoisyExplorer
from relaxion.experience.normaliser import Normaliser
from relaxion.experience.replay import VectorReplay
from relaxion.experience.vector_environment import Stepped, Task, VectorEnvironments
from relaxion.files import Stored, digest, joined
from relaxion.networks.vector import BoxActions
from relaxion.training.assessment import Assessed, Assessor
from relaxion.training.checkpoint import stored_settings
from relaxion.training.diagnostics.alarms import Event
from relaxion.training.result import Result
from relaxion.training.run_settings import VectorRunSettings
from relaxion.training.seeds import named_generator
from relaxion.training.settings import TrainingSettings
from relaxion.training.statistics import Episode, Episodes, MetricMeans

MEANING = ("normalise_observations", "lowest_value", "highest_value", "n_bins")  # settings that weights depend on
BOUNDS = ("centre", "half_range", "bounds")  # buffers of networks that depend on the bounds of actions
NOT_WEIGHTS = ("n_updates", "generator")  # parts of an agent's snapshot that belong to its run; so does Adam's memory


class NonFiniteError(Exception):
    """A step brought NaN or infinity; the transition as plain numbers, for the run folder."""

    def __init__(self, what: str, transition: dict[str, Any]) -> None:
        super().__init__(what)
        self.what, self.transition = what, transition

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can come from another process."""
        return type(self), (self.what, self.transition)


class DivergedError(NonFiniteError):
    """The agent's own numbers are no longer finite: nothing outside is to blame, and going on helps nothing."""


@runtime_checkable
class ReturnsChecker(Protocol):
    """An agent that can say when returns leave what its critic can express (D4PG)."""

    def check_returns(self, returns: Tensor) -> str | None: ...


class Trainer:
    """One agent, its task, its replay. `advance` is one step of every environment and the updates it pays for."""

    def __init__(self, settings: VectorRunSettings, task: Task, policy_penalty: PolicyPenalty | None = None) -> None:
        training = settings.training
        self.settings, self.task, self.step, self.n_updates = settings, task, 0, 0
        self.generators = {name: named_generator(training.seed, name) for name in ("exploration", "replay", "starts")}
        domain = BoxActions(task.lowest_action, task.highest_action)
        self.agent = vector_agent(
            task.observation_size,
            domain,
            named_generator(training.seed, "agent"),
            settings.agent,
            settings.networks,
            policy_penalty,
        )
        self.normaliser = Normaliser(task.observation_size, enabled=training.normalise_observations)
        self.replay = VectorReplay(
            training.replay_capacity,
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
            noise=noise_schedule(self.agent, training),
        )
        self.environments = VectorEnvironments(task.make, training.n_environments, self.generators["starts"])
        self.assessor = Assessor(task, training.assessment_starts, training.assessment_max_steps)
        self.episodes = Episodes(training.n_environments)
        self.metric_means = MetricMeans()
        self._warned = False

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
            for _ in range(training.updates_per_step * training.n_environments):
                self.metric_means.add(self.agent.update(self.replay.sample(training.batch_size, self.normaliser)))
                self.n_updates += 1

    def _collect(self) -> None:
        observations = self.environments.observations  # (n_environments, observation_size), raw
        self._check_finite("the environment's observation", observations, observations)
        self.normaliser.update(observations)
        actions = self.exploration(self.normaliser(observations), len(self.replay), self.step)
        self._check_finite("the policy's action", actions, observations, actions, error=DivergedError)
        stepped = self.environments.step(actions)
        rewards = stepped.rewards.to(self.replay.rewards.dtype)  # as they are kept
        self._check_finite("the environment's reward", rewards, observations, actions, stepped)
        self._check_finite("the environment's observation", stepped.next_observations, observations, actions, stepped)
        self.replay.add(
            observations, actions, stepped.rewards, stepped.next_observations, stepped.terminated, stepped.truncated
        )
        self.step += self.settings.training.n_environments
        self._warn_of_returns(self.episodes.add(stepped.rewards, stepped.ended))
        self.environments.renew(stepped.ended)

    def _check_finite(
        self,
        what: str,
        numbers: Tensor,
        observations: Tensor,
        actions: Tensor | None = None,
        stepped: Stepped | None = None,
        error: type[NonFiniteError] = NonFiniteError,
    ) -> None:
        if torch.isfinite(numbers).all():
            return
        transition: dict[str, Any] = {"step": self.step, "observations": observations.tolist()}
        if actions is not None:
            transition["actions"] = actions.tolist()
        if stepped is not None:
            transition |= {name: value.tolist() for name, value in vars(stepped).items()}
        raise error(what, transition)

    def _warn_of_returns(self, finished: list[Episode]) -> None:
        """Once per run: the first time is when something can still be done."""
        if self._warned or not finished or not isinstance(self.agent, ReturnsChecker):
            return
        gamma = self.settings.training.discount_factor
        sentence = self.agent.check_returns(torch.cat([e.discounted_returns(gamma) for e in finished]))
        if sentence is not None:
            self._warned = True
            warnings.warn(sentence, RelaxionWarning, stacklevel=2)

    def act(self, observations: Tensor) -> Tensor:
        """The policy without exploration, on raw observations."""
        return self.agent.act(self.normaliser(observations))

    def assess(self, stop: Callable[[], bool] | None = None) -> Assessed:
        """Episodes without noise from fixed starts, in environments of their own."""
        return self.assessor(self.act, stop)

    def result(self, final: Assessed, wall_time_seconds: float) -> Result:
        return Result(
            agent=self.settings.agent_name,
            task=self.settings.training.task,
            seed=self.settings.training.seed,
            steps=self.step,
            final_return_mean=final.mean,
            final_return_worst=final.worst,
            episodes=self.episodes.finished,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=self.weights_sha256(),
        )

    def take_events(self) -> list[Event]:
        """Diagnoses are for structures."""
        return []

    def close(self) -> None:
        self.assessor.close()
        self.environments.close()

    def metrics(self) -> dict[str, float]:
        """What has built up since the last call; one line of the log."""
        own: dict[str, float] = {"time/total_timesteps": self.step, "train/n_updates": self.n_updates}
        own |= self.episodes.metrics()
        if isinstance(self.agent, NoisyExplorer):
            own["rollout/exploration_noise_half_ranges"] = self.agent.exploration_scale
        return own | self.metric_means.take()

    def weights(self) -> dict[str, Tensor]:
        """Agent and normaliser: what it takes to act, or to start a new run from."""
        return joined({"agent": self.agent.snapshot(), "normaliser": self.normaliser.snapshot()})

    def weights_sha256(self) -> str:
        return digest(self.weights())

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
        """Everything a resume needs, as tensors. A DivergedError when the agent is not worth keeping."""
        parts = {name: getattr(self, name).snapshot() for name in _PARTS}
        checked_finite(parts["agent"], self.step)
        parts["generators"] = {name: generator.get_state() for name, generator in self.generators.items()}
        parts["counters"] = {"step": torch.tensor(self.step), "n_updates": torch.tensor(self.n_updates)}
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        """The opposite of `snapshot`; warns when the environment does not repeat its episode."""
        repeated: list[bool | None] = []
        with taken_back():
            repeated += [getattr(self, name).restore(stored.part(name)) for name in _PARTS]
            for name, generator in self.generators.items():
                generator.set_state(stored.part("generators")[name])
            counters: Mapping[str, Tensor] = stored.part("counters")
            self.step, self.n_updates = int(counters["step"]), int(counters["n_updates"])
        if False in repeated:
            self._cut_episodes()
            warnings.warn(
                f"{self.task.name} did not repeat its episode from the same seed and actions: the run goes on with new "
                "episodes, not bit for bit as it would have without the stop",
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


_PARTS = ("agent", "normaliser", "replay", "environments", "episodes", "metric_means")


def noise_schedule(agent: Any, training: TrainingSettings) -> LinearSchedule | None:
    """Of the exploration noise; None for an agent that explores by itself."""
    if not isinstance(agent, NoisyExplorer):
        return None
    start, end = agent.exploration_scale, training.exploration_noise_final
    return LinearSchedule(start, start if end is None else end, training.exploration_noise_steps)


def checked_finite(agent: Mapping[str, Tensor], step: int) -> None:
    """A DivergedError when the agent is not worth keeping."""
    if broken := [name for name, t in agent.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
        raise DivergedError(f"the agent's {broken[0]}", {"step": step, "not_finite": broken})


@contextmanager
def taken_back() -> Iterator[None]:
    """Whatever does not fit while a checkpoint is put back is the checkpoint's fault."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, RuntimeError, StopIteration) as error:
        # torch has RuntimeError for shapes, kinds and states of generators that do not fit
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"the checkpoint does not fit this run ({words})") from error


def start_agent_from(agent: Agent, stored: Stored, settings: Mapping[str, Any]) -> None:
    """Old networks for a new run; Adam's memory, counter and generator stay those of the new agent."""
    old = {name: tensor for name, tensor in stored.part("agent").items() if _is_weight(name)}
    present = agent.snapshot()
    refuse_other_meaning(stored_settings(stored), settings, old, present)
    agent.restore({name: tensor for name, tensor in present.items() if not _is_weight(name)} | old)


def refuse_other_meaning(
    old: Mapping[str, Any], new: Mapping[str, Any], weights: Mapping[str, Tensor], present: Mapping[str, Tensor]
) -> None:
    """Weights of fitting shapes may still mean something else: bins of other values, actions in other units."""
    names = [name for name in MEANING if name in old and name in new and old[name] != new[name]]
    changes = [f"{name} (was {old[name]!r}, now {new[name]!r})" for name in names]
    for name in BOUNDS:
        pairs = [(weights[key], t) for key, t in present.items() if key.split(".")[-1] == name and key in weights]
        changes += [f"{name} of actions (was {w.tolist()}, now {t.tolist()})" for w, t in pairs if not w.equal(t)][:1]
    if changes:
        raise CheckpointError(f"the old weights mean something else, because these differ: {', '.join(changes)}")


def _is_weight(name: str) -> bool:
    part = name.split(".")[0]
    return not part.endswith("_optimizer") and part not in NOT_WEIGHTS
