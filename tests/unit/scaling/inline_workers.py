"""Small structures, and a workers without processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
from ase import Atoms
from ase.build import bulk

from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.worker import Worker
from relaxion.scaling.relax_many.workers import News, Workers


def alloy(seed: int, *, extra: str = "") -> Atoms:
    """Four atoms of copper and gold; `extra`: an element in place of the first."""
    generator = np.random.default_rng([8600, seed])
    atoms = bulk("Cu", a=3.8, cubic=True)
    atoms.symbols[generator.random(4) < 0.4] = "Au"
    if extra:
        atoms.symbols[0] = extra
    atoms.positions += generator.normal(0, 0.12, (4, 3))
    return atoms


class InlineWorkers(Workers):
    """One worker in this process. `fate` is asked before each chunk: True kills the worker over it."""

    n_workers = 1

    def __init__(self, settings: WorkerSettings, fate: Callable[[Sequence[str]], bool] = lambda _: False) -> None:
        self.worker, self.fate = Worker(settings), fate
        self.tasks: Sequence[str] | None = None
        self.chunks: list[int] = []

    def start(self):
        raise AssertionError("there is one, and it stays")

    def idle(self) -> list[int]:
        return [0] if self.tasks is None else []

    def give(self, worker: int, tasks: Sequence[str]) -> None:
        assert worker == 0
        self.tasks = tasks
        self.chunks.append(len(tasks))

    def hear(self, timeout: float) -> list[News]:
        del timeout
        if (tasks := self.tasks) is None:
            return []
        self.tasks = None
        if self.fate([json.loads(task)["key"] for task in tasks]):
            return [News(0, died=True)]
        records = [json.loads(record) for record in self.worker.records(tasks)]
        return [News(0, tuple(record for record in records if "key" in record), done=True)]

    def silence(self, worker: int) -> float:
        del worker
        return 0.0

    def kill(self, worker: int) -> None:
        raise AssertionError(f"nobody should kill worker {worker}")

    def close(self) -> None:
        pass
