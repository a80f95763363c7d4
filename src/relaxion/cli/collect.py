"""`relaxion collect`: a recipe, a store; progress on stderr, a summary on stdout."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relaxion.cli.progress import say, tell
from relaxion.cli.train_progress import warnings_as_sentences
from relaxion.collecting.collect import OnProgress, collect
from relaxion.collecting.collect import Progress as Reached
from relaxion.collecting.settings import CollectSettings
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.training.recipe import find, overrides, read_toml

DONE, ERROR, USAGE, INCOMPLETE = 0, 1, 2, 3
SECONDS_BETWEEN_PLAIN_LINES = 20.0


@dataclass(frozen=True)
class CollectRequest:
    """What the user asked for."""

    recipe: str
    out: Path
    workers: int
    assignments: tuple[str, ...]
    limit_minutes: float | None
    policy: str | None
    as_json: bool
    quiet: bool


def run(request: CollectRequest) -> int:
    """Do it and return the exit code."""
    try:
        settings = CollectSettings.of(read_toml(find(request.recipe)), overrides(request.assignments))
    except (SettingsError, FileError) as error:
        say(f"relaxion: {error}")
        return USAGE
    with _first_signal() as received:
        try:
            with warnings_as_sentences(), _progress(request) as on_progress:
                found = collect(
                    settings,
                    request.out,
                    workers=request.workers,
                    limit_minutes=request.limit_minutes,
                    policy=request.policy,
                    on_progress=on_progress,
                    stop=lambda: bool(received),
                )
        except SettingsError as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
    if request.as_json:
        tell(json.dumps(found.as_dict()))
    else:
        for line in [f"{request.out}{os.sep}", *found.lines()]:
            tell(line)
    if received:
        return 128 + received[0]
    return DONE if found.complete else INCOMPLETE


@contextmanager
def _first_signal() -> Iterator[list[int]]:
    """Ctrl-C or SIGTERM is only noticed, so that all that is finished gets written; a second one stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may listen
        return
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in wanted}

    def notice(number: int, _frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in wanted:
        signal.signal(number, notice)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(request: CollectRequest) -> Iterator[OnProgress | None]:
    """A bar in a terminal, a plain line now and then elsewhere."""
    console = Console(stderr=True)
    if request.quiet:
        yield None
    elif not console.is_terminal:
        yield _plain_lines()
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[words]}"), console=console, transient=True) as bar:
            job = bar.add_task(str(request.out), total=None, words="")

            def report(reached: Reached) -> None:
                bar.update(job, total=reached.wanted, completed=reached.done, words=_words(reached))

            yield report


def _plain_lines() -> OnProgress:
    last = 0.0

    def report(reached: Reached) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_PLAIN_LINES:
            last = time.monotonic()
            say(f"{reached.done} of {reached.wanted}, {_words(reached)}")

    return report


def _words(reached: Reached) -> str:
    left = (reached.wanted - reached.done) / max(reached.per_minute, 1e-9)
    return (
        f"{reached.per_minute:.0f}/min, {reached.force_calls} force calls, {reached.converged} of "
        f"{reached.trajectories} converged, {reached.skipped} skipped, {left:.0f} min left"
    )
