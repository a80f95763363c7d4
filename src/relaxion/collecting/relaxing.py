"""Many relaxations at once with one batched potential: a finished one makes room for the next start.

Each has a chain of its own (classical core, or a metric under guard) that moves ASE's coordinates: atoms, and for a
free cell three rows more. The deformation of a free cell stays symmetric, so a structure never turns on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ase import Atoms

from relaxion.collecting.settings import CollectSettings
from relaxion.collecting.starts import Start
from relaxion.collecting.store import Trajectory
from relaxion.optimize.point import Array, Geometry, Point
from relaxion.optimize.stepper import Stepper, propose
from relaxion.potentials.potential import Potential
from relaxion.structures import Evaluation, Outcome, Structures

FIRST_MODULUS, MODULI = 0.6, (0.03, 4.0)  # eV/Å³: 96 GPa; noble gases to diamond
LARGEST_SIZING, LARGEST_CHANGE, SIZED = 0.2, 0.8, 0.01  # of ln V: in a step, in all, and where it is good enough

MakeChain = Callable[[], Stepper]


@dataclass(frozen=True)
class Skipped:
    """A start that gave no trajectory."""

    key: str
    kind: str
    reason: str


@dataclass(frozen=True, eq=False)
class Answer:
    """What the potential said of one structure."""

    energy: float
    forces: Array  # (n_atoms, 3) eV/Å
    stress: Array  # (3, 3) eV/Å³; zero where nobody asked

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.energy) and np.isfinite(self.forces).all() and np.isfinite(self.stress).all())


class Sizing:
    """A crystal whose volume follows its pressure: Newton's method on ln V, the bulk modulus learned on the way."""

    def __init__(self, crystal: Atoms, most_calls: int) -> None:
        self.crystal, self.calls_left = crystal, most_calls
        self.log_volume = 0.0  # relative to the crystal as it was made
        self.modulus = FIRST_MODULUS
        self.last: tuple[float, float] | None = None  # log volume and pressure
        self.done = False

    @property
    def scale(self) -> float:
        return float(np.exp(self.log_volume / 3))

    @property
    def structure(self) -> Structures:
        atoms = self.crystal.copy()
        atoms.set_cell(atoms.cell.array * self.scale, scale_atoms=True)
        return Structures.from_ase(atoms)

    def take(self, answer: Answer) -> None:
        """The stress at the present volume; the next volume, or the last."""
        pressure = -float(np.trace(answer.stress)) / 3  # eV/Å³
        if self.last is not None and abs(self.log_volume - self.last[0]) > 1e-6:
            slope = (self.last[1] - pressure) / (self.log_volume - self.last[0])
            self.modulus = float(np.clip(slope, *MODULI))
        self.last = self.log_volume, pressure
        step = float(np.clip(pressure / self.modulus, -LARGEST_SIZING, LARGEST_SIZING))
        self.log_volume = float(np.clip(self.log_volume + step, -LARGEST_CHANGE, LARGEST_CHANGE))
        self.calls_left -= 1
        self.done = self.calls_left <= 0 or abs(step) < SIZED


