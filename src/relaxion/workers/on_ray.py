"""Ray, started when needed, quiet, and gone afterwards; and the pool of its actors. Ray is loaded here only."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from relaxion.errors import MissingExtraError, RelaxionError, RunError
from relaxion.workers.pool import DONE, FAILED, READY, RESULTS, MakeWork, Standing, Work, WorkerPool, portable

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning for every actor without a GPU
}
OBJECT_STORE_BYTES = 128 * 2**20  # answers are some 100 kB each; Ray's own choice is a third of all memory
FOLDERS, PREFIX = Path("/tmp"), "relaxion-ray-"  # no deeper: a socket's name may have no more than 107 letters
REACH_SECONDS = 10  # for a cluster to answer
AUTO = "auto"  # a cluster that is there (RAY_ADDRESS, `ray start`), else one of this machine's own
SECONDS_BETWEEN_ANSWERS = 0.2
ON_THIS_MACHINE = {
    # Whoever reaches Ray's ports can run anything. A Ray of our own listens on the loopback only, as Ray itself has it
    # on Windows and macOS, and answers to those who know a word of chance.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}


def load_ray(here: bool) -> ModuleType:
    """The package, for a Ray on this machine alone or for a cluster; one sentence where it is not installed."""
    for name, value in (QUIET | ON_THIS_MACHINE if here else QUIET).items():
        os.environ.setdefault(name, value)  # read by Ray when it is imported or started
    if here:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray is needed here; try: pip install 'relaxion[ray]'") from error
    return ray


class RayEngine:
    """A connection to Ray. What was started here is stopped here; a Ray that was there before is left alone."""

    def __init__(self, address: str | None, n_cpus: int | None, *, guarded: bool = True) -> None:
        """`guarded`: a Ray of our own answers to us alone; too late where Ray has looked for a cluster before."""
        running = sys.modules.get("ray")
        self._own = running is None or not running.is_initialized()
        self.ray = load_ray(here=address is None and guarded and self._own)
        self._folder: str | None = None
        if self._own:
            try:
                with _handlers_kept(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Ray's and its dependencies' own
                    self._start(address, n_cpus)
            except BaseException:  # a signal, too
                self._remove_folder()
                raise

    def _start(self, address: str | None, n_cpus: int | None) -> None:
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if address is None:
            remove_left_behind(FOLDERS)
            self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=FOLDERS)
            options |= {"num_cpus": n_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            options["_temp_dir"] = self._folder
        else:
            options["address"] = address
        try:
            host, _, port = (address or "").removeprefix("ray://").rpartition(":")
            if host and port.isdecimal():  # where nobody listens Ray itself tries for minutes and ends the process
                socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
            self.ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "here" if address is None else f"at '{address}'"
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RunError(f"no Ray {where}: {first_line}; 'ray status' shows whether a cluster is up") from error

    @property
    def n_cpus(self) -> int:
        """Of all machines."""
        return int(self.ray.cluster_resources().get("CPU", 1))

    def stop(self) -> None:
        """Nothing of ours is left running, no folder stays behind."""
        if self._own and self.ray.is_initialized():
            with _handlers_kept():
                self.ray.shutdown()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def cluster_is_known() -> bool:
    """Whether Ray's "auto" has a cluster to try: RAY_ADDRESS names one, or `ray start` has left word of one."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    return "RAY_ADDRESS" in os.environ or (folder / "ray" / "ray_current_cluster").exists()


def remove_left_behind(folders: Path) -> None:
    """What runs that were killed could not remove: folders of ours whose processes are gone."""
    for folder in folders.glob(f"{PREFIX}*"):
        owners = [int(name[1]) for path in folder.glob("session_*") if (name := re.search(r"_(\d+)$", path.name))]
        gone = owners and not any(Path(f"/proc/{owner}").exists() for owner in owners)
        if gone and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run wants to hear of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class _Actor(Standing):
    """One worker on Ray."""

    handle: Any
    awaited: Any  # whether it could be made; then the stream of results, while it is busy


class RayPool(WorkerPool[_Actor]):
    """Actors of one processor each. Ray keeps no results: the driver does."""

    def __init__(self, number: int | None, address: str | None, make: MakeWork) -> None:
        """`number`: None for as many as the cluster has processors."""
        self._engine = _engine(number, address)
        self._ray = self._engine.ray
        self.lost = (self._ray.exceptions.RayError,)  # the actor, its node or its process is gone
        self._kind = self._ray.remote(num_cpus=1, max_restarts=0)(_Remote)
        super().__init__(number or max(1, self._engine.n_cpus), make)

    def start(self) -> _Actor:
        handle = self._kind.remote(self.make)
        return _Actor(handle, handle.begin.remote())

    def send(self, known: _Actor, task: Any) -> None:
        known.awaited = known.handle.work.options(num_returns="streaming").remote(task)

    def with_news(self, timeout: float) -> list[int]:
        waited = {actor.awaited: number for number, actor in self.known.items() if actor.busy or not actor.ready}
        if not waited:
            return []
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=timeout)
        more, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=0) if ready else ([], [])
        return [waited[one] for one in (more or ready)]

    def answer(self, known: _Actor) -> tuple[str, Any]:
        try:
            if not known.busy:
                error = self._ray.get(known.awaited)
                return (READY, None) if error is None else (FAILED, error)
            return RESULTS, self._ray.get(next(known.awaited))
        except StopIteration:
            return DONE, None
        except self._ray.exceptions.RayTaskError as error:
            return FAILED, error.cause  # what went wrong over there, as if it had been here

    def kill(self, worker: int) -> None:
        self._ray.kill(self.known[worker].handle, no_restart=True)

    def end(self, known: _Actor) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(known.handle, no_restart=True)

    def stop(self) -> None:
        """At once: nobody can be asked."""
        self.close()

    def close(self) -> None:
        super().close()
        self._engine.stop()


def _engine(number: int | None, address: str | None) -> RayEngine:
    cores = max(number or 1, os.cpu_count() or 1)  # a worker each, though cores be fewer
    try:
        if address == AUTO and cluster_is_known():
            with suppress(RunError):
                return RayEngine(AUTO, None)
            return RayEngine(None, cores, guarded=False)
        return RayEngine(None if address == AUTO else address, cores)
    except RunError as error:
        raise RunError(f"Ray cannot be reached ({error}); try ray:auto or local:2") from error


class _Remote:
    """The actor."""

    def __init__(self, make: MakeWork) -> None:
        self._make = make
        self._work: Work | None = None

    def begin(self) -> Exception | None:
        """None, or why it cannot be made."""
        try:
            self._work = self._make()
        except RelaxionError as error:
            return portable(error)
        return None

    def work(self, task: Any) -> Iterator[list[Any]]:
        """Results as they come, several in one answer: every answer is an object in Ray's store."""
        assert self._work is not None
        kept: list[Any] = []
        since = time.monotonic()
        for result in self._work(task):
            kept.append(result)
            if time.monotonic() - since > SECONDS_BETWEEN_ANSWERS:
                yield kept
                kept = []
                since = time.monotonic()
        if kept:
            yield kept
