"""Ctrl-C, and the SIGTERM by which batch systems end a job, as one thing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Within it both signals raise KeyboardInterrupt, except while they are held; `exit_code` tells them apart."""

    def __init__(self) -> None:
        self.exit_code = 128 + signal.SIGINT  # as shells count: 130, or 143 after SIGTERM
        self.noticed = False  # one came while they were held
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may listen to signals
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and the like stay in force
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.exit_code = 128 + number
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
