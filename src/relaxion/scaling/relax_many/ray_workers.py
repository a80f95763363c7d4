"""Workers as Ray actors, on this machine or on a cluster. Ray keeps no results: the driver's folder does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from relaxion.errors import RelaxionError, RunError
from relaxion.scaling.ray_engine import RayEngine, cluster_is_known
from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.workers import Standing, Workers

AUTO = "auto"  # a cluster that is there (RAY_ADDRESS, `ray start`), else one of this machine's own
LOCAL = "local"
SECONDS_BETWEEN_ANSWERS = 0.2


@dataclass(eq=False)
class _Actor(Standing):
    """One worker on Ray."""

    handle: Any
    awaited: Any  # whether its calculator could be made; then the stream of records, while it is busy


class RayWorkers(Workers[_Actor]):
    """As many actors as the cluster has processors, one each."""

    def __init__(self, address: str, settings: WorkerSettings) -> None:
        self._engine = _engine(address)
        self._ray = self._engine.ray
        self.lost = (self._ray.exceptions.RayError,)  # the actor, its node or its process is gone
        self._kind = self._ray.remote(num_cpus=1, max_restarts=0)(_Remote)
        super().__init__(max(1, self._engine.n_cpus), settings)

    def start(self) -> _Actor:
        handle = self._kind.remote(self.settings.model_dump_json())
        return _Actor(handle, handle.begin.remote())

    def send(self, known: _Actor, tasks: Sequence[str]) -> None:
        known.awaited = known.handle.work.options(num_returns="streaming").remote(list(tasks))

    def with_news(self, timeout: float) -> list[int]:
        waited = {actor.awaited: number for number, actor in self.known.items() if actor.busy or not actor.ready}
        if not waited:
            return []
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=timeout)
        more, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=0) if ready else ([], [])
        return [waited[one] for one in (more or ready)]

    def answer(self, known: _Actor) -> Any:
        if not known.busy:
            return self._ray.get(known.awaited)
        try:
            return [json.loads(line) for line in self._ray.get(next(known.awaited))]
        except StopIteration:
            return None

    def kill(self, worker: int) -> None:
        self._ray.kill(self.known[worker].handle, no_restart=True)

    def end(self, known: _Actor) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(known.handle, no_restart=True)

    def close(self) -> None:
        super().close()
        self._engine.stop()


def _engine(address: str) -> RayEngine:
    cores = os.cpu_count() or 1
    try:
        if address == AUTO and cluster_is_known():
            with suppress(RunError):
                return RayEngine(AUTO, None)
            return RayEngine(None, cores, guarded=False)
        return RayEngine(None if address in (AUTO, LOCAL) else address, cores)
    except RunError as error:
        raise RunError(f"workers ray:{address}: Ray cannot be reached ({error}); try ray:auto or local:2") from error


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

    def work(self, tasks: list[str]) -> Iterator[list[str]]:
        """Records as they come, several in one answer: every answer is an object in Ray's store."""
        assert self._worker is not None
        kept, since = [], time.monotonic()
        for record in self._worker.records(tasks):
            kept.append(record)
            if time.monotonic() - since > SECONDS_BETWEEN_ANSWERS:
                yield kept
                kept, since = [], time.monotonic()
        if kept:
            yield kept
