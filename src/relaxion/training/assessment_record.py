"""assessment.json: what the newest assessment found, start by start, with films of the ten it found hardest."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from ase.symbols import Symbols

from relaxion.errors import FileError, RelaxionWarning
from relaxion.training.run_folder import write_text

FORMAT, FORMAT_VERSION = "relaxion-assessment", 1
WORST = 10  # films: those that needed most force calls
MOST_SHOTS = 64  # of one film; then every second goes
MOST_NUMBERS = 600_000  # coordinates of all films, about 3 MB as text; larger structures get fewer shots
MILLI = 1000  # units of stored positions per Å


class AssessmentStopped(Exception):
    """Somebody asked it to stop before it was done."""


@dataclass(frozen=True, eq=False)
class Shot:
    """One force call."""

    call: int  # from 1
    positions: np.ndarray  # (n_atoms, 3) Å
    cell: np.ndarray  # (3, 3) Å, rows are lattice vectors
    energy_ev: float
    fmax_ev_per_angstrom: float


class Footage:
    """Shots of one relaxation, first and newest always; thinned out by halves, so that none fills the memory."""

    def __init__(self, most: int = MOST_SHOTS) -> None:
        self.shots: list[Shot] = []
        self._most, self._every = most, 1

    def add(self, shot: Shot) -> None:
        if len(self.shots) > 1 and (self.shots[-1].call - 1) % self._every:
            self.shots.pop()
        self.shots.append(shot)
        while len(self.shots) > self._most:
            self._every *= 2
            *earlier, newest = self.shots
            self.shots = [*(kept for kept in earlier if (kept.call - 1) % self._every == 0), newest]


@dataclass(frozen=True, eq=False)
class Relaxed:
    """How the policy fared from one start."""

    label: str  # the kind of start; empty where there is only one
    numbers: np.ndarray  # (n_atoms,) atomic numbers
    periodic: bool  # along any axis
    outcome: str  # a label of `Outcome` with underscores
    force_calls: int  # the cap where it did not converge
    energy_ev: float | None  # where it converged
    shots: Sequence[Shot]


@dataclass(frozen=True, eq=False)
class RelaxationRecord:
    """All starts of one assessment, in the order of the baselines."""

    fmax_ev_per_angstrom: float
    cap: int  # force calls charged for a failure
    relaxed: Sequence[Relaxed]

    def as_plain(self) -> dict[str, Any]:
        return {
            "fmax_ev_per_angstrom": self.fmax_ev_per_angstrom,
            "cap": self.cap,
            "structures": {
                "label": [one.label for one in self.relaxed],
                "formula": [Symbols(one.numbers).formula.format("metal") for one in self.relaxed],
                "n_atoms": [len(one.numbers) for one in self.relaxed],
                "outcome": [one.outcome for one in self.relaxed],
                "force_calls": [one.force_calls for one in self.relaxed],
                "energy_ev": [_finite(one.energy_ev) for one in self.relaxed],
            },
            "worst": self._films(),
        }

    def worst(self) -> list[int]:
        """Places of those with most force calls; what did not converge stands before what took as long."""
        key = [(one.force_calls, one.outcome != "converged") for one in self.relaxed]
        return sorted(range(len(key)), key=lambda place: key[place], reverse=True)[:WORST]

    def _films(self) -> list[dict[str, Any]]:
        room = MOST_NUMBERS // WORST
        return [{"place": place, **_film(self.relaxed[place], room)} for place in self.worst()]


@dataclass(frozen=True, eq=False)
class ReturnsRecord:
    """Episodes of an agent for vectors."""

    returns: Sequence[float]  # undiscounted
    lengths: Sequence[int] = field(default_factory=tuple)

    def as_plain(self) -> dict[str, Any]:
        return {"returns": [_finite(value) for value in self.returns], "lengths": list(self.lengths)}


@runtime_checkable
class Recorded(Protocol):
    """An assessment that can be written down start by start."""

    @property
    def record(self) -> RelaxationRecord | ReturnsRecord | None: ...


def leave_record(path: Path, assessed: object, step: int) -> None:
    """Replace what the assessment before has left; whatever is wrong with it, the run is good."""
    record = assessed.record if isinstance(assessed, Recorded) else None
    if record is None:
        return
    plain = {"format": FORMAT, "version": FORMAT_VERSION, "step": step, "command": _command()} | record.as_plain()
    try:
        write_text(path, json.dumps(plain, allow_nan=False, separators=(",", ":")) + "\n")
    except FileError as error:
        warnings.warn(f"the assessment was not written down: {error}", RelaxionWarning, stacklevel=2)


def _film(relaxed: Relaxed, room: int) -> dict[str, Any]:
    """Whole thousandths of an Å; first and last shot at least."""
    fits = max(2, room // max(1, 3 * len(relaxed.numbers)))
    every = sorted({round(place) for place in np.linspace(0, len(relaxed.shots) - 1, min(fits, len(relaxed.shots)))})
    shots = [relaxed.shots[place] for place in every]
    cells = [[round(float(value), 4) for value in shot.cell.ravel()] for shot in shots]
    return {
        "numbers": relaxed.numbers.tolist(),
        "periodic": relaxed.periodic,
        "call": [shot.call for shot in shots],
        "energy_ev": [_finite(shot.energy_ev) for shot in shots],
        "fmax_ev_per_angstrom": [_finite(shot.fmax_ev_per_angstrom) for shot in shots],
        "positions_milliangstrom": [
            np.rint(shot.positions * MILLI).astype(np.int64).ravel().tolist() for shot in shots
        ],
        "cells_angstrom": cells if any(cell != cells[0] for cell in cells) else cells[:1],
    }


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def _command() -> str:
    """As it was typed; of a script or a test, its name."""
    program, *rest = sys.argv or [""]
    return shlex.join([Path(program).name, *rest])
