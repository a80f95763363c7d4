"""What the loop of a run drives: the protocol of trainers, checkpoints, what trainers count, and the result."""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor

from relaxion.errors import CheckpointError, RelaxionWarning
from relaxion.files import Format, Stored
from relaxion.train.agents.shared import Agent

if TYPE_CHECKING:
    from relaxion.train.judge.assessment import Assessed
    from relaxion.train.tasks.settings import RunSettings

CHECKPOINTS = Format(version=2, error=CheckpointError)  # 1 left the plain values out of the digest
MEANING = ("normalise_observations", "lowest_value", "highest_value", "n_bins")  # settings that weights depend on
BOUNDS = ("centre", "half_range", "bounds")  # buffers of networks that depend on the bounds of actions
NOT_WEIGHTS = ("n_updates", "generator")  # parts of an agent's snapshot that belong to its run; so does Adam's memory
DIVERGED = "the agent has diverged: lower its learning rates or the scale of the rewards and begin a new run"


class NonFiniteError(Exception):
    """A step brought NaN or infinity; the transition as plain numbers, for the run folder."""

    def __init__(self, what: str, transition: dict[str, Any]) -> None:
        super().__init__(what)
        self.what = what
        self.transition = transition

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can come from another process."""
        return type(self), (self.what, self.transition)


class DivergedError(NonFiniteError):
    """The agent's own numbers are no longer finite: nothing outside is to blame, and going on helps nothing."""


def named_generator(seed: int, name: str) -> Generator:
    """A generator of its own for every purpose: drawing more for one never changes another."""
    mixed = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(mixed[:8], "little") & (2**63 - 1))


def stored_settings(stored: Stored) -> dict[str, Any]:
    """The flat settings that lie with the weights; none in very old files."""
    settings = stored.values.get("settings", {})
    if not isinstance(settings, dict):
        raise CheckpointError("the settings beside the old weights are not a table; choose another file")
    return settings


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


# ---- who trains, what trainers count, and the result of a run

RECENT_EPISODES = 100  # as in Stable-Baselines3
COUNTERS = ("train/n_updates",)  # not averaged: the trainer writes its own count


class RunTrainer(Protocol):
    """Whoever trains. Everything that changes can be taken out (`snapshot`) and put back (`restore`), to the bit."""

    @property
    def step(self) -> int:
        """Environment steps so far, of all environments or structures."""
        ...

    @property
    def settings(self) -> RunSettings: ...

    @property
    def steps_per_round(self) -> int:
        """Environment steps that one `advance` takes."""
        ...

    def prepare(self, folder: Path) -> None:
        """What is done once at the start and kept in the run folder."""

    def advance(self) -> None:
        """Collect, store, update."""

    def scalars(self) -> dict[str, float]:
        """What has built up since the last call; one line of the log."""
        ...

    def take_events(self) -> list[Any]:
        """Alarms that began or ended since the last call (`diagnostics.Event`)."""
        ...

    def assess(self, stop: Callable[[], bool]) -> Any:
        """An assessment without noise from fixed starts, with `scalars()` for the log; training never notices."""

    def result(self, final: Any, wall_time_seconds: float) -> Result: ...

    def weights(self) -> dict[str, Tensor]:
        """What it takes to act, or to start a new run from."""
        ...

    def snapshot(self) -> dict[str, Tensor]: ...

    def restore(self, stored: Stored) -> None: ...

    def start_from(self, stored: Stored) -> None:
        """Take over old networks; counters and Adam's memory stay at 0 (R10.2)."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """What result.json says. Returns are of the final assessment, undiscounted."""

    agent: str
    task: str
    seed: int
    steps: int
    final_return_mean: float
    final_return_worst: float
    episodes: int
    wall_time_seconds: float
    weights_sha256: str

    def sentence(self) -> str:
        """For the command line."""
        return (
            f"{self.agent} on {self.task}, seed {self.seed}: mean return {self.final_return_mean:.1f}, "
            f"worst {self.final_return_worst:.1f} after {self.steps} steps in {self.wall_time_seconds:.0f} s"
        )


@dataclass(frozen=True)
class RelaxationResult(Result):
    """On atoms, force calls per relaxation besides; failures are charged the cap.

    `final_*` are of the last policy; `kept_*` of the one that was best on validation starts, which is packaged.
    """

    final_force_calls_mean: float
    final_force_calls_median: float
    final_success_rate: float
    force_calls_bfgs: float
    force_calls_fire: float
    training_force_calls: int
    potential: str
    structures: str
    kept_step: int | None = None
    kept_validation_force_calls_mean: float | None = None
    kept_force_calls_mean: float | None = None
    kept_force_calls_median: float | None = None
    kept_success_rate: float | None = None

    @classmethod
    def of(cls, settings: RunSettings, final: Assessed, **own: Any) -> RelaxationResult:
        """From the final assessment and what the trainer has counted besides."""
        scalars = final.scalars()
        return cls(
            agent=settings.agent_name,
            task=settings.training.task,
            seed=settings.training.seed,
            final_return_mean=scalars["eval/mean_reward"],
            final_return_worst=float(final.returns.min()),
            final_force_calls_mean=scalars["eval/force_calls_mean"],
            final_force_calls_median=scalars["eval/force_calls_median"],
            final_success_rate=final.success_rate,
            force_calls_bfgs=final.baselines["BFGS"],
            force_calls_fire=final.baselines["FIRE"],
            **own,
        )

    def sentence(self) -> str:
        return (
            f"{self.agent} on {self.structures} with {self.potential}, seed {self.seed}: "
            f"{self.final_force_calls_mean:.1f} force calls, {self.final_success_rate:.0%} converged "
            f"(BFGS {self.force_calls_bfgs:.1f}, FIRE {self.force_calls_fire:.1f}) "
            f"after {self.steps} steps in {self.wall_time_seconds:.0f} s{self._kept_in_words()}"
        )

    def _kept_in_words(self) -> str:
        if self.kept_step is None or self.kept_step == self.steps:
            return ""
        calls = f"{self.kept_force_calls_mean:.1f} force calls"
        return f"; kept is the policy of step {self.kept_step}, best on validation starts: {calls}"


def discounted_returns(rewards: Sequence[float], discount_factor: float) -> Tensor:
    """Of an episode: the return from each of its steps to its end, (n_steps,)."""
    value = 0.0
    returns = []
    for reward in reversed(rewards):
        value = reward + discount_factor * value
        returns.append(value)
    return torch.tensor(returns[::-1], dtype=torch.float64)


class ReturnsWatch:
    """Warns once per run when returns leave what the critic can express (D4PG): then something can still be done."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, agent: Any, finished: Sequence[Sequence[float]], discount_factor: float) -> None:
        if self._warned or not finished or not hasattr(agent, "check_returns"):
            return
        returns = torch.cat([discounted_returns(rewards, discount_factor) for rewards in finished])
        if (sentence := agent.check_returns(returns)) is not None:
            self._warned = True
            warnings.warn(sentence, RelaxionWarning, stacklevel=3)


