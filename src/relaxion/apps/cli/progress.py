"""Sentences and progress on stderr: a line or a bar in a terminal, a plain line now and then elsewhere.

Messages of the library name Python arguments in backticks, `database=relaxations` or `resume=True`; here they become
options, `--database relaxations` and `--resume`. The table comes from the declared options.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.main import get_command

from relaxion.errors import RelaxionWarning

if TYPE_CHECKING:
    from relaxion.train.judge.runs import OnCall

SECONDS_BETWEEN_PLAIN_LINES = 5.0
MENTION = re.compile(r"`([a-z_]+)=([^`]*)`")
ANY_VALUE = "..."  # in a mention: a value of the reader's own
Advance = Callable[..., None]  # of a bar: `completed=`, `advance=`, `total=`, `description=`, `words=`


class ProgressLine:
    """Says how far a relaxation is."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._due = Now(SECONDS_BETWEEN_PLAIN_LINES)

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

        of = f"{label} · {method}"

        def report(calls: int, energy: float, fmax: float) -> None:
            words = f"{of}: call {calls}, energy {energy:.4f} eV, fmax {fmax:.3g} eV/Å"
            if self._live is not None:
                self._live.update(Text(words, no_wrap=True, overflow="ellipsis"))
            elif not self._quiet and self._due(of):
                say(words)

        return report


class Now:
    """Whether a plain line is due: a log file wants to know that something happens, not each call."""

    def __init__(self, seconds: float, *, at_once: bool = True) -> None:
        self._seconds = seconds
        self._said_at = float("-inf") if at_once else time.monotonic()
        self._said_of = ""

    def __call__(self, of: str = "") -> bool:
        now = time.monotonic()
        if of == self._said_of and now - self._said_at < self._seconds:
            return False
        self._said_of = of
        self._said_at = now
        return True


@contextmanager
def bar(label: str, total: int | None, *, quiet: bool) -> Iterator[Advance | None]:
    """A bar in a terminal, which disappears at the end; None where nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, TextColumn("{task.fields[words]}"), console=console, transient=True) as bars:
        job = bars.add_task(label, total=total, words="")
        yield lambda **news: bars.update(job, **news)


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


def say(sentence: str) -> None:
    """One line on stderr, whatever line breaks a message of another package brings."""
    print(one_line(in_flags(sentence)), file=sys.stderr, flush=True)  # noqa: T201


def tell(line: str) -> None:
    """One line on stdout, at once, so that a reader of a pipe sees each result as it comes."""
    print(in_flags(line), flush=True)  # noqa: T201


def print_table(
    columns: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str | Text]], *, show_header: bool = True
) -> None:
    """Headings, with whether their column stays on one line; brackets as in 'relaxion[chgnet]' are no markup."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for heading, on_one_line in columns:
        table.add_column(heading, overflow="fold", no_wrap=on_one_line)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    Console(highlight=False).print(table)


def speaks_ascii_only(stream: Any) -> bool:
    """Whether characters beyond ASCII may be lost on their way out."""
    return not (getattr(stream, "encoding", None) or "").lower().startswith("utf")


def one_line(text: str, longest: int = 600) -> str:
    """Without line breaks, and not endless."""
    joined = " ".join(text.split())
    return joined if len(joined) <= longest else joined[: longest - 1] + "…"


def counted(number: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- arguments of the library as options


def declared_options() -> dict[str, list[Any]]:
    """The options of every command, as typer has them."""
    from relaxion.apps.cli.app import app  # which has loaded every command, and they say their sentences by this module

    commands: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 - of a group, which this is
    return {
        name: [one for one in command.params if one.param_type_name == "option"] for name, command in commands.items()
    }


def flag_of(declared: Any) -> str:
    """The long name: the first that begins with two hyphens."""
    return next(name for name in declared.opts if name.startswith("--"))


@cache
def flags() -> dict[str, tuple[str, str]]:
    """Flag and word for its value, by the name of the parameter. A test holds all commands to the same ones."""
    found: dict[str, tuple[str, str]] = {}
    for options in declared_options().values():
        for one in options:
            found.setdefault(one.name, (flag_of(one), one.metavar or ""))
    return found


def in_flags(text: str) -> str:
    """The same text with options in place of arguments; other words in backticks stay."""
    return MENTION.sub(_option, text)


def _option(mention: re.Match[str]) -> str:
    name = mention[1]
    value = mention[2].strip("'\"")
    if name not in flags():
        return mention[0]
    flag, metavar = flags()[name]
    if value == "True":
        return flag
    return f"{flag} {metavar if value == ANY_VALUE else value}".rstrip()
