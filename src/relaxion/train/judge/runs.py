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
from ase.units import GPa

from relaxion.optimizer.point import Film, Frame, frame_of
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import Answered, CountingCalculator
from relaxion.settings import strain_mask
from relaxion.structures.conversion import forget_symmetry

OnCall = Callable[[int, float, float], None]  # force calls so far, energy eV, fmax eV/Å


@dataclass(frozen=True)
class RelaxationTask:
    """What is the same for all optimizers of one structure."""

    start: Atoms
    potential: Potential
    fmax: float  # eV/Å
    steps: int
    free_cell: bool
    call_limit: int | None = None  # the calculator answers so many force calls; None: no end
    record: bool = False  # keep what a page shows: every reading, and the frames of a film
    pressure_gpa: float = 0.0  # of a free cell
    cell_mask: str = ""  # components of a free cell that may change, some of xx,yy,zz,yz,xz,xy; empty: all


@dataclass(frozen=True)
class Reading:
    """What one force call said; None where it was not finite."""

    call: int
    energy_ev: float | None
    fmax_ev_per_angstrom: float | None
    accepted: bool = True
    method: str = ""
    reason: str = ""  # why that method, in the guard's words
    pressure_volume_ev: float = 0.0

    @property
    def enthalpy_ev(self) -> float | None:
        """What a relaxation minimises; the energy where there is no pressure."""
        return None if self.energy_ev is None else self.energy_ev + self.pressure_volume_ev


@dataclass(frozen=True)
class Run:
    """How one optimizer fared."""

    outcome: str  # a label of relaxion.Outcome with underscores, or "interrupted", or "error"
    force_calls: int
    energy_ev: float | None  # of `final`, as the next; belongs to the forces; None: not evaluated, or not finite
    fmax_ev_per_angstrom: float | None
    wall_time_seconds: float
    policy_used: str | None = None  # of ours: the policy's name, or "classical"
    policy_steps: int = 0  # of ours: made by the policy itself
    fallback_used: int = 0
    reason: str = ""  # of ours: why it stopped before its time, in words
    first_fmax: float | None = None
    error: str | None = None
    final: Atoms | None = None  # what was reached, with its energy and forces; always finite
    readings: tuple[Reading, ...] = ()  # of every force call, where recorded; as the next
    frames: tuple[Frame, ...] = ()
    pressure_gpa: float = 0.0  # of a free cell
    pressure_volume_ev: float = 0.0  # pressure × volume of `final`

    @property
    def enthalpy_ev(self) -> float | None:
        """What a relaxation minimises, and minima are compared by; the energy where there is no pressure."""
        return None if self.energy_ev is None else self.energy_ev + self.pressure_volume_ev

    @property
    def converged(self) -> bool:
        return self.outcome == "converged"


class Stage:
    """The atoms, their counting calculator and the clock of one run."""

    def __init__(self, task: RelaxationTask, on_call: OnCall) -> None:
        self.task = task
        self.counter = CountingCalculator(
            task.potential, stress=task.free_cell, limit=task.call_limit, pressure=task.pressure_gpa * GPa
        )
        self.atoms = task.start.copy()
        self.atoms.calc = self.counter
        self.target = self._target(self.atoms)
        self.fmax_history: list[float] = []
        self._on_call = on_call
        self.readings: list[Reading] = []
        self.film = Film()
        self.counter.on_answer = self._record if task.record else None
        self._began = time.perf_counter()

    def _target(self, atoms: Atoms) -> Atoms | Filter:
        task = self.task
        if not task.free_cell:
            return atoms
        mask: Any = strain_mask(task.cell_mask)
        return FrechetCellFilter(atoms, mask=mask, scalar_pressure=task.pressure_gpa * GPa)

    def watch(self, optimizer: Any) -> None:
        """Follow the optimizer, at no cost in force calls."""
        optimizer.attach(self._look)

    def _look(self) -> None:
        self.fmax_history.append(largest_force(self.target))
        if self.counter.last is not None:
            self._on_call(self.counter.calls, self.counter.last.energy, self.fmax_history[-1])

    def _record(self, point: Answered) -> None:
        energy, fmax = (point.energy, self._reached(point)[1]) if point.finite else (None, None)
        self.readings.append(Reading(self.counter.calls, energy, fmax, pressure_volume_ev=point.pressure_volume))
        before = self.counter.calls - 1
        self.film.add(frame_of(point.atoms, before + 1, before or None))

    def finish(self, outcome: str, *, error: str | None = None, last_stands: bool = True) -> Run:
        """What the calculator has counted, and what was reached: the last point, or the lowest if that does not stand.

        Points and answers as the calculator remembers them: an interrupted or failed call leaves the atoms where
        nobody looked.
        """
        seconds = time.perf_counter() - self._began
        point = self.counter.last if last_stands else self.counter.lowest
        point = point if point is not None and point.finite else None
        final, fmax = (None, None) if point is None else self._reached(point)
        return Run(
            outcome=outcome,
            force_calls=self.counter.calls,
            energy_ev=None if point is None else point.energy,
            fmax_ev_per_angstrom=fmax,
            wall_time_seconds=seconds,
            first_fmax=self.fmax_history[0] if self.fmax_history else None,
            error=error,
            final=final,
            readings=tuple(self.readings),
            frames=tuple(self.film.frames),
            pressure_gpa=self.task.pressure_gpa,
            pressure_volume_ev=0.0 if point is None else point.pressure_volume,
        )

    def _reached(self, point: Answered) -> tuple[Atoms, float]:
        final = self.task.start.copy()
        target = self._target(final)  # now: a cell filter measures from the cell it is given first
        final.set_cell(point.atoms.cell, apply_constraint=False)
        final.positions[:] = point.atoms.positions
        final.calc = SinglePointCalculator(final, **point.answer)
        fmax = largest_force(target)
        forget_symmetry(final)
        return final, fmax


def finite(value: float | None) -> float | None:
    """None for NaN and infinity."""
    return float(value) if value is not None and np.isfinite(value) else None


def largest_force(target: Atoms | Filter) -> float:
    """What ASE compares with fmax: constraints and, with a free cell, its three rows included."""
    rows = np.asarray(target.get_forces()).reshape(-1, 3)
    return float(np.sqrt((rows**2).sum(axis=1).max()))
