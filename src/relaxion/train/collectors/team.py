"""The collectors of a run as the learner sees them: asked, waited for, and put back in place when they were lost."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relaxion.errors import RelaxionWarning, RunError
from relaxion.train.collectors.messages import CollectorAnswer, CollectorPlace, CollectorRequest
from relaxion.workers import WorkerPool

PATIENCE_SECONDS = 120  # without an answer before a word is said
MOST_LOSSES = 3  # of one collector over the same step: then the step itself is what kills


class Team:
    """Collectors by number. In the place of a lost one a new one is put where the lost one stood."""

    def __init__(self, pool: WorkerPool[Any]) -> None:
        self.pool = pool
        self._asked: dict[int, tuple[CollectorRequest, Callable[[], CollectorPlace]]] = {}  # without an answer yet
        self._to_give: set[int] = set()  # asked, but their collector has not been given its request
        self._in_place: set[int] = set()  # collectors that stand where their last step ended
        self._answers: dict[int, CollectorAnswer] = {}
        self._losses: Counter[int] = Counter()  # over the same step

    def ask(self, number: int, request: CollectorRequest, place: Callable[[], CollectorPlace]) -> None:
        """Begin a step. `place` says where the collector stands, for one that must be put there first."""
        self._asked[number] = request, place
        self._to_give.add(number)
        self._hear(0.0)

    def answer(self, number: int) -> CollectorAnswer:
        """Wait for it, redoing what was lost."""
        while number not in self._answers:
            self._hear(PATIENCE_SECONDS)
            if number in self._asked and self.pool.silence(number) > PATIENCE_SECONDS:
                warnings.warn(
                    f"collector {number} has not answered for {PATIENCE_SECONDS} s: a slow potential, or no free core "
                    "('ray status' shows it)",
                    RelaxionWarning,
                    stacklevel=3,
                )
        return self._answers.pop(number)

    def _hear(self, timeout: float) -> None:
        self._give()
        for news in self.pool.hear(timeout):
            for answer in news.results:
                self._answers[news.worker] = answer
                del self._asked[news.worker]
                self._losses[news.worker] = 0
            if news.lost:
                self._lost(news.worker)
        self._give()

    def _give(self) -> None:
        for number in self._to_give.intersection(self.pool.idle()):
            request, place = self._asked[number]
            if number not in self._in_place:
                request = replace(request, place=place())
                self._in_place.add(number)
            self.pool.give(number, request)
            self._to_give.discard(number)

    def _lost(self, number: int) -> None:
        self._in_place.discard(number)
        if number not in self._asked:
            return
        self._to_give.add(number)
        self._losses[number] += 1
        if self._losses[number] == MOST_LOSSES:
            raise RunError(
                f"collector {number} was lost {MOST_LOSSES} times over the same step, so something in that step ends "
                "it (the potential? memory?); run without collectors to see it; `resume=True` continues from the last "
                "checkpoint"
            )
        warnings.warn(f"collector {number} was lost; a new one repeats its step", RelaxionWarning, stacklevel=4)
