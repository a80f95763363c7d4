"""Races asked for by the live page: a few at a time, each in a process of its own that can be ended."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from relaxion.bundles import known_policies
from relaxion.errors import RelaxionError, SettingsError
from relaxion.potentials.registry import known_potentials

LARGEST_UPLOAD = 2_000_000  # bytes of the request; a thousand atoms are about 80 kB
MOST_ATOMS = 2000
AT_ONCE = 2  # races
KEPT = 6  # results of races that are over
SECONDS = 120.0  # of one race, all three together
LARGEST_ANSWER = 8 << 20  # bytes of a line: pages have below 1 MB
OTHERS = ("BFGS", "FIRE")


class TooMany(RelaxionError):
    """All places are taken."""


@dataclass(frozen=True)
class RaceRequest:
    """What the browser asked for, checked; the name of the file is shown and used for nothing else."""

    name: str
    text: str
    calculator: str
    policy: str
    free_cell: bool
    fmax: float  # eV/Å


def read_request(body: bytes, choices: Mapping[str, Any]) -> RaceRequest:
    """Refuse, with a sentence, whatever the page's own form would not send."""
    try:
        plain = json.loads(body)
        words = {name: str(plain[name]) for name in ("name", "text", "calculator", "policy")}
        request = RaceRequest(**words, free_cell=plain["free_cell"] is True, fmax=float(plain["fmax"]))
        request = replace(request, name=shown_name(request.name))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingsError(f"a race needs name, text, calculator, policy, free_cell and fmax ({error!r})") from error
    offered = {"calculator": [one["name"] for one in choices["calculators"]], "policy": choices["policies"]}
    for what, names in offered.items():
        if words[what] not in names:
            raise SettingsError(f"that {what} is not one of those offered; choose one from the list")
    if not (math.isfinite(request.fmax) and 0.001 <= request.fmax <= 1.0):
        raise SettingsError(f"fmax is a force from 0.001 to 1 eV/Å, got {request.fmax:g}; try 0.05")
    if not request.text.strip():
        raise SettingsError("the file is empty; give a POSCAR, CIF or XYZ")
    return request


def shown_name(name: str) -> str:
    """The last piece of whatever path a browser sends, without what cannot be seen."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    seen = "".join(letter for letter in last if letter.isprintable()).strip()
    return seen[:80] if seen.strip(".") else "structure"


@dataclass
class Race:
    """One race, running or over."""

    number: int
    began: float = field(default_factory=time.monotonic)
    calls: dict[str, int] = field(default_factory=dict)
    outcome: dict[str, Any] | None = None  # {"page": …} or {"error": …}; None: still running

    def as_json(self) -> str:
        state = "running" if self.outcome is None else "failed" if "error" in self.outcome else "done"
        seconds = round(time.monotonic() - self.began, 1)
        return json.dumps({"state": state, "calls": self.calls, "seconds": seconds, **(self.outcome or {})})


class Races:
    """Those that run and those that are remembered."""

    def __init__(self, seconds: float = SECONDS, at_once: int = AT_ONCE) -> None:
        self.seconds, self.at_once = seconds, at_once
        self._races: dict[int, Race] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last = 0
        self._choices: dict[str, Any] | None = None

    def choices(self) -> dict[str, Any]:
        """Calculators that are installed and need no file, policies by name; looked up once."""
        if self._choices is None:
            ready = [one for one in known_potentials() if one.available and one.spec.isidentifier()]
            names = [one.name for one in known_policies() if one.bundle is not None]
            self._choices = {
                "calculators": [{"name": one.spec, "description": one.description} for one in ready],
                "policies": ["auto", "none", *names],
                "most_bytes": LARGEST_UPLOAD,
                "most_atoms": MOST_ATOMS,
                "seconds": self.seconds,
                "racers": ["Relaxion", *OTHERS],
            }
        return self._choices

    async def begin(self, request: RaceRequest) -> int:
        running = [race for race in self._races.values() if race.outcome is None]
        if len(running) >= self.at_once:
            raise TooMany(f"{len(running)} races are running; wait until one is over")
        self._last += 1
        race = self._races[self._last] = Race(self._last)
        self._tasks[race.number] = asyncio.create_task(self._run(race, request))
        self._forget()
        return race.number

    def state(self, number: int) -> str | None:
        race = self._races.get(number)
        return None if race is None else race.as_json()

    def _forget(self) -> None:
        over = [number for number, race in self._races.items() if race.outcome is not None]
        for number in over[: max(0, len(over) - KEPT)]:
            del self._races[number]
            self._tasks.pop(number, None)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, race: Race, request: RaceRequest) -> None:
        with tempfile.TemporaryDirectory(prefix="relaxion-race-") as folder:
            process = await _started(Path(folder), self.seconds)
            try:
                race.outcome = await asyncio.wait_for(_followed(process, race, request), self.seconds)
            except TimeoutError:
                advice = "race a smaller structure or a quicker calculator, or use 'relaxion race'"
                race.outcome = {"error": f"the race took longer than {self.seconds:.0f} s and was ended; {advice}"}
            finally:
                race.outcome = race.outcome or {"error": "the race was ended"}
                await _ended(process)


async def _started(folder: Path, seconds: float) -> asyncio.subprocess.Process:
    """In an empty folder, which is not on its path: nothing lies there to be imported or read."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "relaxion.web.live_race_worker", f"{seconds:g}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        cwd=folder, env=environment, limit=LARGEST_ANSWER,
    )  # fmt: skip


async def _followed(process: asyncio.subprocess.Process, race: Race, request: RaceRequest) -> dict[str, Any]:
    """Until it says how it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    process.stdin.close()
    while line := await process.stdout.readline():
        said = json.loads(line)
        if "calls" not in said:
            return said
        race.calls |= said["calls"]
    return {"error": "the race ended without a result: its process died, perhaps out of memory"}


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
