"""What a run writes down: lines of metrics.jsonl and alarms.jsonl, TensorBoard on request, result.json; and the numbers
that build up between two lines."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relaxion.errors import CheckpointError, FileError, RelaxionWarning, RunError
from relaxion.files import write_text

if TYPE_CHECKING:
    from relaxion.train.judge.assessment import Assessed
    from relaxion.train.runs.settings import RunSettings

ASSESSMENT_FORMAT = "relaxion-assessment"  # of assessment.json
ASSESSMENT_VERSION = 1
RECENT_EPISODES = 100  # as in Stable-Baselines3
COUNTERS = ("train/n_updates",)  # not averaged: the trainer writes its own count


class Records:
    """Appends to metrics.jsonl; a resume cuts the file back to where its checkpoint was written."""

    def __init__(
        self, path: Path, *, position: int = 0, tensorboard: Path | None = None, resumed_at: int | None = None
    ) -> None:
        self._make_board = None if tensorboard is None else _board_maker(tensorboard, resumed_at)
        self._board: Any = None  # made with the first record, when the run has a checkpoint
        _cut(path, position)
        self._file = path.open("ab")

    def write(self, scalars: Mapping[str, float]) -> None:
        """One line. The x axis of everything is the true total of environment steps (R9.5)."""
        line = {name: value if math.isfinite(value) else None for name, value in scalars.items()}  # JSON has no NaN
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._make_board is not None:
            self._board = self._board or self._make_board()
            step = int(scalars["time/total_timesteps"])
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)

    def position(self) -> int:
        """Bytes written and forced to disk: what a checkpoint remembers."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class AlarmFile:
    """alarms.jsonl, made with the first alarm; a resume cuts it back likewise."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        _cut(path, position)

    def write(self, events: Iterable[Any]) -> None:
        """Append (`diagnostics.Event`), and force to disk: alarms are few."""
        lines = "".join(json.dumps(event.as_record(), ensure_ascii=False) + "\n" for event in events)
        if lines:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())

    def position(self) -> int:
        """Bytes written: what a checkpoint remembers."""
        return self.path.stat().st_size if self.path.exists() else 0


class Clock:
    """Seconds a run has taken, those before a resume included."""

    def __init__(self, seconds_before: float = 0.0, step: int = 0) -> None:
        self._before = seconds_before
        self._began = time.perf_counter()
        self._last = (seconds_before, step)

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def scalars(self, step: int) -> dict[str, float]:
        """Seconds so far, and steps per second since the last call."""
        now = self.seconds()
        (then, step_then) = self._last
        self._last = (now, step)
        return {"time/time_elapsed": now, "time/fps": (step - step_then) / max(now - then, 1e-9)}


def _cut(path: Path, position: int) -> None:
    """Whatever was written after the checkpoint goes."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; remove it")
    length = path.stat().st_size if path.exists() else 0
    if length < position:
        raise CheckpointError(f"{path} has {length} bytes, its checkpoint was written after {position}: it was cut")
    if length > position:
        os.truncate(path, position)


def _board_maker(folder: Path, resumed_at: int | None) -> Callable[[], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("tensorboard = true needs the package tensorboard: pip install 'relaxion[train]'") from error
    # The record of the step that was saved stands; later ones are written again.
    return lambda: SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


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
        """From the final assessment and what the trainer knows besides."""
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


def leave_record(path: Path, assessed: Any, step: int) -> None:
    """Start by start, in place of what the assessment before has left; whatever is wrong with it, the run is good."""
    program, *rest = sys.argv or [""]
    command = shlex.join([Path(program).name, *rest])  # as it was typed; of a script or a test, its name
    plain = {"format": ASSESSMENT_FORMAT, "version": ASSESSMENT_VERSION, "step": step, "command": command}
    plain |= assessed.record.as_plain()
    try:
        write_text(path, json.dumps(plain, allow_nan=False, separators=(",", ":")) + "\n")
    except FileError as error:
        warnings.warn(f"the assessment was not stored: {error}", RelaxionWarning, stacklevel=2)