class Relaxation:
    """One structure on its way."""

    def __init__(self, start: Start, engine: str, settings: CollectSettings, chain: Stepper) -> None:
        self.start, self.engine, self.settings, self.chain = start, engine, settings.kinds[start.kind], chain
        self.free = start.strain is not None
        self.n_atoms = len(start.atoms)
        self.history: list[tuple[Structures, Answer]] = []
        self.deformation = np.eye(3)
        self.sizing = None if start.crystal is None else Sizing(start.crystal, self.settings.sizing_force_calls)
        self._begin(1.0)
        if self.sizing is not None:
            self.structure = self.sizing.structure

    def _begin(self, scale: float) -> None:
        self.structure = self.first = self.start.structure(scale)
        self.movable = self.first.movable.numpy()

    def take(self, answer: Answer | None) -> Trajectory | Skipped | None:
        """Take in what was found at the present structure (None: the potential failed), and move on; or the end."""
        if answer is None or not answer.finite:
            return self._ended(Outcome.NON_FINITE) if self.history else self._skipped("no answer")
        if self.sizing is not None:
            self.sizing.take(answer)
            self.structure = self.sizing.structure
            if self.sizing.done:
                scale, self.sizing = self.sizing.scale, None
                self._begin(scale)
            return None
        largest = self._largest_force(answer)
        if not self.history and largest > self.settings.largest_force_ev_per_angstrom:
            return self._skipped("too large a force")
        self.history.append((self.structure, answer))
        if largest < self.settings.tolerance_ev_per_angstrom:
            return self._ended(Outcome.CONVERGED)
        if len(self.history) >= self.settings.max_force_calls:
            return self._ended(Outcome.STEP_LIMIT)
        proposal = propose([self.chain], [self._point(answer)])[0]
        self._move_to(proposal.base.coordinates + proposal.step)
        return None

    def _largest_force(self, answer: Answer) -> float:
        """As the package counts it: atoms, and -V·σ/n_atoms where the cell is free."""
        rows = answer.forces[self.movable]
        if self.free:
            rows = np.concatenate([rows, float(self.structure.volumes[0]) * answer.stress / self.n_atoms])
        return float(np.sqrt((rows**2).sum(axis=1).max())) if len(rows) else 0.0

    def _point(self, answer: Answer) -> Point:
        forces = np.where(self.movable[:, None], answer.forces, 0.0)
        free = np.repeat(self.movable[:, None], 3, axis=1)
        positions, cell = self.structure.positions.numpy(), self.structure.cells[0].numpy()
        coordinates: Array = positions
        if self.free:
            inner = np.asarray(np.linalg.solve(self.deformation, positions.T).T, dtype=np.float64)
            coordinates = np.concatenate([inner, self.n_atoms * self.deformation])
            pull = -float(self.structure.volumes[0]) * np.linalg.solve(self.deformation, answer.stress).T / self.n_atoms
            forces = np.concatenate([forces @ self.deformation, (pull + pull.T) / 2])
            free = np.concatenate([free, np.ones((3, 3), dtype=bool)])
        geometry = Geometry(
            positions=positions.copy(),
            cell=cell.copy(),
            periodic=self.structure.periodic[0].numpy(),
            numbers=self.structure.atomic_numbers.numpy(),
            free=free,
            cell_factor=float(self.n_atoms) if self.free else 0.0,
        )
        return Point(coordinates.copy(), forces, answer.energy, geometry)

    def _move_to(self, coordinates: Array) -> None:
        positions, cell = coordinates[: self.n_atoms], self.first.cells[0].numpy()
        if self.free:
            rows = coordinates[self.n_atoms :] / self.n_atoms
            self.deformation = (rows + rows.T) / 2
            positions, cell = positions @ self.deformation, cell @ self.deformation
        self.structure = replace(
            self.structure,
            positions=torch.from_numpy(np.ascontiguousarray(positions)),
            cells=torch.from_numpy(np.ascontiguousarray(cell))[None],
        )

    def _skipped(self, reason: str) -> Skipped:
        return Skipped(self.start.key, self.start.kind, reason)

    def _ended(self, outcome: Outcome) -> Trajectory:
        structures, answers = zip(*self.history, strict=True)
        return Trajectory(
            key=self.start.key,
            kind=self.start.kind,
            engine=self.engine,
            outcome=int(outcome),
            cell_free=self.free,
            numbers=self.first.atomic_numbers,
            pbc=self.first.periodic[0],
            movable=self.first.movable,
            cells=torch.cat([s.cells for s in structures]),
            positions=torch.stack([s.positions for s in structures]),
            energies=torch.tensor([a.energy for a in answers], dtype=torch.float64),
            forces=torch.from_numpy(np.stack([a.forces for a in answers])),
            stresses=torch.from_numpy(np.stack([a.stress for a in answers])),
        )


class Pool:
    """Relaxations under way with one potential."""

    def __init__(
        self,
        potential: Potential,
        engine: str,
        settings: CollectSettings,
        starts: Iterator[Start],
        make_chain: MakeChain,
    ) -> None:
        self.potential, self.engine, self.settings = potential, engine, settings
        self.starts, self.make_chain = starts, make_chain
        self.running: list[Relaxation] = []
        self.waiting: Start | None = next(starts, None)
        self.ended = 0
        self.chain_seconds = self.potential_seconds = 0.0

    @property
    def done(self) -> bool:
        return not self.running and self.waiting is None

    def advance(self) -> list[Trajectory | Skipped]:
        """One force call for each relaxation under way; what ended with it."""
        self._fill()
        began = time.perf_counter()
        answers = evaluated(self.potential, [r.structure for r in self.running])
        between = time.perf_counter()
        results = [relaxation.take(answer) for relaxation, answer in zip(self.running, answers, strict=True)]
        self.running = [r for r, result in zip(self.running, results, strict=True) if result is None]
        self.potential_seconds += between - began
        self.chain_seconds += time.perf_counter() - between
        found = [result for result in results if result is not None]
        self.ended += len(found)
        return found

    def _fill(self) -> None:
        atoms = sum(r.n_atoms for r in self.running)
        while self.waiting is not None and len(self.running) < self.settings.batch_n_structures:
            atoms += len(self.waiting.atoms)
            if self.running and atoms > self.settings.batch_n_atoms:
                break
            self.running.append(Relaxation(self.waiting, self.engine, self.settings, self.make_chain()))
            self.waiting = next(self.starts, None)


def evaluated(potential: Potential, structures: Sequence[Structures]) -> list[Answer | None]:
    """One answer for each structure; None for those where the potential fails, by themselves as well as in company."""
    if not structures:
        return []
    whole = Structures.concatenate(structures)
    wanted = potential.has_stress and bool(whole.periodic.any())
    try:
        return _answers(whole, potential(whole, stresses=wanted))
    except Exception:  # noqa: BLE001 - engines of other packages raise what they like where a calculation fails
        if len(structures) == 1:
            return [None]
        return [answer for one in structures for answer in evaluated(potential, [one])]


def _answers(structures: Structures, evaluation: Evaluation) -> list[Answer | None]:
    stresses = evaluation.stresses
    if stresses is None:
        stresses = torch.zeros((structures.n_structures, 3, 3), dtype=torch.float64)
    forces = evaluation.forces.to(torch.float64).split(structures.counts.tolist())
    energies = evaluation.energies.to(torch.float64).tolist()
    return [
        Answer(energies[k], forces[k].numpy().copy(), stresses[k].to(torch.float64).numpy().copy())
        for k in range(structures.n_structures)
    ]
