"""Relaxations of a collection: starts brought to their volume, relaxed in batches, every evaluated structure kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.database.trajectory import Trajectory
from relaxion.optimizer.batch_relaxation import TOO_LARGE_A_FORCE, Relaxed, Visit
from relaxion.optimizer.step import Stepper
from relaxion.potentials.base import Potential
from relaxion.structures import Outcome, Structures
from relaxion.train.collecting.starts import CollectSettings, Start

FIRST_MODULUS, MODULI = 0.6, (0.03, 4.0)  # eV/Å³: 96 GPa; noble gases to diamond
LARGEST_SIZING, LARGEST_CHANGE, SIZED = 0.2, 0.8, 0.01  # of ln V: in a step, in all, and where it is good enough
PREPARED = 8  # starts brought to their volume side by side; a collection that is asked to stop waits for them
BATCH_N_ATOMS = 256  # under way at once, unless a single structure has more: memory and caches
NO_ANSWER = "no answer"
BATCH = BatchSettings(record=True, stresses=True)

MakeStepper = Callable[[], Stepper]


@dataclass(frozen=True)
class Skipped:
    """A start that gave no trajectory."""

    key: str
    kind: str
    reason: str

    @property
    def words(self) -> str:
        """As the database keeps it."""
        return f"{self.reason} ({self.kind})"


class Sizing:
    """A crystal whose volume follows its pressure: Newton's method on ln V, the bulk modulus learned on the way."""

    def __init__(self, crystal: Atoms, most_calls: int) -> None:
        self.crystal, self.calls_left = crystal, most_calls
        self.log_volume = 0.0  # relative to the crystal as it was made
        self.modulus = FIRST_MODULUS
        self.last: tuple[float, float] | None = None  # log volume and pressure
        self.done = self.failed = False

    @property
    def scale(self) -> float:
        return float(np.exp(self.log_volume / 3))

    @property
    def structure(self) -> Structures:
        atoms = self.crystal.copy()
        atoms.set_cell(atoms.cell.array * self.scale, scale_atoms=True)
        return Structures.from_ase(atoms)

    def take(self, pressure: float | None) -> None:
        """The pressure (eV/Å³) at the present volume, None where the potential failed; the next volume, or the last."""
        if pressure is None or not np.isfinite(pressure):
            self.done = self.failed = True
            return
        if self.last is not None and abs(self.log_volume - self.last[0]) > 1e-6:
            slope = (self.last[1] - pressure) / (self.log_volume - self.last[0])
            self.modulus = float(np.clip(slope, *MODULI))
        self.last = self.log_volume, pressure
        step = float(np.clip(pressure / self.modulus, -LARGEST_SIZING, LARGEST_SIZING))
        self.log_volume = float(np.clip(self.log_volume + step, -LARGEST_CHANGE, LARGEST_CHANGE))
        self.calls_left -= 1
        self.done = self.calls_left <= 0 or abs(step) < SIZED


def bring_to_volume(potential: Potential, sizings: Sequence[Sizing]) -> None:
    """All of them, side by side."""
    while under_way := [sizing for sizing in sizings if not sizing.done]:
        for sizing, pressure in zip(under_way, pressures(potential, [s.structure for s in under_way]), strict=True):
            sizing.take(pressure)


def pressures(potential: Potential, structures: Sequence[Structures]) -> list[float | None]:
    """eV/Å³; None for those where the potential fails, by themselves as well as in company."""
    try:
        stresses = potential(Structures.concatenate(structures), stresses=True).stresses
        assert stresses is not None
        return (-stresses.double().diagonal(dim1=1, dim2=2).sum(dim=1) / 3).tolist()
    except Exception:  # noqa: BLE001 - engines of other packages raise what they like where a calculation fails
        if len(structures) == 1:
            return [None]
        return [pressure for one in structures for pressure in pressures(potential, [one])]


