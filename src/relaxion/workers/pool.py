"""Workers as their driver sees them: tasks go out, results come back, a lost worker is replaced.

A worker is made in its process by a function that can be pickled, and is then called with one task after the other:

    worker = make()
    for result in worker(task): ...      # None is a sign of life, nothing more

What it raises is raised again where the driver listens. Who gives a task keeps it until it is done: the task of a lost
worker is given again, or set aside, as its owner decides.

Many tasks on a pool of workers: handed out in chunks, taken in as they end, tried again where a worker died.

Workers only compute; what becomes of a record is the business of the caller. Every task ends exactly once: with a
record of its worker, or with a reason. A task whose worker died is given again, first with a few others, then alone;
the one that kills its worker twice while alone fails.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Self, TypeAlias, TypeVar

from relaxion.errors import RelaxionError, RunError, SettingsError

MOST_WORKERS = 4096  # more is a slip of the finger
SECONDS_TO_END = 5.0
SECONDS_TO_SAVE = 600.0  # for a worker that was asked to stop
SECONDS_BETWEEN_LOOKS = 0.5
# one thread each; and no file of the working directory may pass for a module of Python's own
FOR_WORKERS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

Work: TypeAlias = Callable[[Any], Iterable[Any]]
"""A worker: from a task to its results."""

MakeWork: TypeAlias = Callable[[], Work]

READY = "ready"
RESULTS = "results"
DONE = "done"
FAILED = "failed"
"""Kinds of answers; with results comes their list, with a failure the error."""


@dataclass(frozen=True)
class News:
    """From one worker: results of its task, and whether the task is done or the worker is gone."""

    worker: int
    results: tuple[Any, ...] = ()
    done: bool = False
    lost: bool = False  # a new worker stands in its place


@dataclass(eq=False, kw_only=True)
class Standing:
    """What is known of one worker."""

    ready: bool = False  # it is made
    busy: bool = False
    heard: float = field(default_factory=time.monotonic)


Known = TypeVar("Known", bound=Standing)


class WorkerPool(ABC, Generic[Known]):
    """Workers by number. A lost worker is replaced under the same number before it is idle again."""

    lost: tuple[type[Exception], ...]  # what `answer` raises for a worker that is gone

    def __init__(self, n_workers: int, make: MakeWork) -> None:
        self.n_workers = n_workers
        self.make = make
        self._deaths_in_a_row = 0  # of workers that were never ready
        self.known: dict[int, Known] = {number: self.start() for number in range(n_workers)}

    @abstractmethod
    def start(self) -> Known:
        """A new worker."""

    @abstractmethod
    def send(self, known: Known, task: Any) -> None:
        """A task for an idle worker. One that is gone is noticed by `hear`."""

    @abstractmethod
    def with_news(self, timeout: float) -> list[int]:
        """Those that have something to say, after up to `timeout` seconds."""

    @abstractmethod
    def answer(self, known: Known) -> tuple[str, Any]:
        """The next answer of a worker that has one: its kind and what comes with it."""

    @abstractmethod
    def kill(self, worker: int) -> None:
        """End a worker that hangs; it is reported as lost."""

    @abstractmethod
    def end(self, known: Known) -> None:
        """It is gone afterwards, and nothing of it is left."""

    def ask_to_stop(self, known: Known) -> None:
        """SIGTERM: a worker may save what it has."""

    def idle(self) -> list[int]:
        """Workers that wait for a task."""
        return [number for number, worker in self.known.items() if worker.ready and not worker.busy]

    def give(self, worker: int, task: Any) -> None:
        """A task for an idle worker."""
        known = self.known[worker]
        known.busy = True
        known.heard = time.monotonic()
        self.send(known, task)

    def hear(self, timeout: float) -> list[News]:
        """What has come in, waiting up to `timeout` seconds for the first.

        RunError where workers cannot begin; else what a worker raised.
        """
        return [self._hear_from(number) for number in self.with_news(timeout)]

    def _hear_from(self, number: int) -> News:
        known = self.known[number]
        try:
            kind, content = self.answer(known)
        except self.lost:
            self.end(known)
            return self._replaced(number)
        known.heard = time.monotonic()
        if kind == FAILED:
            known.busy = False
            if isinstance(content, RelaxionError) and not known.ready:
                raise RunError(str(content)) from content
            raise content
        if kind == READY:
            known.ready = True
            self._deaths_in_a_row = 0
            return News(number)
        known.busy = kind != DONE
        return News(number, tuple(result for result in content or () if result is not None), done=kind == DONE)

    def _replaced(self, number: int) -> News:
        """A new one stands in its place."""
        self._deaths_in_a_row += not self.known[number].ready
        if self._deaths_in_a_row > 3 * self.n_workers + 10:
            raise RunError(
                f"{self._deaths_in_a_row} workers in a row died before they could begin; do a part of the work without "
                "workers to see why"
            )
        self.known[number] = self.start()
        return News(number, lost=True)

    def silence(self, worker: int) -> float:
        """Seconds since a busy worker was last heard of; 0 for one that is idle."""
        known = self.known[worker]
        return time.monotonic() - known.heard if known.busy else 0.0

    def stop(self) -> None:
        """Ask those that are busy to save what they have, wait for them, end all."""
        for known in self.known.values():
            self.ask_to_stop(known)
        deadline = time.monotonic() + SECONDS_TO_SAVE
        waiting = {number for number, known in self.known.items() if known.busy}
        while waiting and time.monotonic() < deadline:
            for number in self.with_news(SECONDS_BETWEEN_LOOKS):
                try:
                    kind, _ = self.answer(self.known[number])
                except self.lost:
                    kind = DONE
                if kind in (DONE, FAILED):
                    waiting.discard(number)
                    self.end(self.known.pop(number))
        self.close()

    def close(self) -> None:
        """End all."""
        for known in self.known.values():
            self.end(known)
        self.known = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class WorkerPlace:
    """Where workers run, from words; nothing is started before `open`."""

    kind: str  # "local" or "ray"
    number: int | None = None  # None: one for each processor of the cluster
    address: str | None = None  # of a Ray that is there ("auto": if there is one); None: a Ray of our own

    @classmethod
    def read(cls, words: str, what: str = "workers") -> WorkerPlace:
        """`2`, `local:2`, `ray:auto`, `ray:local`, `ray:2`, `ray:ADDRESS`, `ray:2@ADDRESS`; else a SettingsError."""
        kind, _, place = f"local:{words}".partition(":") if words.isdecimal() else words.partition(":")
        number, _, address = place.rpartition("@") if "@" in place else (place, "", "")
        counted = number.isdecimal() and 1 <= int(number) <= MOST_WORKERS
        if kind == "local" and counted and "@" not in place:
            return cls(kind, int(number))
        if kind == "ray" and counted and ("@" not in place or address):
            return cls(kind, int(number), address or None)
        if kind == "ray" and place and "@" not in place and not place.lstrip("-").isdecimal():
            return cls(kind, None, None if place == "local" else place)
        raise SettingsError(
            f"{what} '{words}': expected N, local:N, ray:auto, ray:N, ray:ADDRESS or ray:N@ADDRESS with N from 1 to "
            f"{MOST_WORKERS}; try {what}=local:2"
        )

    def open(self, make: MakeWork) -> WorkerPool[Any]:
        """Start them. Ray is loaded only where it is asked for."""
        if self.kind == "local":
            return LocalPool(self.number or 1, make)
        from relaxion.workers.on_ray import RayPool

        return RayPool(self.number, self.address, make)


@dataclass(eq=False)
class _Process(Standing):
    """One local worker."""

    process: BaseProcess
    link: Connection


class LocalPool(WorkerPool[_Process]):
    """Forked by a server that has everything loaded, so that a lost one is replaced in hundredths of a second."""

    lost = (EOFError, OSError)

    def __init__(self, n_workers: int, make: MakeWork) -> None:
        self._context = get_context("forkserver")
        function = make.func if isinstance(make, partial) else make
        self._context.set_forkserver_preload(["__main__", __name__, function.__module__])
        super().__init__(n_workers, make)

    def start(self) -> _Process:
        for attempt in range(6):
            time.sleep(0.05 * attempt)  # a server that was killed takes a moment to be gone on a busy machine
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, self.make), daemon=True)
            with suppress(OSError, EOFError), theirs, _environment(FOR_WORKERS):  # the server may have been killed
                process.start()
                return _Process(process, ours)
        raise RunError("workers cannot be started: their parent process ends immediately")

    def send(self, known: _Process, task: Any) -> None:
        with suppress(OSError):
            known.link.send(task)

    def with_news(self, timeout: float) -> list[int]:
        links: dict[Any, int] = {known.link: number for number, known in self.known.items()}
        return [links[link] for link in wait(links, timeout)]

    def answer(self, known: _Process) -> tuple[str, Any]:
        return known.link.recv()

    def kill(self, worker: int) -> None:
        self.known[worker].process.kill()

    def ask_to_stop(self, known: _Process) -> None:
        known.process.terminate()

    def end(self, known: _Process) -> None:
        known.process.kill()
        known.process.join(SECONDS_TO_END)
        known.link.close()


def serve(link: Connection, make: MakeWork) -> None:
    """The life of a local worker. It ends with its driver, by SIGTERM, or when it is killed."""
    _end_with_driver()
    os.setsid()  # Ctrl-C is for the driver, which ends the workers when it has saved what there is
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what calculators print is no result
    with suppress(EOFError, OSError, KeyboardInterrupt):  # nobody listens any more
        try:
            work = make()
        except Exception as error:  # noqa: BLE001  raised again where the driver listens
            link.send((FAILED, portable(error)))
            return
        link.send((READY, None))
        try:
            while True:
                _do(work, link.recv(), link)
        finally:
            getattr(work, "close", lambda: None)()


def _do(work: Work, task: Any, link: Connection) -> None:
    try:
        for result in work(task):
            link.send((RESULTS, [result]))
    except Exception as error:  # noqa: BLE001  raised again where the driver listens
        link.send((FAILED, portable(error)))
    else:
        link.send((DONE, None))


def portable(error: Exception) -> Exception:
    """The error, or where it cannot be pickled and made again one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever errors of other packages do
        return RunError(f"{type(error).__name__}: {error}")
    return error


