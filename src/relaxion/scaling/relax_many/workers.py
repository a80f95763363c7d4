"""Workers as the driver sees them: chunks go out, news come back. Here: processes of this machine."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from relaxion.errors import RunError, SettingsError
from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.worker_process import FATAL, READY

MOST_WORKERS = 4096
SECONDS_TO_BE_BORN = 120.0
READ_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class News:
    """From one worker: records of structures, and whether its chunk is done or it is gone."""

    worker: int
    records: tuple[dict[str, Any], ...] = ()
    done: bool = False
    died: bool = False


class Crew(ABC):
    """Workers by number. A worker that died is replaced under the same number before it is idle again."""

    n_workers: int

    @abstractmethod
    def idle(self) -> list[int]:
        """Workers that wait for a chunk."""

    @abstractmethod
    def give(self, worker: int, tasks: Sequence[str]) -> None:
        """A chunk for an idle worker."""

    @abstractmethod
    def hear(self, timeout: float) -> list[News]:
        """What has come in, waiting up to `timeout` seconds for the first. RunError where workers cannot work."""

    @abstractmethod
    def silence(self, worker: int) -> float:
        """Seconds since a busy worker was last heard of; 0 for one that is idle."""

    @abstractmethod
    def kill(self, worker: int) -> None:
        """End a worker that hangs; it is reported as died."""

    @abstractmethod
    def close(self) -> None:
        """End all."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_workers(word: str) -> tuple[str, str]:
    """ "local:2" -> ("local", "2"); "ray:auto" -> ("ray", "auto")."""
    kind, _, rest = word.partition(":")
    if kind == "local" and re.fullmatch(r"[1-9]\d*", rest) and int(rest) <= MOST_WORKERS:
        return kind, rest
    if kind == "ray" and rest:
        return kind, rest
    raise SettingsError(f"--workers is local:N, ray:auto or ray:ADDRESS, got '{word}'; try --workers local:2")


def make_crew(word: str, settings: WorkerSettings) -> Crew:
    """The crew that `--workers` names. Ray is loaded only where it is asked for."""
    kind, rest = parse_workers(word)
    if kind == "local":
        return LocalCrew(int(rest), settings)
    from relaxion.scaling.relax_many.ray_workers import RayCrew

    return RayCrew(rest, settings)


@dataclass(eq=False)
class _Process:
    """One local worker."""

    pid: int
    link: socket.socket
    ready: bool = False
    busy: bool = False
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""


class LocalCrew(Crew):
    """Forked from a nursery, so that a worker that dies is replaced in some hundredths of a second."""

    def __init__(self, n_workers: int, settings: WorkerSettings) -> None:
        self.n_workers, self._settings = n_workers, settings
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Process] = {}
        self._nursery: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self.deaths = 0
        self._deaths_in_a_row = 0  # of workers that were never ready
        for number in range(n_workers):
            self._bear(number)

    def idle(self) -> list[int]:
        return [number for number, worker in self._workers.items() if worker.ready and not worker.busy]

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        process = self._workers[worker]
        process.busy, process.heard = True, time.monotonic()
        with suppress(OSError):  # a worker that is gone is noticed by `hear`
            process.link.settimeout(SECONDS_TO_BE_BORN)
            process.link.sendall((json.dumps(tasks) + "\n").encode())

    def silence(self, worker: int) -> float:
        process = self._workers[worker]
        return time.monotonic() - process.heard if process.busy else 0.0

    def kill(self, worker: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._workers[worker].pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Of the workers there are now."""
        return [worker.pid for worker in self._workers.values()]

    def hear(self, timeout: float) -> list[News]:
        news = []
        for key, _ in self._selector.select(timeout):
            number: int = key.data
            news.append(self._hear_from(number))
        return [one for one in news if one.records or one.done or one.died]

    def _hear_from(self, number: int) -> News:
        process = self._workers[number]
        try:
            content = process.link.recv(READ_AT_ONCE)
        except OSError:
            content = b""
        if not content:
            return self._lost(number)
        process.heard = time.monotonic()
        *lines, process.unread = (process.unread + content).split(b"\n")
        records, done = [], False
        for line in lines:
            plain = json.loads(line)
            if FATAL in plain:
                raise RunError(plain[FATAL])
            if READY in plain:
                process.ready, self._deaths_in_a_row = True, 0
            elif not plain:
                process.busy, done = False, True
            elif "key" in plain:
                records.append(plain)
        return News(number, tuple(records), done=done)

    def _lost(self, number: int) -> News:
        process = self._workers.pop(number)
        self._selector.unregister(process.link)
        process.link.close()
        self.deaths += 1
        self._deaths_in_a_row += not process.ready
        if self._deaths_in_a_row > 3 * self.n_workers + 10:
            raise RunError(
                f"{self._deaths_in_a_row} workers in a row died before they could begin; try the calculator by itself: "
                f"relaxion relax FILE --calc {self._settings.many.calculator}"
            )
        self._bear(number)
        return News(number, died=process.busy)

    def _bear(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        pid = self._ordered(theirs, attempts=3)
        theirs.close()
        self._workers[number] = _Process(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, number)

    def _ordered(self, theirs: socket.socket, attempts: int) -> int:
        try:
            return self._order(theirs)
        except (OSError, ValueError):  # the nursery itself was killed
            self._end_nursery()
            if attempts == 1:
                raise RunError("workers cannot be started: their parent process ends at once") from None
        return self._ordered(theirs, attempts - 1)

    def _order(self, theirs: socket.socket) -> int:
        if self._nursery is None or self._orders is None:
            self._start_nursery()
        assert self._orders is not None
        socket.send_fds(self._orders, [self._settings.model_dump_json().encode()], [theirs.fileno()])
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._orders.recv(64)
            if not part:
                raise ConnectionResetError
            answer += part
        return int(answer)

    def _start_nursery(self) -> None:
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(SECONDS_TO_BE_BORN)
        command = [sys.executable, "-P", "-m", "relaxion.scaling.relax_many.worker_process", str(theirs.fileno())]
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
        # a session of its own: Ctrl-C is for the driver, which ends the workers when it has saved what there is
        self._nursery = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def _end_nursery(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
        self._nursery = self._orders = None

    def close(self) -> None:
        for number, process in self._workers.items():
            self.kill(number)
            process.link.close()
        self._workers = {}
        self._selector.close()
        self._end_nursery()
