"""The end of a calculator: another program, a socket or a library may be alive behind it."""

from __future__ import annotations

import logging
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

logger = logging.getLogger(__name__)

SECONDS_TO_END = 10.0  # that a program has after its socket was closed; then it is asked to end, and then made to


def close_calculator(calculator: Any) -> None:
    """As the calculator's own `close` or `with` would; what goes wrong here is said, and never hides a result."""
    close = getattr(calculator, "close", None)
    leave = getattr(calculator, "__exit__", None)
    process = getattr(getattr(calculator, "server", None), "proc", None)  # of ASE's socket calculators
    if not callable(close) and not callable(leave):
        return
    try:
        with _ended_in_time(process), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # codes end with one of their own when their socket is closed
            close() if callable(close) else leave(None, None, None)  # pyright: ignore[reportOptionalCall]
    except Exception as error:  # noqa: BLE001 - calculators of other packages may raise anything
        logger.warning("%s could not be closed: %s: %s", type(calculator).__name__, type(error).__name__, error)


@contextmanager
def _ended_in_time(process: Any) -> Iterator[None]:
    """A program in the middle of a calculation does not look at its socket, and ASE would wait for it."""
    if not isinstance(process, subprocess.Popen):
        yield
        return
    steps = [Timer(SECONDS_TO_END, process.terminate), Timer(1.5 * SECONDS_TO_END, process.kill)]
    for step in steps:
        step.daemon = True
        step.start()
    try:
        yield
    finally:
        for step in steps:
            step.cancel()