def _end_with_driver() -> None:
    """Nobody is left behind when the driver is killed; whoever goes on begins where we were.

    A thread waits for it: the server that forked us lives as long as we do, so its death would tell nothing.
    """
    driver = parent_process()
    assert driver is not None

    def wait_for_its_end() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


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


MOST_SUSPECTS = 8  # in a chunk after a first death; after a second each is alone
DEATHS_ALONE = 2
GRACE = 2.0  # seconds that a worker may be silent beyond the time limit: it ends most tasks by itself
SECONDS_TO_LISTEN = 0.5
SECONDS_TO_DIE = 10.0


@dataclass(eq=False)
class WorkerTask:
    """A task on its way."""

    key: str
    content: Any  # what the worker gets
    deaths: int = 0  # of workers that had it
    deaths_alone: int = 0


Record = Mapping[str, Any]
"""What a worker yields for each task: "key", and whatever the caller understands."""


class TaskDriver:
    """One run over all tasks."""

    def __init__(
        self,
        workers: WorkerPool[Any],
        tasks: Iterator[WorkerTask | None],
        chunk_size: int,
        ended: Callable[[Sequence[tuple[WorkerTask, Record]]], None],
        failed: Callable[[WorkerTask, str], None],
        time_limit_seconds: float | None = None,
    ) -> None:
        """Nothing begins before `run`.

        tasks: the next one; None: there is none now, ask again.
        chunk_size: tasks that a worker gets at once.
        ended: is called with what came in, in the order it came.
        failed: is called with a task that its workers did not survive, and the reason.
        time_limit_seconds: of one task; a worker that is silent longer is killed.
        """
        self.workers = workers
        self.chunk_size = chunk_size
        self.time_limit_seconds = time_limit_seconds
        self.worker_deaths = 0
        self._tasks = tasks
        self._more = True
        self._ended = ended
        self._failed = failed
        self._out: dict[int, dict[str, WorkerTask]] = {}  # by worker: tasks without a record, by key
        self._again: deque[WorkerTask] = deque()  # whose workers died

    @property
    def n_on_their_way(self) -> int:
        """Tasks that are out, or will be given again."""
        return sum(len(tasks) for tasks in self._out.values()) + len(self._again)

    def run(self, stop: Callable[[], bool], meanwhile: Callable[[], bool]) -> None:
        """Until all tasks have ended.

        stop: is asked between two pieces of work; True ends the run.
        meanwhile: work of the caller, a little at a time; True: there was some, ask again.
        """
        while not stop():
            for worker in self.workers.idle():
                if worker not in self._out and (tasks := self._chunk()):
                    self._out[worker] = {task.key: task for task in tasks}
                    self.workers.give(worker, [task.content for task in tasks])
            busy = meanwhile()
            if not self._out and not self._more and not self._again and not busy:
                break
            self._take_in(self.workers.hear(0.0 if busy else SECONDS_TO_LISTEN))
            self._end_the_silent()

    def _chunk(self) -> list[WorkerTask]:
        """Suspects first, in ever smaller company; then new tasks."""
        if self._again:
            task = self._again.popleft()
            if task.deaths > 1:
                return [task]
            company = [other for other in self._again if other.deaths <= 1][: MOST_SUSPECTS - 1]
            for other in company:
                self._again.remove(other)
            return [task, *company][: self.chunk_size]
        tasks: list[WorkerTask] = []
        while self._more and len(tasks) < self.chunk_size:
            try:
                task = next(self._tasks)
            except StopIteration:
                self._more = False
                break
            if task is None:
                break
            tasks.append(task)
        return tasks

    def _take_in(self, news: Sequence[News]) -> None:
        came: list[tuple[WorkerTask, Record]] = []
        for one in news:
            for record in one.results:
                task = self._out.get(one.worker, {}).pop(record["key"], None)
                if task is not None:
                    came.append((task, record))
        if came:
            self._ended(came)
        for one in news:
            if one.lost and one.worker in self._out:
                self._died(one.worker)
            elif one.done:
                # nothing should be left; whatever is gets another chance
                self._again.extend(self._out.pop(one.worker, {}).values())

    def _died(self, worker: int) -> None:
        self.worker_deaths += 1
        tasks = list(self._out.pop(worker, {}).values())
        for task in tasks:
            task.deaths += 1
            task.deaths_alone += len(tasks) == 1
            if task.deaths_alone >= DEATHS_ALONE:
                self._failed(task, f"its worker died {task.deaths_alone} times while it did nothing else")
            else:
                self._again.append(task)

    def _end_the_silent(self) -> None:
        if self.time_limit_seconds is None:
            return
        for worker in list(self._out):
            if self.workers.silence(worker) < self.time_limit_seconds + GRACE:
                continue
            left = self._out[worker]
            if len(left) == 1:
                (task,) = left.values()
                left.clear()
                self._failed(task, f"time limit of {self.time_limit_seconds:g} s exceeded: one force call hangs")
            self.workers.kill(worker)
            until = time.monotonic() + SECONDS_TO_DIE
            while worker in self._out and time.monotonic() < until:  # until then, nothing is given to this worker
                self._take_in(self.workers.hear(SECONDS_TO_LISTEN))
