"""`relaxion collect`: a recipe, a store; progress on stderr, a summary on stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from relaxion.cli.ending import DONE, INCOMPLETE, Interrupts, as_usage
from relaxion.cli.progress import Now, bar, say, tell, warnings_as_sentences
from relaxion.cli.requests import CollectRequest
from relaxion.collecting.collect import CollectProgress, OnProgress
from relaxion.collecting.collect import collect as collect_into
from relaxion.collecting.settings import CollectSettings
from relaxion.errors import FileError
from relaxion.settings import assigned
from relaxion.training.recipe import find, read_toml

SECONDS_BETWEEN_PLAIN_LINES = 20.0


def collect(request: CollectRequest, interrupts: Interrupts) -> int:
    """The first signal is only noticed, so that all that is finished gets written."""
    with as_usage(FileError):
        settings = CollectSettings.of(read_toml(find(request.recipe)), assigned(request.assignments or (), "--set"))
    with interrupts.held(), warnings_as_sentences(), _progress(request) as on_progress:
        found = collect_into(
            settings, request.out, workers=request.workers, limit_minutes=request.limit_minutes, policy=request.policy,
            on_progress=on_progress, stop=lambda: interrupts.noticed,
        )  # fmt: skip
    lines = [f"{request.out}{os.sep}", *found.lines()]
    tell(json.dumps(found.as_dict()) if request.as_json else "\n".join(lines))
    if interrupts.noticed:
        return interrupts.exit_code
    return DONE if found.complete else INCOMPLETE


@contextmanager
def _progress(request: CollectRequest) -> Iterator[OnProgress | None]:
    """A bar in a terminal, a plain line now and then elsewhere."""
    due = Now(SECONDS_BETWEEN_PLAIN_LINES)
    with bar(str(request.out), None, quiet=request.quiet) as advance:

        def report(reached: CollectProgress) -> None:
            if advance is not None:
                advance(total=reached.wanted, completed=reached.done, words=_words(reached))
            elif due():
                say(f"{reached.done} of {reached.wanted}, {_words(reached)}")

        yield None if request.quiet else report


def _words(reached: CollectProgress) -> str:
    left = (reached.wanted - reached.done) / max(reached.per_minute, 1e-9)
    return (
        f"{reached.per_minute:.0f}/min, {reached.force_calls} force calls, {reached.converged} of "
        f"{reached.trajectories} converged, {reached.skipped} skipped, {left:.0f} min left"
    )
