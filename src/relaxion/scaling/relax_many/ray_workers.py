"""Workers as Ray actors, on this machine or on a cluster. Ray keeps no results: the driver's folder does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from relaxion.errors import MissingExtraError, RelaxionError, RunError
from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.workers import Crew, News

AUTO = "auto"  # a cluster that is there (RAY_ADDRESS, `ray start`), else one of this machine's own
LOCAL = "local"


@dataclass(eq=False)
class _Actor:
    """One worker on Ray."""

    handle: Any
    began: Any  # the answer whether its calculator could be made
    ready: bool = False
    stream: Any = None  # of records, while it is busy
    heard: float = field(default_factory=time.monotonic)


class RayCrew(Crew):
    """As many actors as the cluster has processors, one each."""

    def __init__(self, address: str, settings: WorkerSettings, n_workers: int | None = None) -> None:
        self._ray, self._settings = _ray(), settings
        self._ours = not self._ray.is_initialized()
        self._connect(address)
        self._kind = self._ray.remote(num_cpus=1, max_restarts=0)(_Remote)
        self.n_workers = n_workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self.deaths = 0
        self._deaths_in_a_row = 0
        self._actors = {number: self._born() for number in range(self.n_workers)}

    def _connect(self, address: str) -> None:
        if not self._ours:
            return
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address != AUTO:
                self._ray.init(address=address, **({} if address != LOCAL else options))
                return
            try:
                self._ray.init(address=AUTO, log_to_driver=False, logging_level="ERROR")
            except ConnectionError:  # none is there
                self._ray.init(address=LOCAL, **options)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise RunError(
                f"--workers ray:{address}: Ray cannot be reached ({error}); try ray:auto or local:2"
            ) from error

    def _born(self) -> _Actor:
        handle = self._kind.remote(self._settings.model_dump_json())
        return _Actor(handle, handle.begin.remote())

    def idle(self) -> list[int]:
        return [number for number, actor in self._actors.items() if actor.ready and actor.stream is None]

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        actor = self._actors[worker]
        actor.stream = actor.handle.work.options(num_returns="streaming").remote(list(tasks))
        actor.heard = time.monotonic()

    def silence(self, worker: int) -> float:
        actor = self._actors[worker]
        return time.monotonic() - actor.heard if actor.stream is not None else 0.0

    def kill(self, worker: int) -> None:
        self._ray.kill(self._actors[worker].handle, no_restart=True)

    def hear(self, timeout: float) -> list[News]:
        waited = {}
        for number, actor in self._actors.items():
            wanted = actor.stream if actor.stream is not None else (None if actor.ready else actor.began)
            if wanted is not None:
                waited[wanted] = number
        if not waited:
            return []
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=timeout)
        more, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=0) if ready else ([], [])
        return [news for one in (more or ready) if (news := self._hear_from(waited[one])) is not None]

    def _hear_from(self, number: int) -> News | None:
        actor = self._actors[number]
        try:
            if actor.stream is None:
                self._begun(actor, self._ray.get(actor.began))
                return None
            return self._records(number, actor)
        except self._ray.exceptions.RayError:  # the actor, its node or its process is gone
            return self._lost(number, actor)

    def _begun(self, actor: _Actor, trouble: str | None) -> None:
        if trouble is not None:
            raise RunError(trouble)
        actor.ready, self._deaths_in_a_row = True, 0

    def _records(self, number: int, actor: _Actor) -> News:
        actor.heard = time.monotonic()
        try:
            lines = self._ray.get(next(actor.stream))
        except StopIteration:
            actor.stream = None
            return News(number, done=True)
        plain = [json.loads(line) for line in lines]
        return News(number, tuple(record for record in plain if "key" in record))

    def _lost(self, number: int, actor: _Actor) -> News:
        self.deaths += 1
        self._deaths_in_a_row += not actor.ready
        if self._deaths_in_a_row > 3 * self.n_workers + 10:
            raise RunError(f"{self._deaths_in_a_row} Ray actors in a row died before they could begin")
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor.handle, no_restart=True)
        self._actors[number] = self._born()
        return News(number, died=actor.stream is not None)

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor.handle, no_restart=True)
        self._actors = {}
        if self._ours:
            self._ray.shutdown()


class _Remote:
    """The actor."""

    def __init__(self, settings: str) -> None:
        self._settings, self._worker = settings, None

    def begin(self) -> str | None:
        """None, or why the calculator cannot be made."""
        from relaxion.scaling.relax_many.worker import Worker

        try:
            self._worker = Worker(WorkerSettings.model_validate_json(self._settings))
        except RelaxionError as error:
            return str(error)
        return None

    def process(self) -> int:
        """Where it runs, by number."""
        return os.getpid()

    def work(self, tasks: list[str]) -> Iterator[list[str]]:
        """Records as they come, several in one answer: every answer is an object in Ray's store."""
        assert self._worker is not None
        kept, since = [], time.monotonic()
        for record in self._worker.records(tasks):
            kept.append(record)
            if time.monotonic() - since > 0.2:
                yield kept
                kept, since = [], time.monotonic()
        if kept:
            yield kept


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("--workers ray:… needs the package ray; try: pip install 'relaxion[ray]'") from error
    return ray
