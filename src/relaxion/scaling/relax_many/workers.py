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
from typing import Any, Generic, Self, TypeVar

from relaxion.errors import RunError, SettingsError
from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.worker_process import FATAL, READY

MOST_WORKERS = 4096
SECONDS_TO_START = 120.0
READ_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class News:
    """From one worker: records of structures, and whether its chunk is done or it is gone."""

    worker: int
    records: tuple[dict[str, Any], ...] = ()
    done: bool = False
    died: bool = False


@dataclass(eq=False, kw_only=True)
class Standing:
    """What is known of one worker."""

    ready: bool = False  # its calculator is made
    busy: bool = False
    heard: float = field(default_factory=time.monotonic)


Known = TypeVar("Known", bound=Standing)


class Workers(ABC, Generic[Known]):
    """Workers by number. A worker that died is replaced under the same number before it is idle again."""

    def __init__(self, n_workers: int, settings: WorkerSettings) -> None:
        self.n_workers, self.settings = n_workers, settings
        self.deaths = 0
        self._deaths_in_a_row = 0  # of workers that were never ready
        self.known: dict[int, Known] = {number: self.start() for number in range(n_workers)}

    @abstractmethod
    def start(self) -> Known:
        """A new worker."""

    @abstractmethod
    def give(self, worker: int, tasks: Sequence[str]) -> None:
        """A chunk for an idle worker."""

    @abstractmethod
    def hear(self, timeout: float) -> list[News]:
        """What has come in, waiting up to `timeout` seconds for the first. RunError where workers cannot work."""

    @abstractmethod
    def kill(self, worker: int) -> None:
        """End a worker that hangs; it is reported as died."""

    @abstractmethod
    def close(self) -> None:
        """End all."""

    def idle(self) -> list[int]:
        """Workers that wait for a chunk."""
        return [number for number, worker in self.known.items() if worker.ready and not worker.busy]

    def silence(self, worker: int) -> float:
        """Seconds since a busy worker was last heard of; 0 for one that is idle."""
        known = self.known[worker]
        return time.monotonic() - known.heard if known.busy else 0.0

    def began(self, worker: Known, trouble: str | None) -> None:
        """It is ready, or its calculator cannot be made."""
        if trouble is not None:
            raise RunError(trouble)
        worker.ready, self._deaths_in_a_row = True, 0

    def replaced(self, number: int) -> News:
        """That it died; a new one stands in its place."""
        lost = self.known[number]
        self.deaths += 1
        self._deaths_in_a_row += not lost.ready
        if self._deaths_in_a_row > 3 * self.n_workers + 10:
            raise RunError(
                f"{self._deaths_in_a_row} workers in a row died before they could begin; try the calculator by itself: "
                f"relaxion relax FILE --calc {self.settings.many.calculator}"
            )
        self.known[number] = self.start()
        return News(number, died=lost.busy)

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


def make_workers(word: str, settings: WorkerSettings) -> Workers[Any]:
    """Those that `--workers` names. Ray is loaded only where it is asked for."""
    kind, rest = parse_workers(word)
    if kind == "local":
        return LocalWorkers(int(rest), settings)
    from relaxion.scaling.relax_many.ray_workers import RayWorkers

    return RayWorkers(rest, settings)


@dataclass(eq=False)
class _Process(Standing):
    """One local worker."""

    pid: int
    link: socket.socket
    unread: bytes = b""


class LocalWorkers(Workers[_Process]):
    """Forked by a process that has everything loaded, so that a lost one is replaced in hundredths of a second."""

    def __init__(self, n_workers: int, settings: WorkerSettings) -> None:
        self._forker: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        super().__init__(n_workers, settings)

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        process = self.known[worker]
        process.busy, process.heard = True, time.monotonic()
        with suppress(OSError):  # a worker that is gone is noticed by `hear`
            process.link.settimeout(SECONDS_TO_START)
            process.link.sendall((json.dumps(tasks) + "\n").encode())

    def kill(self, worker: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.known[worker].pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Of the workers there are now."""
        return [worker.pid for worker in self.known.values()]

    def hear(self, timeout: float) -> list[News]:
        with selectors.DefaultSelector() as selector:
            for number, process in self.known.items():
                selector.register(process.link, selectors.EVENT_READ, number)
            news = [self._hear_from(key.data) for key, _ in selector.select(timeout)]
        return [one for one in news if one.records or one.done or one.died]

    def _hear_from(self, number: int) -> News:
        process = self.known[number]
        try:
            content = process.link.recv(READ_AT_ONCE)
        except OSError:
            content = b""
        if not content:
            process.link.close()
            return self.replaced(number)
        process.heard = time.monotonic()
        *lines, process.unread = (process.unread + content).split(b"\n")
        records, done = [], False
        for line in lines:
            plain = json.loads(line)
            if FATAL in plain or READY in plain:
                self.began(process, plain.get(FATAL))
            elif not plain:
                process.busy, done = False, True
            elif "key" in plain:
                records.append(plain)
        return News(number, tuple(records), done=done)

    def start(self) -> _Process:
        ours, theirs = socket.socketpair()
        for _ in range(3):
            try:
                pid = self._forked(theirs)
            except (OSError, ValueError):  # the forking process itself was killed
                self._end_forker()
                continue
            theirs.close()
            return _Process(pid, ours)
        raise RunError("workers cannot be started: their parent process ends at once")

    def _forked(self, theirs: socket.socket) -> int:
        orders = self._orders or self._start_forker()
        socket.send_fds(orders, [self.settings.model_dump_json().encode()], [theirs.fileno()])
        answer = b""
        while not answer.endswith(b"\n"):
            part = orders.recv(64)
            if not part:
                raise ConnectionResetError
            answer += part
        return int(answer)

    def _start_forker(self) -> socket.socket:
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(SECONDS_TO_START)
        command = [sys.executable, "-P", "-m", "relaxion.scaling.relax_many.worker_process", str(theirs.fileno())]
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
        # a session of its own: Ctrl-C is for the driver, which ends the workers when it has saved what there is
        self._forker = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        return self._orders

    def _end_forker(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._forker is not None:
            self._forker.kill()
            self._forker.wait()
        self._forker = self._orders = None

    def close(self) -> None:
        for number, process in self.known.items():
            self.kill(number)
            process.link.close()
        self.known = {}
        self._end_forker()
