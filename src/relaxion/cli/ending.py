"""How every command ends: exit codes, errors as one sentence, Ctrl-C and SIGTERM. One rule for all of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, Self

from relaxion.cli.early import answered_early, check_early
from relaxion.cli.options import Command
from relaxion.cli.progress import say
from relaxion.errors import RelaxionError, SettingsError

DONE, ERROR, USAGE, INCOMPLETE = 0, 1, 2, 3  # 3: not all converged, or not all is there; and 130 or 143: Interrupts


def exit_code(command: Command, request: Any) -> int:
    """Load the command, run it, and say in one sentence what went wrong."""
    with Interrupts() as interrupts:
        try:
            check_early(request)
            if answered_early(request):
                return DONE
            function = getattr(import_module(f"relaxion.cli.{command.module}"), command.function)
            return function(request, interrupts)
        except command.usage as error:
            say(f"relaxion: {error}")
            return USAGE
        except (RelaxionError, OSError) as error:
            say(f"relaxion: {error}")
            return ERROR
        except KeyboardInterrupt:
            if command.interrupted:
                say(f"relaxion: {command.interrupted}")
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

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():  # no other may listen to signals
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and the like stay in force
                self._before[number] = signal.signal(number, self._receive)
        # whoever listens inside, as a training run does, takes our place; into this pipe every signal is written
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._pipe_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if hasattr(self, "_reading"):
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._reading)
            os.close(self._writing)

    @property
    def exit_code(self) -> int:
        """Of the signal that came first, as shells count: 130, or 143 after SIGTERM."""
        if hasattr(self, "_reading"):
            with suppress(BlockingIOError):
                came = [number for number in os.read(self._reading, 4096) if number in self._before]
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
