"""Progress on stderr: one line that is rewritten in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from relaxion.bench.runs import OnCall

SECONDS_BETWEEN_PLAIN_LINES = 5.0


class Progress:
    """Says how far a relaxation is."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._said_at = 0.0
        self._said_of = ""

    @contextmanager
    def line(self) -> Iterator[None]:
        """The line of one structure; it disappears when the result is there."""
        if not self._console.is_terminal or self._quiet:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=8) as self._live:
            yield
        self._live = None

    def reporter(self, label: str, method: str) -> OnCall:
        """What an optimizer calls after each force call."""

        def report(calls: int, energy: float, fmax: float) -> None:
            self._say(f"{label} · {method}", f"call {calls}, energy {energy:.4f} eV, fmax {fmax:.3g} eV/Å")

        return report

    def _say(self, of: str, words: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{of}: {words}", no_wrap=True, overflow="ellipsis"))
        elif not self._quiet and self._plain_line_due(of):
            say(f"{of}: {words}")

    def _plain_line_due(self, of: str) -> bool:
        """A log file wants to know that something happens, not each call."""
        now = time.monotonic()
        if of == self._said_of and now - self._said_at < SECONDS_BETWEEN_PLAIN_LINES:
            return False
        self._said_of, self._said_at = of, now
        return True


def say(sentence: str) -> None:
    """One line on stderr, whatever line breaks a message of another package brings."""
    _write(sys.stderr, one_line(sentence))


def tell(line: str) -> None:
    """One line on stdout, at once, so that a reader of a pipe sees each result as it comes."""
    _write(sys.stdout, line)


def speaks_ascii_only(stream: Any) -> bool:
    """Whether characters beyond ASCII may be lost on their way out."""
    return not (getattr(stream, "encoding", None) or "").lower().startswith("utf")


def one_line(text: str, longest: int = 600) -> str:
    """Without line breaks, and not endless."""
    joined = " ".join(text.split())
    return joined if len(joined) <= longest else joined[: longest - 1] + "…"


def _write(stream: Any, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
