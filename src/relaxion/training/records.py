"""What a run writes down: one JSON line per record in metrics.jsonl, and TensorBoard on request."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relaxion.errors import CheckpointError, RunError

TIME_KEYS = ("time/time_elapsed", "time/fps")  # seconds, steps per second: all that differs between equal runs


class Records:
    """Appends to metrics.jsonl; a resume cuts the file back to where its checkpoint was written."""

    def __init__(
        self, path: Path, *, position: int = 0, tensorboard: Path | None = None, resumed_at: int | None = None
    ) -> None:
        self._make_board = None if tensorboard is None else _board_maker(tensorboard, resumed_at)
        self._board: Any = None  # made with the first record, when the run has a checkpoint
        self._file = _opened(path, position)

    def write(self, metrics: Mapping[str, float]) -> None:
        """One line. The x axis of everything is the true total of environment steps (R9.5)."""
        line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._make_board is not None:
            self._board = self._board or self._make_board()
            step = int(metrics["time/total_timesteps"])
            for name, value in metrics.items():
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


class Clock:
    """Seconds a run has taken, those before a resume included."""

    def __init__(self, seconds_before: float = 0.0, step: int = 0) -> None:
        self._before, self._began = seconds_before, time.perf_counter()
        self._last = (seconds_before, step)

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds so far, and steps per second since the last call."""
        now, (then, step_then) = self.seconds(), self._last
        self._last = (now, step)
        return {"time/time_elapsed": now, "time/fps": (step - step_then) / max(now - then, 1e-9)}


def _opened(path: Path, position: int) -> Any:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file; it was there before the run, or somebody put it there: remove it")
    length = path.stat().st_size if path.exists() else 0
    if length < position:
        raise CheckpointError(f"{path} has {length} bytes, its checkpoint was written after {position}: it was cut")
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(position)
    file.seek(position)
    return file


def _board_maker(folder: Path, resumed_at: int | None) -> Callable[[], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("tensorboard = true needs the package tensorboard: pip install 'relaxion[train]'") from error
    # The record of the step that was saved stands; later ones are written again.
    return lambda: SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


def without_times(line: str) -> dict[str, float | None]:
    """A record without what differs between two equal runs."""
    return {name: value for name, value in json.loads(line).items() if name not in TIME_KEYS}
