"""Following a file that grows: new whole lines only, never the whole file again.

A resumed run cuts its files back and writes on. So the last bytes before the place of reading are remembered: where
they are no longer the same, reading goes back to the newest of some remembered places that still is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from relaxion.files import check_regular
from relaxion.train.runs.run_folder import STEPS

CHUNK = 4 << 20  # bytes read at once
PRINT = 96  # bytes before a place by which it is known again; times in the lines make them differ
MOST_PLACES = 64  # to go back to; then every second goes
BACKLOG = 4 << 20  # with more to read than this, lines are looked at here and there only
FEW = 12  # lines of a chunk looked at then, of any kind
MANY = 120  # and of those that hold the mark


@dataclass(frozen=True)
class ReadPosition:
    """Where reading has been: everything before it was told."""

    offset: int
    print: bytes  # what stands before it
    step: int  # of the newest line told then


START = ReadPosition(0, b"", -1)


@dataclass(frozen=True)
class Piece:
    """What has come."""

    lines: tuple[bytes, ...]
    back_to: int | None = None  # a step: what was told after it is no longer true


class Tail:
    """One file, which may not be there yet. `mark`: bytes of the lines that are not to be missed when hurrying."""

    def __init__(self, path: Path, mark: bytes | None = None) -> None:
        self.path = path
        self.mark = mark
        self.places = [START]
        self.half = 0  # bytes at the end that are no whole line
        self.hurried = False  # lines have been skipped
        self._read_up_to = START

    @property
    def offset(self) -> int:
        return self.places[-1].offset

    def read(self) -> Piece | None:
        """The next lines; None when there is nothing new. Call `keep` with the newest step after they are told."""
        self._read_up_to = START
        try:
            check_regular(self.path)
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                back_to = self._go_back(file, size)
                if back_to is None and size == self.offset:
                    self.half = 0
                    return None
                file.seek(self.offset)
                content = file.read(CHUNK)
        except OSError:  # not there (any more): as if it were empty
            return self._lost()
        end = content.rfind(b"\n") + 1
        if end == 0 and len(content) == CHUNK:
            end = CHUNK  # a line longer than anything of ours: pass it by
        self.half = len(content) - end if len(content) < CHUNK else 0
        if end == 0:
            return None if back_to is None else Piece((), back_to)
        hurry = size - self.offset > BACKLOG
        self.hurried = self.hurried or hurry
        lines = tuple(_some_lines(content[:end], self.mark) if hurry else content[:end].splitlines())
        self._read_up_to = ReadPosition(self.offset + end, content[max(0, end - PRINT) : end], -1)
        return Piece(lines, back_to)

    def keep(self, step: int) -> None:
        """What was read is told; `step` is that of the newest line so far."""
        read = self._read_up_to
        if read.offset > self.offset:
            self.places.append(ReadPosition(read.offset, read.print, step))
        if len(self.places) > MOST_PLACES:
            self.places = [START, *self.places[1:-1][1::2], self.places[-1]]

    def _go_back(self, file: BinaryIO, size: int) -> int | None:
        """To the newest place that is as it was; None when that is the last one."""
        kept = len(self.places)
        while kept > 1 and not _same(file, size, self.places[kept - 1]):
            kept -= 1
        if kept == len(self.places):
            return None
        del self.places[kept:]
        return self.places[-1].step

    def _lost(self) -> Piece | None:
        self.half = 0
        if len(self.places) == 1:
            return None
        del self.places[1:]
        return Piece((), START.step)


def _same(file: BinaryIO, size: int, place: ReadPosition) -> bool:
    if place.offset > size:
        return False
    file.seek(place.offset - len(place.print))
    return file.read(len(place.print)) == place.print


def _some_lines(content: bytes, mark: bytes | None) -> Iterator[bytes]:
    """A few lines evenly, and those with the mark where they are not too many; in their order."""
    found = set(_spread(content, b"", FEW))
    if mark is not None:
        found |= set(_spread(content, mark, MANY))
    for begin, end in sorted(found):
        yield content[begin:end]


def _spread(content: bytes, needle: bytes, most: int) -> Iterator[tuple[int, int]]:
    """Begins and ends of lines that hold the needle, no two nearer than a `most`-th of the content."""
    apart = len(content) // most
    place = 0
    while (hit := content.find(needle, place)) >= 0 and hit < len(content):
        begin = content.rfind(b"\n", 0, hit) + 1
        end = content.find(b"\n", hit)
        end = len(content) if end < 0 else end
        yield begin, end
        place = max(end + 1, begin + apart)


# ---- what the lines say, thinned out: a few hundred points of each number, however many lines there were

MOST_POINTS = 400  # of one curve: a plot has no more pixels to tell them apart
MOST_CURVES = 200  # names in metrics.jsonl; ours have some 60


class Curve:
    """Steps and values, steps rising; of the points that share a bin of steps the newest stands."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._most = most
        self._width = 1

    def add(self, step: int, value: float) -> None:
        if self.steps and step // self._width == self.steps[-1] // self._width:
            self.steps[-1] = step
            self.values[-1] = value
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
