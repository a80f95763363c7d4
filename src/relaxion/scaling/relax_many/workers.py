"""Workers as the driver sees them: chunks go out, news come back. Here: processes of this machine."""

from __future__ import annotations

import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Self, TypeVar

from relaxion.errors import RunError, SettingsError
from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.worker import serve

MOST_WORKERS = 4096
SECONDS_TO_END = 5.0
# one thread each; and no file of the working directory may pass for a module of Python's own
FOR_WORKERS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


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

    process: BaseProcess
    link: Connection


class LocalWorkers(Workers[_Process]):
    """Forked by a server that has everything loaded, so that a lost one is replaced in hundredths of a second."""

    def __init__(self, n_workers: int, settings: WorkerSettings) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", serve.__module__])
        super().__init__(n_workers, settings)

    def start(self) -> _Process:
        for attempt in range(6):
            time.sleep(0.05 * attempt)  # a server that was killed takes a moment to be gone on a busy machine
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, self.settings.model_dump_json()), daemon=True)
            with suppress(OSError, EOFError), theirs, _environment(FOR_WORKERS):  # the server may have been killed
                process.start()
                return _Process(process, ours)
        raise RunError("workers cannot be started: their parent process ends at once")

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        known = self.known[worker]
        known.busy, known.heard = True, time.monotonic()
        with suppress(OSError):  # a worker that is gone is noticed by `hear`
            known.link.send_bytes(json.dumps(tasks).encode())

    def kill(self, worker: int) -> None:
        self.known[worker].process.kill()

    def pids(self) -> list[int | None]:
        """Of the workers there are now."""
        return [worker.process.pid for worker in self.known.values()]

    def hear(self, timeout: float) -> list[News]:
        links: dict[Any, int] = {worker.link: number for number, worker in self.known.items()}
        return [news for link in wait(links, timeout) if (news := self._hear_from(links[link])) is not None]

    def _hear_from(self, number: int) -> News | None:
        known = self.known[number]
        try:
            plain = json.loads(known.link.recv_bytes())
        except (EOFError, OSError):
            self._end(known)
            news = self.replaced(number)
            return news if news.died else None
        known.heard = time.monotonic()
        if not known.ready:
            self.began(known, plain)
            return None
        if plain is None:
            known.busy = False
            return News(number, done=True)
        return News(number, (plain,)) if "key" in plain else None

    def _end(self, known: _Process) -> None:
        known.process.kill()
        known.process.join(SECONDS_TO_END)
        known.link.close()

    def close(self) -> None:
        for known in self.known.values():
            self._end(known)
        self.known = {}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Of what is started inside, where the user has said nothing else."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
