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

    lost: tuple[type[Exception], ...]  # what `answer` raises for a worker that is gone

    def __init__(self, n_workers: int, settings: WorkerSettings) -> None:
        self.n_workers, self.settings = n_workers, settings
        self._deaths_in_a_row = 0  # of workers that were never ready
        self.known: dict[int, Known] = {number: self.start() for number in range(n_workers)}

    @abstractmethod
    def start(self) -> Known:
        """A new worker."""

    @abstractmethod
    def send(self, known: Known, tasks: Sequence[str]) -> None:
        """A chunk for an idle worker. One that is gone is noticed by `hear`."""

    @abstractmethod
    def with_news(self, timeout: float) -> list[int]:
        """Those that have something to say, after up to `timeout` seconds."""

    @abstractmethod
    def answer(self, known: Known) -> Any:
        """First why the calculator cannot be made, or None; then lists of records, None at the end of a chunk."""

    @abstractmethod
    def kill(self, worker: int) -> None:
        """End a worker that hangs; it is reported as died."""

    @abstractmethod
    def end(self, known: Known) -> None:
        """It is gone afterwards, and nothing of it is left."""

    def idle(self) -> list[int]:
        """Workers that wait for a chunk."""
        return [number for number, worker in self.known.items() if worker.ready and not worker.busy]

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        """A chunk for an idle worker."""
        known = self.known[worker]
        known.busy, known.heard = True, time.monotonic()
        self.send(known, tasks)

    def hear(self, timeout: float) -> list[News]:
        """What has come in, waiting up to `timeout` seconds for the first. RunError where workers cannot work."""
        return [self._hear_from(number) for number in self.with_news(timeout)]

    def _hear_from(self, number: int) -> News:
        known = self.known[number]
        try:
            answer = self.answer(known)
        except self.lost:
            self.end(known)
            return self._replaced(number)
        known.heard = time.monotonic()
        if not known.ready:
            if answer is not None:
                raise RunError(answer)
            known.ready, self._deaths_in_a_row = True, 0
            return News(number)
        known.busy = answer is not None
        return News(number, tuple(record for record in answer or () if "key" in record), done=answer is None)

    def _replaced(self, number: int) -> News:
        """That it died; a new one stands in its place."""
        lost = self.known[number]
        self._deaths_in_a_row += not lost.ready
        if self._deaths_in_a_row > 3 * self.n_workers + 10:
            raise RunError(
                f"{self._deaths_in_a_row} workers in a row died before they could begin; relax one "
                f"structure with the calculator {self.settings.many.calculator} by itself to see why"
            )
        self.known[number] = self.start()
        return News(number, died=lost.busy)

    def silence(self, worker: int) -> float:
        """Seconds since a busy worker was last heard of; 0 for one that is idle."""
        known = self.known[worker]
        return time.monotonic() - known.heard if known.busy else 0.0

    def close(self) -> None:
        """End all."""
        for known in self.known.values():
            self.end(known)
        self.known = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_workers(word: str) -> tuple[str, str]:
    """ "local:2" or "2" -> ("local", "2"); "ray:auto" -> ("ray", "auto")."""
    kind, _, rest = f"local:{word}".partition(":") if word.isdecimal() else word.partition(":")
    if kind == "local" and re.fullmatch(r"[1-9]\d*", rest) and int(rest) <= MOST_WORKERS:
        return kind, rest
    if kind == "ray" and rest:
        return kind, rest
    raise SettingsError(f"workers are N, local:N, ray:auto or ray:ADDRESS, got '{word}'; try `workers=local:2`")


def make_workers(word: str, settings: WorkerSettings) -> Workers[Any]:
    """Those that the word names. Ray is loaded only where it is asked for."""
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

    lost = (EOFError, OSError)

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
        raise RunError("workers cannot be started: their parent process ends immediately")

    def send(self, known: _Process, tasks: Sequence[str]) -> None:
        with suppress(OSError):
            known.link.send_bytes(json.dumps(tasks).encode())

    def with_news(self, timeout: float) -> list[int]:
        links: dict[Any, int] = {known.link: number for number, known in self.known.items()}
        return [links[link] for link in wait(links, timeout)]

    def answer(self, known: _Process) -> Any:
        return json.loads(known.link.recv_bytes())

    def kill(self, worker: int) -> None:
        self.known[worker].process.kill()

    def end(self, known: _Process) -> None:
        known.process.kill()
        known.process.join(SECONDS_TO_END)
        known.link.close()


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