class Episodes:
    """Rewards of the episodes under way, and how the recent ones went."""

    def __init__(self, n_environments: int) -> None:
        self.finished = 0
        self.under_way: list[list[float]] = [[] for _ in range(n_environments)]
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)

    def add(self, rewards: Tensor, ended: Tensor) -> list[list[float]]:
        """One step of every environment; the rewards of the episodes that ended with it."""
        finished = []
        for number, (reward, over) in enumerate(zip(rewards.tolist(), ended.tolist(), strict=True)):
            self.under_way[number].append(reward)
            if over:
                finished.append(self.under_way[number])
                self.under_way[number] = []
        self._recent.extend((sum(rewards), len(rewards)) for rewards in finished)
        self.finished += len(finished)
        return finished

    def scalars(self) -> dict[str, float]:
        """Under the names of Stable-Baselines3; no means before the first episode has ended."""
        counts = {"time/episodes": float(self.finished)}
        if not self._recent:
            return counts
        returns, lengths = zip(*self._recent, strict=True)
        number = len(self._recent)
        return counts | {"rollout/ep_rew_mean": sum(returns) / number, "rollout/ep_len_mean": sum(lengths) / number}

    def snapshot(self) -> dict[str, Tensor]:
        return {
            "finished": torch.tensor(self.finished),
            "recent": torch.tensor(list(self._recent), dtype=torch.float64).reshape(-1, 2),  # return, length
            "lengths": torch.tensor([len(rewards) for rewards in self.under_way]),
            "rewards": torch.tensor([r for rewards in self.under_way for r in rewards], dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.finished = int(tensors["finished"])
        self._recent = deque(((total, int(length)) for total, length in tensors["recent"].tolist()), RECENT_EPISODES)
        rewards = iter(tensors["rewards"].tolist())
        self.under_way = [[next(rewards) for _ in range(int(length))] for length in tensors["lengths"]]


class ScalarMeans:
    """Means of what updates report, summed as tensors so that no update waits for a number to be read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, scalars: Mapping[str, Tensor | float]) -> None:
        for name, value in scalars.items():
            if name in COUNTERS:
                continue
            number = torch.as_tensor(value, dtype=torch.float64)
            if name in self._sums:
                self._sums[name] += number
                self._counts[name] += 1
            else:
                self._sums[name] = number.clone()
                self._counts[name] = 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {name: float(total) / self._counts[name] for name, total in sorted(self._sums.items())}
        self._sums = {}
        self._counts = {}
        return means

    def snapshot(self) -> dict[str, Tensor]:
        """Sum and count under each name."""
        return {
            name: torch.stack([total, torch.tensor(float(self._counts[name]), dtype=torch.float64)])
            for name, total in self._sums.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._sums = {name: pair[0].clone() for name, pair in tensors.items()}
        self._counts = {name: int(pair[1]) for name, pair in tensors.items()}
