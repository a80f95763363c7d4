"""Who runs the trials: processes on this machine, or tasks on Ray. A worker that dies is asked again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from relaxion.errors import SettingsError
from relaxion.scaling.ray_engine import RayEngine
from relaxion.scaling.sweeps.trial import INTERRUPTED, run_trial

POLL_SECONDS = 0.1


class Workers(Protocol):
    """Some trials at a time, each known by its folder."""

    @property
    def number(self) -> int: ...

    def start(self, trial: Path) -> None: ...

    def left(self) -> dict[Path, str | None]:
        """Those that have ended since the last call, and what happened to their worker; None: it wrote down how it
        ended. Waits a moment where there are none."""
        ...

    def stop(self) -> None:
        """End what is running; each saves what it has, if it can."""
        ...


class LocalWorkers:
    """Processes of their own, so that a crash takes nothing along."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, trial: Path) -> None:
        command = [sys.executable, "-m", "relaxion.scaling.sweeps.trial", str(trial), str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # more threads only get in each other's way
        with trial.with_suffix(".log").open("ab") as log:
            # a session of its own: Ctrl-C reaches the driver, which tells the others
            child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._running[trial] = child

    def left(self) -> dict[Path, str | None]:
        ended = [trial for trial, child in self._running.items() if child.poll() is not None]
        if not ended:
            time.sleep(POLL_SECONDS)
        return {trial: _lost(self._running.pop(trial).returncode) for trial in ended}

    def stop(self) -> None:
        for child in self._running.values():
            child.send_signal(signal.SIGTERM)
        for child in self._running.values():
            child.wait()
        self._running = {}


def _lost(code: int) -> str | None:
    if code == 0:
        return None
    if code == INTERRUPTED:
        return "its process was asked to stop"
    return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"


class RayWorkers:
    """Tasks of one core each. The sweep's folder must be seen by all machines."""

    def __init__(self, address: str | None, number: int | None) -> None:
        self._engine = RayEngine(address, number or os.cpu_count() or 1)
        self._ray = self._engine.ray
        self.number = number or self._engine.n_cpus
        # not retried by Ray: who asks again is to know of it
        self._run = self._ray.remote(num_cpus=1, max_retries=0)(_run_on_ray)
        self._running: dict[Any, Path] = {}

    def start(self, trial: Path) -> None:
        self._running[self._run.remote(str(trial), str(Path.cwd()))] = trial

    def left(self) -> dict[Path, str | None]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
        return {self._running.pop(reference): self._why(reference) for reference in ready}

    def _why(self, reference: Any) -> str | None:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # a defect of ours, not of the settings
        except self._ray.exceptions.RayError as error:
            return f"its Ray worker was lost ({type(error).__name__})"
        return None

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running = {}
        self._engine.stop()


def _run_on_ray(trial: str, folder: str) -> None:
    torch.set_num_threads(1)
    if Path(folder).is_dir():
        os.chdir(folder)
    warnings.simplefilter("ignore")
    run_trial(Path(trial))


def workers_place(words: str) -> Callable[[], Workers]:
    """`local:2`, `ray:2`, `ray:auto` or `ray:ADDRESS`; nothing is started before the answer is called."""
    kind, _, place = f"local:{words}".partition(":") if words.isdecimal() else words.partition(":")
    number = int(place) if place.isdecimal() else None
    if kind == "local" and number:
        return lambda: LocalWorkers(number)
    if kind == "ray" and place and number != 0:
        return lambda: RayWorkers(None if number else place, number)
    raise SettingsError(f"workers '{words}': expected N, local:N, ray:N, ray:auto or ray:ADDRESS, like local:2")
