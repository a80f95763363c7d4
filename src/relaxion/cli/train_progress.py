"""What `relaxion train` shows on stderr while it runs: a bar in a terminal, warnings and alarms as sentences."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relaxion.cli.progress import say
from relaxion.errors import RelaxionWarning
from relaxion.training.diagnostics import DIAGNOSIS, standing
from relaxion.training.loop import OnProgress
from relaxion.training.settings import RunSettings


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Our own warnings as one line each on stderr."""
    with warnings.catch_warnings():
        shown_elsewhere = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, RelaxionWarning):
                say(f"relaxion: warning: {message}")
            else:
                shown_elsewhere(message, category, *rest, **more)

        warnings.simplefilter("always", RelaxionWarning)
        warnings.showwarning = show
        yield


@contextmanager
def progress(settings: RunSettings, out: Path, quiet: bool) -> Iterator[OnProgress | None]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=console, transient=True) as bar:
        job, alarm = bar.add_task(str(out), total=settings.training.steps, words=""), NewestAlarm()

        def report(step: int, newest: Mapping[str, float]) -> None:
            words = ", ".join([*_words(newest), *alarm(newest)])
            if step % 20 == 0 or step >= settings.training.steps:
                bar.update(job, completed=step, words=words)

        yield report


class NewestAlarm:
    """Of the alarms that stand, the one that began last."""

    def __init__(self) -> None:
        self._standing: list[str] = []

    def __call__(self, newest: Mapping[str, float]) -> list[str]:
        """From the newest metrics; nothing where all is well."""
        now = standing(newest)
        kept = [headline for headline in self._standing if headline in now]
        self._standing = kept + [headline for headline in now if headline not in kept]
        return [f"! {headline}" for headline in self._standing[-1:]]


@contextmanager
def alarms_as_sentences() -> Iterator[None]:
    """What the diagnosis logs as one line each on stderr."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(f"relaxion: alarm: {record.getMessage()}")
    diagnosis, passed_on = logging.getLogger(DIAGNOSIS), logging.getLogger(DIAGNOSIS).propagate
    diagnosis.addHandler(handler)
    diagnosis.propagate = False
    try:
        yield
    finally:
        diagnosis.removeHandler(handler)
        diagnosis.propagate = passed_on


def _words(newest: Mapping[str, float]) -> list[str]:
    names = {
        "rollout/ep_rew_mean": "return",
        "eval/mean_reward": "assessed",
        "eval/force_calls_mean": "force calls",
        "eval/force_calls_bfgs": "BFGS",
    }
    return [f"{word} {newest[name]:.1f}" for name, word in names.items() if name in newest]
