"""The corpus of `benchmarks/faults/hostile_files.py`, thinned: its seeds are made once."""

from __future__ import annotations

import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults"
ROOM = 6 << 30  # bytes of address space beyond what is there; a mistake must not end the machine


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Runs cases by their number."""
    sys.path.insert(0, str(FAULTS))
    from hostile_doors import World
    from hostile_files import Runner

    folder = tmp_path_factory.mktemp("hostile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        World(folder / "seeds").make()
        runner = Runner(folder)
    yield runner
    sys.path.remove(str(FAULTS))


@pytest.fixture
def bounded() -> Iterator[None]:
    """No test here takes all memory or for ever, whatever is wrong."""

    def too_long(*_: object) -> None:
        raise TimeoutError("a case took too long")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    handler = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)
