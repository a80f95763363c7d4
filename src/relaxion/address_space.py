"""A bound on the memory that reading one file may take, for processes that are our own.

The system's limit holds for the whole process: another thread that allocates while a file is read would meet a
MemoryError. So there is none unless the command line (`bounds`), whose process it is, asks for it.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESS_SPACE_BYTES = 256 << 20  # that reading any file may take
ADDRESS_SPACE_PER_BYTE = 200  # of the file, beside: an Atoms of a short frame has some 10 bytes for each in the file


class _Bounded:
    """Whether there is a bound, how many ask for it at this moment, and what was before."""

    lock = threading.Lock()
    wanted = 0
    depth = 0
    before: tuple[int, int] = (0, 0)


@contextmanager
def bounds() -> Iterator[None]:
    """While it lasts, reading is bounded: for a process in which nobody else allocates."""
    _Bounded.wanted += 1
    try:
        yield
    finally:
        _Bounded.wanted -= 1


@contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Whatever a file declares (a billion atoms, a grid, a gigabyte in a kilobyte of gzip), reading it takes no more
    address space than files of its size need: beyond, there is a MemoryError. Where nobody asked for bounds, or the
    system knows no such limit, there is none. Threads share it for as long as one of them reads."""
    if not _Bounded.wanted:
        yield
        return
    with _Bounded.lock:
        if _Bounded.depth == 0:
            _Bounded.before = resource.getrlimit(resource.RLIMIT_AS)
            _set_limit(_size(path))
        _Bounded.depth += 1
    try:
        yield
    finally:
        with _Bounded.lock:
            _Bounded.depth -= 1
            if _Bounded.depth == 0:
                resource.setrlimit(resource.RLIMIT_AS, _Bounded.before)


def _set_limit(size: int) -> None:
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return
    soft, hard = _Bounded.before
    wanted = now + ADDRESS_SPACE_BYTES + ADDRESS_SPACE_PER_BYTE * size
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))


def _size(path: Path) -> int:
    """Of a file, or of all in a folder."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
