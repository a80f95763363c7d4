"""The driver: reads structures, hands them out, writes down what comes back. It alone writes; workers only compute.

Every structure ends in exactly one place: in a shard, or in `failed/`. A structure whose worker died is tried again,
first with a few others, then alone; the one that kills its worker twice while alone is set aside.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relaxion.apps.relax_many.folder import Folder
from relaxion.apps.relax_many.frames import plain_info, written
from relaxion.apps.relax_many.inputs import InputPlace, places
from relaxion.apps.relax_many.learning import Learner
from relaxion.apps.relax_many.settings import ManySettings, structure_key
from relaxion.apps.relax_many.worker import atoms_of, task_line
from relaxion.errors import RelaxionError
from relaxion.potentials.counting import error_in_words
from relaxion.workers import News, WorkerPool

MOST_SUSPECTS = 8  # in a chunk after a first death; after a second each is alone
DEATHS_ALONE = 2
GRACE = 2.0  # seconds that a worker may be silent beyond the time limit: it ends most structures by itself
SECONDS_TO_LISTEN = 0.5
NOTHING: Mapping[str, Any] = MappingProxyType({})
SECONDS_BETWEEN_REPORTS = 2.0


@dataclass(eq=False)
class ManyTask:
    """A structure on its way."""

    key: str
    line: str
    label: str
    round: int | None = None  # where policies learn during the run
    deaths: int = 0  # of workers that had it
    deaths_alone: int = 0


@dataclass
class ManyTally:
    """How a run stands."""

    read: int = 0  # places in the input
    already: int = 0  # of them with a result when they were read, or on their way: earlier runs, doubles
    relaxed: int = 0  # by this run
    failed: int = 0
    not_converged: int = 0  # of those relaxed by this run
    worker_deaths: int = 0
    seconds: float = 0.0
    input_read: bool = False  # to its end

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Driver:
    """One run. `stop` is asked between two pieces of work."""

    folder: Folder
    workers: WorkerPool[Any]
    settings: ManySettings
    files: Sequence[Path]
    chunk_size: int
    time_limit_seconds: float | None = None
    stop: Callable[[], bool] = lambda: False
    report: Callable[[ManyTally], None] = lambda _: None
    learner: Learner | None = None
    tally: ManyTally = field(default_factory=ManyTally)

    def __post_init__(self) -> None:
        self._out: dict[int, dict[str, ManyTask]] = {}  # by worker: tasks without a record, by key
        self._keys_out: set[str] = set()
        self._again: deque[ManyTask] = deque()  # whose workers died
        self._fresh = self._tasks()
        self._next: ManyTask | None = None  # read, but its round is not open yet
        self._seen: set[str] = set()  # keys of the input, where rounds are counted
        self._began = self._reported = time.monotonic()
        self._context = self.settings.context

    def run(self) -> ManyTally:
        """Until everything has its result, or `stop` says so."""
        with closing(self._fresh):
            while not self.stop():
                self._hand_out()
                studies = self.learner is not None and self.learner.busy
                if not self._out and self.tally.input_read and not self._again and not self._next and not studies:
                    break
                if self.learner is not None:
                    self.learner.advance()
                self._take_in(self.workers.hear(0.0 if studies else SECONDS_TO_LISTEN))
                self._end_the_silent()
                self._tell()
        self._tell(now=True)
        return self.tally

    def _hand_out(self) -> None:
        for worker in self.workers.idle():
            if worker in self._out:
                continue
            if tasks := self._chunk():
                self._out[worker] = {task.key: task for task in tasks}
                self.workers.give(worker, [task.line for task in tasks])

    def _chunk(self) -> list[ManyTask]:
        """Suspects first, in ever smaller company; then what comes next in the input."""
        if self._again:
            task = self._again.popleft()
            if task.deaths > 1:
                return [task]
            company = [other for other in self._again if other.deaths <= 1][: MOST_SUSPECTS - 1]
            for other in company:
                self._again.remove(other)
            return [task, *company][: self.chunk_size]
        tasks = []
        while len(tasks) < self.chunk_size and (task := self._next_task()) is not None:
            tasks.append(task)
        return tasks

    def _next_task(self) -> ManyTask | None:
        """The next of the input; None where there is none, or its round has to wait for a study."""
        task = self._next or next(self._fresh, None)
        self._next = None
        if task is None or self.learner is None or task.round is None:
            return task
        if not self.learner.is_open(task.round):
            self._next = task
            return None
        if weights := self.learner.weights(task.round):
            task.line = json.dumps({**json.loads(task.line), "weights": weights})
        return task

    def _tasks(self) -> Generator[ManyTask]:
        """Every structure of the input that has no result yet and is not on its way."""
        for file in self.files:
            with self.folder.list_inputs(file) as listed, closing(places(file)) as found:
                for place in found:
                    self.tally.read += 1
                    key, task = self._looked_at(place)
                    listed(_listed(place, key))
                    if task is not None:
                        yield task
        self.tally.input_read = True

    def _looked_at(self, place: InputPlace) -> tuple[str, ManyTask | None]:
        key = line = ""
        try:
            if place.atoms is not None:
                key = structure_key(place.atoms, self._context)
                line = task_line(key, place.atoms)
        except Exception as error:  # noqa: BLE001 - constraints of other packages may lack what is needed to tell them
            place = InputPlace(place.file, place.index, None, f"it cannot be stored: {error_in_words(error)}")
        if place.atoms is None:
            self._set_aside(place.key_of_error(), place.label, str(place.error))
            return place.key_of_error(), None
        number = self._round(key)
        if key in self._keys_out or self.folder.has(key):
            self.tally.already += 1
            return key, None
        self._keys_out.add(key)
        return key, ManyTask(key, line, place.label, number)

    def _round(self, key: str) -> int | None:
        """Of a structure that comes for the first time in this input."""
        if self.learner is None or key in self._seen:
            return None
        self._seen.add(key)
        return self.learner.enter(key, ended=self.folder.has(key))

    def _take_in(self, news: Sequence[News]) -> None:
        frames: list[tuple[str, str]] = []
        for one in news:
            for record in one.results:
                frames += self._record(one.worker, record)
        self.folder.append(frames)
        for one in news:
            if one.lost and one.worker in self._out:
                self._died(one.worker)
            elif one.done:
                # nothing should be left; whatever is gets another chance
                self._again.extend(self._out.pop(one.worker, {}).values())

    def _record(self, worker: int, record: dict[str, Any]) -> list[tuple[str, str]]:
        task = self._out.get(worker, {}).pop(record["key"], None)
        if task is None:
            return []
        self._keys_out.discard(task.key)
        self._ended(task)
        if "frame" in record:
            self.tally.relaxed += 1
            self.tally.not_converged += record["outcome"] != "converged"
            return [(task.key, record["frame"])]
        self._fail(task, record["error"], record)
        return []

    def _ended(self, task: ManyTask) -> None:
        if self.learner is not None and task.round is not None:
            self.learner.ended(task.round)
            task.round = None

    def _died(self, worker: int) -> None:
        self.tally.worker_deaths += 1
        tasks = list(self._out.pop(worker, {}).values())
        for task in tasks:
            task.deaths += 1
            task.deaths_alone += len(tasks) == 1
            if task.deaths_alone >= DEATHS_ALONE:
                self._fail(task, f"its worker died {task.deaths_alone} times while it relaxed nothing else")
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
                self._fail(task, f"time limit of {self.time_limit_seconds:g} s exceeded: one force call hangs")
            self.workers.kill(worker)
            self._wait_for_death(worker)

    def _wait_for_death(self, worker: int) -> None:
        """Until it is heard of, nobody waits for this worker any more."""
        until = time.monotonic() + 10.0
        while worker in self._out and time.monotonic() < until:
            self._take_in(self.workers.hear(SECONDS_TO_LISTEN))

    def _fail(self, task: ManyTask, reason: str, record: Mapping[str, Any] = NOTHING) -> None:
        """Set it aside, with what its worker knew and the structure as it came."""
        self._keys_out.discard(task.key)
        self._ended(task)
        images = {"input.extxyz": _input_frame(task)}
        if record.get("last") is not None:
            images["last.extxyz"] = record["last"]
        facts = {name: value for name, value in record.items() if name not in ("error", "key", "last")}
        self._set_aside(task.key, task.label, reason, facts, images)

    def _set_aside(
        self, key: str, label: str, reason: str, facts: Mapping[str, Any] = NOTHING, images: Mapping[str, str] = NOTHING
    ) -> None:
        if self.folder.has(key):
            self.tally.already += 1
            return
        self.folder.set_aside(key, {"input": label, "reason": reason, "outcome": "error", **facts}, images)
        self.tally.failed += 1

    def _tell(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._reported < SECONDS_BETWEEN_REPORTS:
            return
        self._reported = time.monotonic()
        self.tally.seconds = self._reported - self._began
        out = sum(len(tasks) for tasks in self._out.values())
        plain = {**self.tally.plain(), "on_their_way": out + len(self._again), "workers": self.workers.n_workers}
        self.folder.tell(plain)
        self.report(self.tally)


def _listed(place: InputPlace, key: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"key": key, "index": place.index}
    if place.atoms is not None:
        plain |= {"formula": place.atoms.get_chemical_formula(), "n_atoms": len(place.atoms)}
        if named := plain_info(place.atoms):
            plain["info"] = named
    return plain


def _input_frame(task: ManyTask) -> str:
    try:
        return written(atoms_of(task.line), {"key": task.key})
    except (RelaxionError, ValueError, TypeError, KeyError):  # not fit for extxyz; the line tells it all
        return json.dumps(json.loads(task.line)) + "\n"
