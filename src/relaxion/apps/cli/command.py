"""What all commands have in common: how they are registered with typer, begin and end.

Loads neither torch nor ASE: a command loads what it needs when it runs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import cleandoc
from types import FrameType
from typing import Any, Self

import typer
from typer.core import TyperCommand

from relaxion.apps.cli.options import trainable
from relaxion.errors import PolicyError, RelaxionError, SettingsError, UnknownPotentialError

# exit codes; 130 or 143 where a signal ended it: Interrupts
DONE = 0
ERROR = 1
USAGE = 2
INCOMPLETE = 3  # not all converged, or not all is there
RELAXING = (SettingsError, UnknownPotentialError, PolicyError)  # wrong --calc and --policy are wrong usage
UNITS = "[bold]Units[/bold]: lengths Å, energies eV, forces eV/Å, stresses eV/Å³, times s."
THREADS = "OMP_NUM_THREADS"

app = typer.Typer(
    name="relaxion",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Plain(TyperCommand):
    """A command whose --help shows no <bool>."""

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)
        if found is not None:
            found.metavar = ""
        return found


def command(
    *,
    usage: tuple[type[Exception], ...] = (SettingsError,),
    interrupted: str = "interrupted",
    one_thread: bool = True,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function with typer; what it returns is the exit code.

    usage: errors that end with exit code 2.
    interrupted: said where Ctrl-C or SIGTERM found nothing to save.
    one_thread: unless OMP_NUM_THREADS says otherwise; `doctor` shows what scripts would get.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def run(**options: Any) -> None:
            if one_thread:
                use_one_thread()
            raise typer.Exit(_exit_code(lambda: function(**options), usage, interrupted))

        words, epilog = help_of(function)
        app.command(function.__name__.replace("_", "-"), cls=Plain, help=words, epilog=epilog)(run)
        return function

    return register


def help_of(function: Callable[..., int]) -> tuple[str, str]:
    """The first line of a docstring; what stands below it as examples, units and exit codes."""
    first, _, below = cleandoc(function.__doc__ or "").partition("\n\n")
    parts = ["[bold]Examples[/bold]", *re.findall(r"^relaxion .*", below, re.MULTILINE)]
    if "Units." in below:
        parts.append(UNITS)
    if {"recipe", "agent"} <= set(function.__annotations__):  # recipes with a task, as `train` and `tune` take them
        parts.append(f"[bold]Recipes[/bold]: {', '.join(trainable())}")
    codes = re.search(r"Exit codes(: .*)", below, re.DOTALL)
    if codes:
        parts.append(f"[bold]Exit codes[/bold]{codes[1]}")
    return first, "\n\n".join(["", *parts, ""])


def use_one_thread() -> None:
    """One thread for NumPy, torch and whatever this process starts, unless the user has said otherwise.

    On small structures and networks more threads gain nothing, and lose much where processes share the cores.
    """
    if THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    if "torch" in sys.modules:  # it has read the variable already
        sys.modules["torch"].set_num_threads(1)


def _exit_code(work: Callable[[], int], usage: tuple[type[Exception], ...], interrupted: str) -> int:
    """Do it, and say in one sentence what went wrong."""
    from relaxion.apps.cli.progress import say  # rich draws a random number when it is loaded

    with interrupts:
        try:
            return work()
        except usage as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
        except KeyboardInterrupt:
            if interrupted:
                say(f"relaxion: {interrupted}")
            return interrupts.exit_code


@contextmanager
def as_usage(*kinds: type[RelaxionError]) -> Iterator[None]:
    """These errors are the user's here: what was asked for does not exist or cannot be read."""
    try:
        yield
    except kinds as error:
        raise SettingsError(str(error)) from error


class Interrupts:
    """Ctrl-C, and the SIGTERM by which batch systems end a job, as one thing.

    Within it both signals raise KeyboardInterrupt, except while they are held; `exit_code` tells them apart.
    """

    def __init__(self) -> None:
        self.noticed = False  # one came while they were held
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}
        self._first: int = signal.SIGINT
        self._pipe: tuple[int, int] | None = None  # to read from, to write into

    def __enter__(self) -> Self:
        self.__init__()
        if threading.current_thread() is not threading.main_thread():  # no other may listen to signals
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and the like stay in force
                self._before[number] = signal.signal(number, self._receive)
        # whoever listens inside, as a training run does, takes our place; into this pipe every signal is written
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._pipe_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._pipe_before)
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    @property
    def exit_code(self) -> int:
        """Of the signal that came first, as shells count: 130, or 143 after SIGTERM."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                came = [number for number in os.read(self._pipe[0], 4096) if number in self._before]
                self._first = came[0] if came else self._first
        return 128 + self._first

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._holding and not self.noticed:
            self.noticed = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """While results are written: the first one is only noticed, a second one stops at once."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False


interrupts = Interrupts()  # signals belong to the process, so there is one
