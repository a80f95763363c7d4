"""The folder of a run: one owner at a time, nothing overwritten unasked, small files in one go."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relaxion.errors import FileError, RunError
from relaxion.files import kind_of, open_lock, part_of, text_of

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
        self.curve = path / "learning_curve.png"
        self.alarms = path / "alarms.jsonl"
        self.baselines = path / BASELINES
        self.assessment = path / "assessment.json"
        self.origin = path / "origin.txt"  # whose weights a run began with, where it began with any
        self.tensorboard = path / "tensorboard"

        # The checkpoint goes first when a run is removed: half cleared, a folder is never taken for one to be resumed.
        self.files = (
            self.checkpoint, self.result, self.agent, self.curve, self.offender, self.alarms, self.baselines,
            self.assessment, self.origin,
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
            lock = open_lock(self.path / LOCK)
        except OSError as error:
            raise FileError(f"{self.path} cannot be a run folder: {error}; choose another folder") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(self.path / LOCK) or "unknown"
                raise RunError(
                    f"{self.path} is in use by process {owner}; wait for it or choose another folder"
                ) from None
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
