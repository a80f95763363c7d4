"""What a run has logged so far, thinned out: a few hundred points of each number, however many lines there were."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from relaxion.training.curves import STEPS

MOST_POINTS = 400  # of one curve: a plot has no more pixels to tell them apart
MOST_CURVES = 200  # names in metrics.jsonl; ours have some 60


class Curve:
    """Steps and values, steps rising; of the points that share a bin of steps the newest stands."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._most, self._width = most, 1

    def add(self, step: int, value: float) -> None:
        if self.steps and step // self._width == self.steps[-1] // self._width:
            self.steps[-1], self.values[-1] = step, value
            return
        self.steps.append(step)
        self.values.append(value)
        while len(self.steps) > self._most:
            self._widen()

    def _widen(self) -> None:
        self._width *= 2
        newest = {step // self._width: place for place, step in enumerate(self.steps)}
        self.steps = [self.steps[place] for place in newest.values()]
        self.values = [self.values[place] for place in newest.values()]

    def cut(self, step: int) -> None:
        """Forget what lies behind `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]

    def points(self, most: int | None = None) -> tuple[list[int], list[float]]:
        """All, or evenly chosen ones; the last is always there."""
        if most is None or len(self.steps) <= most:
            return list(self.steps), list(self.values)
        last = len(self.steps) - 1
        places = sorted({round(k * last / (most - 1)) for k in range(most)})
        return [self.steps[place] for place in places], [self.values[place] for place in places]


class History:
    """Curves of all numbers, and the newest value of each."""

    def __init__(self) -> None:
        self.step = -1  # of the newest line; -1: none yet
        self.curves: dict[str, Curve] = {}

    def add(self, line: Mapping[str, Any]) -> bool:
        """One line of metrics.jsonl; False when it is none of ours. Steps that go back replace what was there."""
        step = line.get(STEPS)
        if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step < 2**53:
            return False
        self.cut(int(step))
        self.step = int(step)
        for name, value in line.items():
            if name != STEPS and isinstance(value, int | float) and abs(value) < 1e300:
                self._curve(name, self.step, float(value))
        return True

    def _curve(self, name: str, step: int, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= MOST_CURVES:
                return
            curve = self.curves[name] = Curve()
        curve.add(step, value)

    def cut(self, step: int) -> None:
        """Forget what lies behind `step`; -1: everything."""
        if step >= self.step:
            return
        self.step = step
        for curve in self.curves.values():
            curve.cut(step)

    def points(self, name: str, most: int | None = None) -> tuple[list[int], list[float]]:
        return self.curves[name].points(most) if name in self.curves else ([], [])

    def newest(self, name: str) -> float | None:
        """The last value of it, of whichever line; None where there is none."""
        curve = self.curves.get(name)
        return curve.values[-1] if curve is not None and curve.values else None

    def names(self, prefix: str) -> list[str]:
        return [name for name, curve in self.curves.items() if name.startswith(prefix) and curve.values]
