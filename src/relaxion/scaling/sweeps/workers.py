"""Who runs the trials: processes on this machine, or tasks on Ray. A worker that dies is asked again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relaxion.errors import SettingsError
from relaxion.scaling.ray_engine import RayEngine
from relaxion.scaling.sweeps.trial import INTERRUPTED, run_trial

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """The files of a trial."""

    number: int
    recipe: Path
    out: Path
    ended: Path

    @property
    def words(self) -> tuple[str, str, str]:
        return str(self.recipe), str(self.out), str(self.ended)


@dataclass(frozen=True)
class Left:
    """A job that is no longer running. `lost`: what happened to its worker; None: it wrote down how it ended."""

    job: Job
    lost: str | None


class Workers(Protocol):
    """Some jobs at a time."""

    @property
    def number(self) -> int: ...

    def start(self, job: Job) -> None: ...

    def left(self) -> list[Left]:
        """Those that have ended since the last call; waits a moment where there are none."""
        ...

    def stop(self) -> None:
        """End what is running; each saves what it has, if it can."""
        ...


class LocalWorkers:
    """Processes of their own, so that a crash takes nothing along."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._running: list[tuple[Job, subprocess.Popen[bytes]]] = []

    def start(self, job: Job) -> None:
        command = [sys.executable, "-m", "relaxion.scaling.sweeps.trial", *job.words, str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # more threads only get in each other's way
        with (job.out.parent / f"{job.out.name}.log").open("ab") as log:
            # a session of its own: Ctrl-C reaches the driver, which tells the others
            child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._running.append((job, child))

    def left(self) -> list[Left]:
        ended = [(job, child) for job, child in self._running if child.poll() is not None]
        if not ended:
            time.sleep(POLL_SECONDS)
        self._running = [(job, child) for job, child in self._running if child.returncode is None]
        return [Left(job, _lost(child.returncode)) for job, child in ended]

    def stop(self) -> None:
        for _, child in self._running:
            child.send_signal(signal.SIGTERM)
        for _, child in self._running:
            child.wait()
        self._running = []


def _lost(code: int) -> str | None:
    if code == 0:
        return None
    if code == INTERRUPTED:
        return "its process was told to stop"
    return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"


class RayWorkers:
    """Tasks of one core each. The sweep's folder must be seen by all machines."""

    def __init__(self, address: str | None, number: int | None) -> None:
        self._engine = RayEngine(address, number or os.cpu_count() or 1)
        self._ray = self._engine.ray
        self.number = number or self._engine.n_cpus
        # not retried by Ray: who asks again is to know of it
        self._run = self._ray.remote(num_cpus=1, max_retries=0)(_run_on_ray)
        self._running: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        self._running[self._run.remote(*job.words, str(Path.cwd()))] = job

    def left(self) -> list[Left]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
        return [Left(self._running.pop(reference), self._why(reference)) for reference in ready]

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


def _run_on_ray(recipe: str, out: str, ended: str, folder: str) -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    if Path(folder).is_dir():
        os.chdir(folder)
    warnings.simplefilter("ignore")
    run_trial(Path(recipe), Path(out), Path(ended))


def workers_place(words: str) -> Callable[[], Workers]:
    """`local:2`, `ray:2`, `ray:auto` or `ray:ADDRESS`; nothing is started before the answer is called."""
    kind, _, place = words.partition(":")
    number = int(place) if place.isdecimal() else None
    if kind == "local" and number:
        return lambda: LocalWorkers(number)
    if kind == "ray" and place and number != 0:
        return lambda: RayWorkers(None if number else place, number)
    raise SettingsError(f"workers '{words}': expected local:N, ray:N, ray:auto or ray:ADDRESS, like local:2")
