"""The folder of a run: one owner at a time, nothing overwritten unasked, small files in one go."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relaxion.errors import FileError, RunError
from relaxion.training.checkpoint import force_to_disk

LOCK = ".lock"


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
        self.tensorboard = path / "tensorboard"

    @property
    def locked_once(self) -> bool:
        """Some run has been here, or is."""
        return (self.path / LOCK).exists()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody else trains here meanwhile. The system drops the lock with the process, so none is ever stale."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise FileError(f"{self.path} cannot be a run folder: {error}; try another --out") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise RunError(f"{self.path} is in use by process {owner}; wait for it or try another --out") from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def check_empty(self) -> None:
        """Refuse a folder that holds anything, save what a run leaves that was killed before its first checkpoint."""
        if self.path.is_dir() and not all(self._counts_for_nothing(file) for file in self.path.iterdir()):
            advice = "--resume to go on" if self.checkpoint.exists() else "another --out"
            raise FileError(f"{self.path} is not empty; try {advice}, or --force to replace what a run left there")

    def _counts_for_nothing(self, file: Path) -> bool:
        unfinished = file.name.startswith(".") and file.name.endswith(".part")
        return file.name == LOCK or unfinished or (file == self.metrics and file.stat().st_size == 0)

    def clear(self) -> None:
        """Remove what a run leaves, and nothing else."""
        shutil.rmtree(self.tensorboard, ignore_errors=True)
        # The checkpoint goes first: a folder half cleared is never taken for a run that can be resumed.
        for file in (self.checkpoint, self.result, self.agent, self.offender, self.metrics, self.settings):
            file.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """In one go: whoever reads or is killed meanwhile sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    force_to_disk(beside)
    beside.replace(path)
    force_to_disk(path.parent)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")
