"""`relaxion collect`: a recipe, a relaxation database; progress on stderr, a summary on stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relaxion.apps.cli.command import DONE, INCOMPLETE, as_usage, interrupts
from relaxion.apps.cli.progress import Now, bar, say, tell, warnings_as_sentences
from relaxion.errors import FileError
from relaxion.settings import assigned
from relaxion.train.collecting.collect import CollectProgress, OnProgress, collect
from relaxion.train.collecting.settings import CollectSettings
from relaxion.train.runs.recipe import find, read_toml

SECONDS_BETWEEN_PLAIN_LINES = 20.0


def collect_into_database(
    recipe: str,
    out: Path,
    workers: str,
    assignments: Sequence[str],
    limit_minutes: float | None,
    policy: str | None,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """The first signal is only noticed, so that all that is finished gets written."""
    with as_usage(FileError):
        settings = CollectSettings.of(read_toml(find(recipe)), assigned(assignments, "--set"))
    with interrupts.held(), warnings_as_sentences(), _progress(out, quiet) as on_progress:
        found = collect(
            settings, out, workers=workers, limit_minutes=limit_minutes, policy=policy, on_progress=on_progress,
            stop=lambda: interrupts.noticed,
        )  # fmt: skip
    lines = [f"{out}{os.sep}", *found.lines()]
    tell(json.dumps(found.as_dict()) if as_json else "\n".join(lines))
    if interrupts.noticed:
        return interrupts.exit_code
    return DONE if found.complete else INCOMPLETE


@contextmanager
def _progress(out: Path, quiet: bool) -> Iterator[OnProgress | None]:
    """A bar in a terminal, a plain line now and then elsewhere."""
    due = Now(SECONDS_BETWEEN_PLAIN_LINES)
    with bar(str(out), None, quiet=quiet) as advance:

        def report(reached: CollectProgress) -> None:
            if advance is not None:
                advance(total=reached.wanted, completed=reached.done, words=_words(reached))
            elif due():
                say(f"{reached.done} of {reached.wanted}, {_words(reached)}")

        yield None if quiet else report


def _words(reached: CollectProgress) -> str:
    left = (reached.wanted - reached.done) / max(reached.per_minute, 1e-9)
    return (
        f"{reached.per_minute:.0f}/min, {reached.force_calls} force calls, {reached.converged} of "
        f"{reached.trajectories} converged, {reached.skipped} skipped, {left:.0f} min left"
    )
