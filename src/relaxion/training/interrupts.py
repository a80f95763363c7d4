"""Ctrl-C without harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C and a polite kill set a flag, to be looked at between two steps; a second one stops at once."""
    noticed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noticed  # only the main thread may listen to signals
        return
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in wanted}

    def notice(number: int, _frame: Any) -> None:
        noticed.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in wanted:
        signal.signal(number, notice)
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
