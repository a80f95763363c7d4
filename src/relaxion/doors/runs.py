"""One optimizer, one structure, one potential: run it and say how it went, the same way for everybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import Filter, FrechetCellFilter

from relaxion.doors.counting import CountingCalculator
from relaxion.physics.potential import Potential

OnCall = Callable[[int, float, float], None]  # force calls so far, energy eV, fmax eV/Å
STALE_INFO = ("spacegroup", "unit_cell", "occupancy")  # what ASE's CIF reader adds; no longer true once relaxed


@dataclass(frozen=True)
class Task:
    """What is the same for all optimizers of one structure."""

    start: Atoms
    potential: Potential
    fmax: float  # eV/Å
    steps: int
    free_cell: bool


@dataclass(frozen=True)
class Run:
    """How one optimizer fared."""

    outcome: str  # a label of relaxion.Outcome with underscores, or "interrupted", or "error"
    force_calls: int
    energy_ev: float | None  # None: not evaluated, or not finite
    fmax_ev_per_angstrom: float | None
    wall_time_seconds: float
    fallback_used: int = 0
    first_fmax: float | None = None
    error: str | None = None
    final: Atoms | None = None  # the last structure evaluated, with its energy and forces

    @property
    def converged(self) -> bool:
        return self.outcome == "converged"


class Stage:
    """The atoms, their counting calculator and the clock of one run."""

    def __init__(self, task: Task, on_call: OnCall) -> None:
        self.task = task
        self.counter = CountingCalculator(task.potential, stress=task.free_cell)
        self.atoms = task.start.copy()
        self.atoms.calc = self.counter
        self.target: Atoms | Filter = FrechetCellFilter(self.atoms) if task.free_cell else self.atoms
        self.fmax_history: list[float] = []
        self._on_call = on_call
        self._began = time.perf_counter()

    def watch(self, optimizer: Any) -> None:
        """Follow the optimizer, at no cost in force calls."""
        optimizer.attach(self._look)

    def _look(self) -> None:
        self.fmax_history.append(largest_force(self.target))
        self._on_call(self.counter.calls, self.counter.last_answer["energy"], self.fmax_history[-1])

    def finish(self, outcome: str, *, fallback_used: int = 0, error: str | None = None) -> Run:
        """What the calculator has counted, and where the atoms are."""
        seconds = time.perf_counter() - self._began
        fmax = self._last_fmax()
        return Run(
            outcome=outcome,
            force_calls=self.counter.calls,
            energy_ev=_finite(self.counter.last_answer.get("energy")),
            fmax_ev_per_angstrom=_finite(fmax),
            wall_time_seconds=seconds,
            fallback_used=fallback_used,
            first_fmax=self.fmax_history[0] if self.fmax_history else None,
            error=error,
            final=self._final(),
        )

    def _last_fmax(self) -> float | None:
        """A line search may end between two looks; where the answer is at hand, read it there."""
        if self.counter.results and not self.counter.check_state(self.atoms):
            return largest_force(self.target)
        return self.fmax_history[-1] if self.fmax_history else None

    def _final(self) -> Atoms | None:
        """Positions of the last answer; an interrupted or failed call leaves the atoms where nobody looked."""
        evaluated = self.counter.last_evaluated
        if evaluated is None:
            return None
        final = self.task.start.copy()
        final.set_cell(evaluated.cell)
        final.positions[:] = evaluated.positions
        for key in STALE_INFO:
            final.info.pop(key, None)
        final.arrays.pop("spacegroup_kinds", None)
        final.calc = SinglePointCalculator(final, **self.counter.last_answer)
        return final


def largest_force(target: Atoms | Filter) -> float:
    """What ASE compares with fmax: constraints and, with a free cell, its three rows included."""
    rows = np.asarray(target.get_forces()).reshape(-1, 3)
    return float(np.sqrt((rows**2).sum(axis=1).max()))


def _finite(number: float | None) -> float | None:
    return number if number is not None and np.isfinite(number) else None
