"""Writing a memory: relaxers tell each point as it is evaluated, at no force call and in a fraction of a millisecond.

A memory never stops a relaxation: where the disk refuses, one warning says so and nothing more is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from relaxion.database.journal import Beginning, JournalPoint, begin_record, calculator_record, end_record, point_record
from relaxion.database.store import JOURNAL, JOURNAL_SUFFIX, TrajectoryStore

logger = logging.getLogger(__name__)

MEMORY = "memory"  # the kind of relaxations that users make
SECONDS_BETWEEN_SYNCS = 5.0  # a power cut costs no more; a kill costs nothing
_numbers = count()


class Memory:
    """The folder, as one process writes it. `Memory.at(path)` gives all relaxers of a process the same one."""

    def __init__(self, path: str | Path) -> None:
        """FileError where the folder holds something else, or cannot be made."""
        self.store = TrajectoryStore.open_or_create(path, {"made_by": MEMORY})
        self.path = self.store.path
        self._lock = threading.Lock()
        self._forget()

    @classmethod
    def at(cls, path: str | Path) -> Memory:
        place = Path(path).absolute()
        if place not in _MEMORIES:
            _MEMORIES[place] = cls(place)
        return _MEMORIES[place]

    def _forget(self) -> None:
        self._process = os.getpid()
        self._file: int | None = None
        self._size = 0
        self._synced = time.monotonic()
        self._calculators: dict[str, int] = {}
        self._relaxations = count()
        self.working = True  # False: the disk refused

    def begin(self, beginning: Beginning) -> Recording:
        """A relaxation whose points will be told."""
        return Recording(self, beginning)

    def number_of(self, beginning: Beginning) -> tuple[int, list[bytes]]:
        """A new relaxation's number in the journal of this process, and the records that announce it."""
        with self._lock:
            if self._process != os.getpid():  # forked: the file is the parent's
                self._forget()
            text = json.dumps(beginning.calculator, sort_keys=True)
            records = []
            if text not in self._calculators:
                self._calculators[text] = len(self._calculators)
                records.append(calculator_record(self._calculators[text], beginning.calculator))
            number = next(self._relaxations)
            return number, [*records, begin_record(number, self._calculators[text], beginning)]

    def append(self, *records: bytes) -> None:
        """All of them, or none and a warning."""
        with self._lock:
            if not self.working:
                return
            try:
                self._write(b"".join(records))
            except OSError as error:
                self.working = False
                logger.warning(
                    "the memory %s cannot be written (%s): this process stops writing to it; what it holds "
                    "is kept and the relaxation continues",
                    self.path, error.strerror,
                )  # fmt: skip

    def _write(self, content: bytes) -> None:
        if self._file is None:
            name = f"{JOURNAL}{time.time_ns():020d}-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._file = os.open(self.path / f"{name}{JOURNAL_SUFFIX}", flags, 0o666)
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            os.ftruncate(self._file, self._size)  # no half record before those of others
            raise
        self._size += len(content)
        if time.monotonic() - self._synced > SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file)
            self._synced = time.monotonic()


_MEMORIES: dict[Path, Memory] = {}


class Recording:
    """One relaxation on its way into a memory. Points that are not finite are left out: nobody can learn from them."""

    def __init__(self, memory: Memory, beginning: Beginning) -> None:
        self.memory = memory
        self.beginning = beginning
        self._number: int | None = None
        self._process = 0
        self._places: dict[int, int] = {}  # by the caller's number of a point: its number here

    def point(self, number: int, told: JournalPoint) -> None:
        """The caller's point `number`; `told.base` counts as the caller does."""
        if not (np.isfinite(told.energy) and np.isfinite(told.forces).all() and np.isfinite(told.positions).all()):
            return
        records = []
        if self._number is None or self._process != os.getpid():
            self._number, records = self.memory.number_of(self.beginning)
            self._process = os.getpid()
            self._places = {}
        base = self._places.get(told.base, -1)
        self._places[number] = len(self._places)
        own = JournalPoint(base, told.energy, told.positions, told.forces, told.stress, told.cell)
        self.memory.append(*records, point_record(self._number, self.beginning, own))

    def end(self, outcome: int) -> None:
        """How it stands; more points may follow, and another end."""
        if self._number is not None and self._process == os.getpid():
            self.memory.append(end_record(self._number, int(outcome)))


def key_of(start: Mapping[str, Any]) -> str:
    """Of a relaxation: what it began with, as arrays and plain values by name. The same start is the same key."""
    hasher = hashlib.sha256()
    for name in sorted(start):
        value = start[name]
        if isinstance(value, np.ndarray):
            hasher.update(name.encode() + (np.ascontiguousarray(value, dtype=np.float64) + 0.0).tobytes())
        else:
            hasher.update(f"{name} {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    return hasher.hexdigest()[:24]
