"""Small structures, and workers without processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk

from relaxion.workers.pool import DONE, RESULTS, MakeWork, Standing, WorkerPool


def alloy(seed: int, *, extra: str = "") -> Atoms:
    """Four atoms of copper and gold; `extra`: an element in place of the first."""
    generator = np.random.default_rng([8600, seed])
    atoms = bulk("Cu", a=3.8, cubic=True)
    atoms.symbols[generator.random(4) < 0.4] = "Au"
    if extra:
        atoms.symbols[0] = extra
    atoms.positions += generator.normal(0, 0.12, (4, 3))
    return atoms


class InlinePool(WorkerPool[Standing]):
    """One worker in this process. `fate` is asked before each task: True kills the worker over it."""

    lost = (EOFError,)

    def __init__(self, make: MakeWork, fate: Callable[[Any], bool] = lambda _: False) -> None:
        self.work = make()
        self.fate = fate
        self.tasks = list[Any]()
        self.given = list[Any]()
        super().__init__(1, make)

    def start(self) -> Standing:
        return Standing(ready=True)

    def send(self, known: Standing, task: Any) -> None:
        del known
        self.tasks.append(task)
        self.given.append(task)

    def with_news(self, timeout: float) -> list[int]:
        del timeout
        return [0] if self.known[0].busy else []

    def answer(self, known: Standing) -> tuple[str, Any]:
        del known
        if not self.tasks:
            return DONE, None
        task = self.tasks.pop()
        if self.fate(task):
            raise EOFError
        return RESULTS, list(self.work(task))

    def kill(self, worker: int) -> None:
        raise AssertionError(f"nobody should kill worker {worker}")

    def end(self, known: Standing) -> None:
        pass

    def stop(self) -> None:
        self.close()


class InlineWorkers(InlinePool):
    """The worker of relax-many; `fate` is told the keys of its structures."""

    def __init__(self, make: MakeWork, fate: Callable[[Sequence[str]], bool] = lambda _: False) -> None:
        super().__init__(make, lambda lines: fate([json.loads(line)["key"] for line in lines]))

    @property
    def chunks(self) -> list[int]:
        return [len(lines) for lines in self.given]
