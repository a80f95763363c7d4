"""Small structures, and a workers without processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk

from relaxion.scaling.relax_many.settings import WorkerSettings
from relaxion.scaling.relax_many.worker import Worker
from relaxion.scaling.relax_many.workers import Standing, Workers


def alloy(seed: int, *, extra: str = "") -> Atoms:
    """Four atoms of copper and gold; `extra`: an element in place of the first."""
    generator = np.random.default_rng([8600, seed])
    atoms = bulk("Cu", a=3.8, cubic=True)
    atoms.symbols[generator.random(4) < 0.4] = "Au"
    if extra:
        atoms.symbols[0] = extra
    atoms.positions += generator.normal(0, 0.12, (4, 3))
    return atoms


class InlineWorkers(Workers[Standing]):
    """One worker in this process. `fate` is asked before each chunk: True kills the worker over it."""

    lost = (EOFError,)

    def __init__(self, settings: WorkerSettings, fate: Callable[[Sequence[str]], bool] = lambda _: False) -> None:
        self.worker, self.fate = Worker(settings), fate
        self.tasks: Sequence[str] | None = None
        self.chunks: list[int] = []
        super().__init__(1, settings)

    def start(self) -> Standing:
        return Standing(ready=True)

    def send(self, known: Standing, tasks: Sequence[str]) -> None:
        del known
        self.tasks = tasks
        self.chunks.append(len(tasks))

    def with_news(self, timeout: float) -> list[int]:
        del timeout
        return [0] if self.known[0].busy else []

    def answer(self, known: Standing) -> list[dict[str, Any]] | None:
        del known
        tasks, self.tasks = self.tasks, None
        if tasks is None:
            return None
        if self.fate([json.loads(task)["key"] for task in tasks]):
            raise EOFError
        return [json.loads(record) for record in self.worker.records(tasks)]

    def kill(self, worker: int) -> None:
        raise AssertionError(f"nobody should kill worker {worker}")

    def end(self, known: Standing) -> None:
        pass