class Pool:
    """Relaxations under way with one potential: a finished one makes room for the next start."""

    def __init__(
        self,
        potential: Potential,
        engine: str,
        settings: CollectSettings,
        starts: Iterator[Start],
        make_stepper: MakeStepper,
    ) -> None:
        self.potential, self.engine, self.settings = potential, engine, settings
        self.relaxer = BatchRelaxer(potential, BATCH, lambda _: ("", make_stepper()))
        self._starts, self._ready = starts, deque[tuple[Start, Structures]]()
        self._running: dict[str, tuple[Start, Structures]] = {}
        self._skipped: list[Skipped] = []
        self.ended = 0
        self._prepare()

    @property
    def done(self) -> bool:
        return not self._running and not self._ready and not self._skipped

    def advance(self) -> list[Trajectory | Skipped]:
        """One force call for each relaxation under way; what ended with it."""
        self._fill()
        found: list[Trajectory | Skipped] = [*self._skipped]
        found += [self._result(*self._running.pop(ended.tag), ended) for ended in self.relaxer.advance()]
        self._skipped = []
        self.ended += len(found)
        return found

    def _fill(self) -> None:
        atoms = sum(structure.n_atoms for _, structure in self._running.values())
        while self._ready and len(self._running) < self.settings.batch_n_structures:
            start, structure = self._ready[0]
            atoms += structure.n_atoms
            if self._running and atoms > BATCH_N_ATOMS:
                break
            self._ready.popleft()
            own = self.settings.kinds[start.kind]
            settings = replace(
                BATCH,
                fmax=own.tolerance_ev_per_angstrom,
                cell=start.strain is not None,
                max_force_calls=own.max_force_calls,
                largest_first_force=own.largest_force_ev_per_angstrom,
            )
            self._running[start.key] = start, structure
            self.relaxer.add(structure.to_ase()[0], start.key, settings=settings)
            if not self._ready:
                self._prepare()

    def _prepare(self) -> None:
        """The next starts, each at the volume where its crystal has no pressure."""
        starts = list(islice(self._starts, PREPARED))
        calls = [self.settings.kinds[start.kind].sizing_force_calls for start in starts]
        sizings = {s.key: Sizing(s.crystal, n) for s, n in zip(starts, calls, strict=True) if s.crystal is not None}
        bring_to_volume(self.potential, list(sizings.values()))
        for start in starts:
            sizing = sizings.get(start.key)
            if sizing is not None and sizing.failed:
                self._skipped.append(Skipped(start.key, start.kind, NO_ANSWER))
            else:
                self._ready.append((start, start.structure(1.0 if sizing is None else sizing.scale)))

    def _result(self, start: Start, structure: Structures, ended: Relaxed) -> Trajectory | Skipped:
        visited = [visit for visit in ended.visited if _is_finite(visit)]
        if ended.error == TOO_LARGE_A_FORCE or not visited:
            return Skipped(start.key, start.kind, TOO_LARGE_A_FORCE if visited else NO_ANSWER)
        outcome = Outcome.NON_FINITE if ended.error is not None else ended.outcome
        rows = [_as_visited(visit) for visit in visited]
        cells, positions, forces, stresses = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        found = Trajectory(
            key=start.key,
            kind=start.kind,
            engine=self.engine,
            outcome=int(outcome),
            cell_free=start.strain is not None,
            numbers=structure.atomic_numbers,
            pbc=structure.periodic[0],
            movable=structure.movable,
            cells=cells,
            positions=positions,
            energies=torch.tensor([visit.answer.energy for visit in visited], dtype=torch.float64),
            forces=forces,
            stresses=stresses,
        )
        return found.unturned()


def _as_visited(visit: Visit) -> tuple[np.ndarray, ...]:
    """Cell, positions, forces and stress of one force call."""
    geometry, answer = visit.point.geometry, visit.answer
    assert geometry is not None  # of plain atoms, and of the cell filter that the batch makes
    stress = np.zeros(6) if answer.stress is None else answer.stress
    return geometry.cell, geometry.positions, answer.forces, voigt_6_to_full_3x3_stress(stress)


def _is_finite(visit: Visit) -> bool:
    answer = visit.answer
    told = (answer.energy, answer.forces, 0.0 if answer.stress is None else answer.stress)
    return all(bool(np.isfinite(value).all()) for value in told)
