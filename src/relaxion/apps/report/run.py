"""One run folder, looked at again and again: what is new is read, nothing is touched.

Files that grow are followed: new whole lines only, never the whole file again. A resumed run cuts its files back and
writes on. So the last bytes before the place of reading are remembered: where they are no longer the same, reading goes
back to the newest of some remembered places that still is.
"""

from __future__ import annotations

import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from relaxion.errors import FileError, RunError
from relaxion.files import check_regular, text_of, toml_of
from relaxion.train.runs.run_folder import ASSESSMENT_FORMAT as FORMAT
from relaxion.train.runs.run_folder import ASSESSMENT_VERSION as FORMAT_VERSION
from relaxion.train.runs.run_folder import FINAL, FORCE_CALLS, LOCK, STEPS, RunFolder

MOST_ALARMS = 200  # the newest: a page with more nobody reads
LARGEST_JSON = 64 << 20  # bytes of a small file; ours have a few MB at most
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN is no JSON, and no number to draw
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
WAITING = "waiting for its first line"

Made = TypeVar("Made")


def check_run(folder: Path) -> None:
    """Refuse what no run has made, with a sentence about what it is."""
    if not folder.exists():
        raise FileError(f"{folder} does not exist; give the folder of a run")
    if not folder.is_dir():
        raise FileError(f"{folder} is a file; give the folder of a run")
    files = RunFolder(folder)
    if not looks_like_run(folder):
        inner = sorted(file.parent for file in folder.glob("*/settings.toml"))
        if inner:
            raise RunError(f"{folder} holds {len(inner)} runs; name one or several of them, such as {inner[0]}")
        what = "is empty" if not any(folder.iterdir()) else "holds no run"
        raise RunError(
            f"{folder} {what}: neither {files.settings.name} nor {files.metrics.name} is there; "
            "'relaxion train' makes a run"
        )


def looks_like_run(folder: Path) -> bool:
    files = RunFolder(folder)
    return files.settings.exists() or files.metrics.exists() or files.is_run


