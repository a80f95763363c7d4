"""Many tasks on a pool of workers: handed out in chunks, taken in as they end, tried again where a worker died.

Workers only compute; what becomes of a record is the business of the caller. Every task ends exactly once: with a
record of its worker, or with a reason. A task whose worker died is given again, first with a few others, then alone;
the one that kills its worker twice while alone fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxion.workers.pool import News, WorkerPool

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
            self._hand_out()
            busy = meanwhile()
            if not self._out and not self._more and not self._again and not busy:
                break
            self._take_in(self.workers.hear(0.0 if busy else SECONDS_TO_LISTEN))
            self._end_the_silent()

    def _hand_out(self) -> None:
        for worker in self.workers.idle():
            if worker in self._out:
                continue
            if tasks := self._chunk():
                self._out[worker] = {task.key: task for task in tasks}
                self.workers.give(worker, [task.content for task in tasks])

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
            self._wait_for_death(worker)

    def _wait_for_death(self, worker: int) -> None:
        """Until it is reported as lost, nothing is given to this worker."""
        until = time.monotonic() + SECONDS_TO_DIE
        while worker in self._out and time.monotonic() < until:
            self._take_in(self.workers.hear(SECONDS_TO_LISTEN))
