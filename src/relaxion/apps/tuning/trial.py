"""One trial: an ordinary run of a recipe in a folder of its own, begun or gone on with.

A trial is known by its folder: beside `0007` lies its recipe `0007.toml`.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from relaxion.errors import CheckpointError, FileError, RelaxionError
from relaxion.train.runs.loop import Interrupted, train
from relaxion.train.runs.recipe import settings_from_recipe
from relaxion.train.runs.run_folder import LOCK, RunFolder

FORCE_CALLS, RETURN = "final_force_calls_mean", "final_return_mean"
PATIENCE_SECONDS = 60  # with a folder that is in use


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    value: float | None  # of the objective; None: it failed
    reason: str | None  # why it failed
    objective: str
    seconds: float


def run_trial(trial: Path) -> Ended:
    """Train by the recipe. What goes wrong with these settings is a result, too."""
    settings = settings_from_recipe(trial.with_suffix(".toml"), None, {})
    _wait_until_free(trial / LOCK)
    began = time.monotonic()
    try:
        result = asdict(train(settings, trial, resume=RunFolder(trial).checkpoint.exists()))
    except (FileError, CheckpointError):
        raise  # a full disk says nothing about the settings
    except RelaxionError as error:
        return Ended(None, str(error), "", time.monotonic() - began)
    objective = FORCE_CALLS if FORCE_CALLS in result else RETURN
    return Ended(float(result[objective]), None, objective, float(result["wall_time_seconds"]))


def _wait_until_free(lock: Path) -> None:
    """The worker of a driver that was killed may be about to end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while lock.exists():
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
        if time.monotonic() > deadline:
            raise FileError(f"{lock.parent} is still in use by another process; end that one first")
        time.sleep(0.2)


class TrialWorker:
    """Trains one trial after the other, each named by its folder; what it prints goes into the trial's log."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")

    def __call__(self, trial: str) -> list[Ended]:
        folder = Path(trial)
        with folder.with_suffix(".log").open("ab") as log:
            os.dup2(log.fileno(), 1)  # standard output
            os.dup2(log.fileno(), 2)  # and errors
        try:
            return [run_trial(folder)]
        except Interrupted as error:  # asked to stop; all is saved
            raise SystemExit(str(error)) from error