class WatchedRun:
    """What is known of a run so far; `poll` looks for more."""

    def __init__(self, folder: Path, label: str | None = None) -> None:
        self.folder = folder
        self.label = label or folder.absolute().name
        self.files = RunFolder(folder)
        self.history = History()
        self.alarms: list[dict[str, Any]] = []
        self.unreadable = 0  # lines
        self.caught_up = False  # with metrics.jsonl
        self.settings: dict[str, Any] = {}
        self.settings_text = ""
        self.result: dict[str, Any] | None = None
        self.baselines: dict[str, dict[str, Any]] = {}
        self.assessment: dict[str, Any] | None = None
        self.problems: dict[str, str] = {}  # by file: what is wrong with it
        self.status = WAITING
        self._metrics = Tail(self.files.metrics, mark=b'"eval/')
        self._alarms = Tail(self.files.alarms)
        self._seen: dict[Path, tuple[int, int] | None] = {}
        self._kept: dict[str, Any] = {}

    @property
    def steps(self) -> int | None:
        """That it shall make in all."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def is_supervised(self) -> bool:
        """Fitted to examples or hops: no agent, no environment."""
        return self.settings.get("task") in FITTED

    @property
    def learner(self) -> str:
        """`TD3`, or what is fitted."""
        agent = str(self.settings.get("agent", "agent")).upper()
        return FITTED.get(str(self.settings.get("task")), agent)

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", "?")

    def newest(self, scalar: str) -> float | None:
        return self.history.newest(scalar)

    @property
    def on_structures(self) -> bool:
        return bool(self.history.names(FORCE_CALLS)) or self.settings.get("task") in ("relax", "stiffness")

    @property
    def thinned(self) -> bool:
        """Lines were skipped: there were too many."""
        return self._metrics.hurried

    @property
    def cut_line(self) -> bool:
        """The file ends with half a line, and nobody is writing."""
        return self._metrics.half > 0 and self.status != RUNNING

    def poll(self, seconds: float = 2.0) -> bool:
        """Read what is new, for about so long; whether anything was."""
        changed = self._poll_small_files()
        limit = time.monotonic() + seconds
        changed |= self._follow(self._alarms, self._tell_alarm, limit)
        changed |= self._follow(self._metrics, self._tell_line, limit)
        if self.caught_up:
            self._tell_end()
        status = self._status()
        changed = changed or status != self.status
        self.status = status
        return changed

    def _follow(self, tail: Tail, tell: Callable[[bytes], None], limit: float) -> bool:
        changed = False
        while (piece := tail.read()) is not None:
            changed = True
            if piece.back_to is not None:
                if tail is self._metrics:
                    self.history.cut(piece.back_to)
                else:
                    self.alarms = [event for event in self.alarms if event["step"] <= piece.back_to]
            for line in piece.lines:
                tell(line)
            newest_alarm = self.alarms[-1]["step"] if self.alarms else -1
            tail.keep(self.history.step if tail is self._metrics else newest_alarm)
            if time.monotonic() > limit:
                self.caught_up = False
                return True
        self.caught_up = True
        return changed

    def _tell_line(self, text: bytes) -> None:
        line = _as_dict(text)
        if line is None or not self.history.add(line):
            self.unreadable += bool(text.strip())

    def _tell_alarm(self, text: bytes) -> None:
        event = _as_dict(text)
        if event is None or not isinstance(event.get("step"), int) or not isinstance(event.get("sentence"), str):
            return
        self.alarms = [*(old for old in self.alarms if old["step"] <= event["step"]), event][-MOST_ALARMS:]

    def standing(self) -> dict[str, str]:
        """Alarms and advice that have begun and not ended, with their sentences."""
        found: dict[str, str] = {}
        for event in self.alarms:
            name = str(event.get("alarm", event.get("advice", "")))
            found.pop(name, None)
            if event.get("event") == "begins":
                found[name] = event["sentence"]
        return found

    def kept(self, name: str, make: Callable[[], Made]) -> Made:
        """What is made of the small files, until one of them changes."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    # ---- small files, read again when they change

    def _poll_small_files(self) -> bool:
        files = self.files
        looked = [self._changed(f) for f in (files.settings, files.result, files.baselines, files.assessment)]
        settings, result, baselines, assessment = looked
        if settings:
            self._read_settings()
        if result:
            self.result = self._json(files.result)
            if self.result is None:  # what it said of the end no longer holds
                self.history.cut(self._metrics.places[-1].step)
        if baselines:
            found = self._json(files.baselines) or {}
            self.baselines = {name: row for name, row in found.items() if isinstance(row, dict)}
        if assessment:
            self._read_assessment()
        if any(looked):
            self._kept.clear()
        return any(looked)

    def _changed(self, file: Path) -> bool:
        try:
            stat = file.stat()
            now = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            now = None
        before = self._seen.get(file)
        self._seen[file] = now
        return now != before

    def _read_settings(self) -> None:
        file = self.files.settings
        try:
            settings = toml_of(file)
            self.settings_text = text_of(file)
            self.settings = settings
            self.problems.pop(file.name, None)
        except (OSError, ValueError) as error:
            if file.exists():
                self.problems[file.name] = f"{file.name} cannot be read ({error})"

    def _json(self, file: Path) -> dict[str, Any] | None:
        """None where it is missing or damaged; the problem is kept."""
        self.problems.pop(file.name, None)
        try:
            check_regular(file)
            if file.stat().st_size > LARGEST_JSON:
                self.problems[file.name] = f"{file.name} is larger than {LARGEST_JSON >> 20} MB and was not read"
                return None
            found = _as_dict(file.read_bytes())
        except OSError:
            return None
        if found is None:
            self.problems[file.name] = f"{file.name} is damaged and was not read"
        return found

    def _read_assessment(self) -> None:
        file = self.files.assessment
        record = self._json(file) or {}
        kind = (record.get("format"), record.get("version"))
        self.assessment = record if kind == (FORMAT, FORMAT_VERSION) else None
        if record and self.assessment is None:
            self.problems[file.name] = f"{file.name} is of another format ({kind[0]}, {kind[1]})"

    def _status(self) -> str:
        if self.result is not None:
            return FINISHED
        if self._owner_lives():
            return RUNNING
        return WAITING if self.history.step < 0 else STOPPED

    def _owner_lives(self) -> bool:
        """By the process in its lock; the lock itself is left alone, or a run could be turned away by a look at it."""
        try:
            found = re.search(r"(\d+)\s*$", text_of(self.folder / LOCK))
            if found is None or len(found[1]) > 20:
                return False
            os.kill(int(found[1]), 0)
        except PermissionError:
            return True
        except (OSError, ValueError, OverflowError):
            return False
        return True

    def _tell_end(self) -> None:
        """The assessment at the end, which metrics.jsonl has only where an interval ended there too."""
        values = self.result or {}
        step = values.get("steps")
        if isinstance(step, int) and self.history.step <= step:
            own = {scalar: values[name] for scalar, name in FINAL.items() if isinstance(values.get(name), int | float)}
            self.history.add({STEPS: step, **own})


def watched(folders: Sequence[Path]) -> list[WatchedRun]:
    """Checked, and told apart by their names, or by their paths where those are the same."""
    for folder in folders:
        check_run(folder)
    names = [folder.absolute().name for folder in folders]
    return [WatchedRun(f, str(f) if names.count(name) > 1 else name) for f, name in zip(folders, names, strict=True)]


def _as_dict(text: bytes) -> dict[str, Any] | None:
    try:
        found = _DECODER.decode(text.decode())
        if b"\\u" in text:  # half of a character, which no page can hold
            found = _DECODER.decode(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace").decode())
    except (ValueError, RecursionError):  # half a line, or nothing of ours
        return None
    return found if isinstance(found, dict) else None


# ---- following a file that grows

CHUNK = 4 << 20  # bytes read at once
PRINT = 96  # bytes before a place by which it is known again; times in the lines make them differ
MOST_PLACES = 64  # to go back to; then every second goes
BACKLOG = 4 << 20  # with more to read than this, lines are looked at here and there only
FEW = 12  # lines of a chunk looked at then, of any kind
MANY = 120  # and of those that hold the mark
FITTED = {"stiffness": "Stiffness model", "search": "Critic of hops"}  # by task


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
