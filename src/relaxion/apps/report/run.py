"""One run folder, looked at again and again: what is new is read, nothing is touched."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from relaxion.apps.report.tail import History, Tail
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
    def is_supervised(self) -> bool:
        """Fitted to examples: no agent, no environment."""
        return self.settings.get("task") == "stiffness"

    @property
    def learner(self) -> str:
        """`TD3`, or what is fitted."""
        return "Stiffness model" if self.is_supervised else str(self.settings.get("agent", "agent")).upper()

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
                self._back_to(tail, piece.back_to)
            for line in piece.lines:
                tell(line)
            tail.keep(self.history.step if tail is self._metrics else self._alarm_step())
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

    def _alarm_step(self) -> int:
        return self.alarms[-1]["step"] if self.alarms else -1

    def _back_to(self, tail: Tail, step: int) -> None:
        if tail is self._metrics:
            self.history.cut(step)
        else:
            self.alarms = [event for event in self.alarms if event["step"] <= step]

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
