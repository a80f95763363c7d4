"""The folder of a run: one owner at a time, nothing overwritten unasked; and what a run writes down in it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from relaxion.errors import CheckpointError, FileError, RelaxionWarning, RunError
from relaxion.files import exclusive, kind_of, part_of, text_of, write_text

LOCK = ".lock"
BASELINES = "baselines.json"
OWNER = "relaxion {}"  # what a lock says: the process
CHECKPOINT = "relaxion checkpoint"  # kinds of files
AGENT = "relaxion agent"


class RunFolder:
    """Names of what is inside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.toml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.agent = path / "agent.safetensors"
        self.result = path / "result.json"
        self.offender = path / "offending_transition.json"
        self.alarms = path / "alarms.jsonl"
        self.baselines = path / BASELINES
        self.assessment = path / "assessment.json"
        self.critic = path / "critic.safetensors"  # of the task search
        self.origin = path / "origin.txt"  # whose weights a run began with, where it began with any
        self.tensorboard = path / "tensorboard"

        # The checkpoint goes first when a run is removed: half cleared, a folder is never taken for one to be resumed.
        self.files = (
            self.checkpoint, self.result, self.agent, self.offender, self.alarms, self.baselines,
            self.assessment, self.critic, self.origin,
            self.metrics,
            self.settings,
        )  # fmt: skip

    @property
    def is_run(self) -> bool:
        """A run has been here, or is: its checkpoint or its lock says so."""
        return kind_of(self.checkpoint) == CHECKPOINT or _owner(self.path / LOCK) is not None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody else trains here meanwhile. The system drops the lock with the process, so none is ever stale."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = exclusive(self.path / LOCK)
        except BlockingIOError:
            owner = _owner(self.path / LOCK) or "unknown"
            raise RunError(f"{self.path} is in use by process {owner}; wait for it or choose another folder") from None
        except OSError as error:
            raise FileError(f"{self.path} cannot be a run folder: {error}; choose another folder") from error
        with lock:
            lock.truncate(0)
            lock.write(OWNER.format(os.getpid()) + "\n")
            lock.flush()
            for file in self.files:
                with suppress(OSError):  # a folder of that name is somebody else's
                    part_of(file).unlink(missing_ok=True)  # what a kill has left
            yield

    def check_empty(self) -> None:
        """Refuse a folder that holds anything, save what a run leaves that was killed before its first checkpoint."""
        if self.path.is_dir() and not all(self._counts_for_nothing(file) for file in self.path.iterdir()):
            if self.is_run:
                advice = "`resume=True` continues" if self.checkpoint.exists() else "choose another folder"
                advice += ", or `force=True` replaces what a run left there"
            else:
                advice = "choose another folder: no run made it, so that `force=True` removes nothing there"
            raise FileError(f"{self.path} is not empty; {advice}")

    def _counts_for_nothing(self, file: Path) -> bool:
        unfinished = file in [part_of(own) for own in self.files]
        own_lock = file.name == LOCK and (_owner(file) is not None or file.stat().st_size == 0)
        return own_lock or unfinished or (file == self.metrics and file.stat().st_size == 0)

    def clear(self) -> None:
        """Remove what a run leaves, and nothing else; only for a folder that `is_run`."""
        for file in self.files:
            file.unlink(missing_ok=True)
        for file in self.tensorboard.glob("events.out.tfevents.*"):
            file.unlink()
        with suppress(OSError):
            self.tensorboard.rmdir()  # unless something else is in it


def _owner(lock: Path) -> str | None:
    """The process that wrote this lock; None when it is not one of ours."""
    try:
        found = re.fullmatch(OWNER.format(r"(\d{1,20})\n?"), text_of(lock))
    except (OSError, ValueError):
        return None
    return found[1] if found else None


# ---- What a run writes down: lines of metrics.jsonl and alarms.jsonl, TensorBoard on request, assessment.json.

# names in metrics.jsonl that curves are drawn of
STEPS = "time/total_timesteps"
FORCE_CALLS = "eval/force_calls_mean"
SUCCESS = "eval/success_rate"
REFERENCES = {"BFGS": "eval/force_calls_bfgs", "FIRE": "eval/force_calls_fire"}
ASSESSED_RETURN = "eval/mean_reward"
EXPLORED_RETURN = "rollout/ep_rew_mean"
FINAL = {  # what result.json calls them
    FORCE_CALLS: "final_force_calls_mean",
    SUCCESS: "final_success_rate",
    REFERENCES["BFGS"]: "force_calls_bfgs",
    REFERENCES["FIRE"]: "force_calls_fire",
    ASSESSED_RETURN: "final_return_mean",
}

ASSESSMENT_FORMAT = "relaxion-assessment"  # of assessment.json
ASSESSMENT_VERSION = 1


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
