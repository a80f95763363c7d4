"""One relaxation, every evaluated structure of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ase.stress import voigt_6_to_full_3x3_stress
from torch import Tensor

from relaxion.database.journal import Entry
from relaxion.structures import Evaluation, Outcome, Structures


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One relaxation, every evaluated structure of it in order; the last is its end."""

    key: str  # unique: hash of recipe, engine, kind, number
    kind: str  # "prototype", "packing", "surface", "molecule", ...
    engine: str  # "chgnet", "gfn2", "emt", ...
    outcome: int  # structures.Outcome
    cell_free: bool
    numbers: Tensor  # (n_atoms,) int64
    pbc: Tensor  # (3,) bool
    movable: Tensor  # (n_atoms,) bool
    cells: Tensor  # (T, 3, 3) Å
    positions: Tensor  # (T, n_atoms, 3) Å
    energies: Tensor  # (T,) eV
    forces: Tensor  # (T, n_atoms, 3) eV/Å
    stresses: Tensor  # (T, 3, 3) eV/Å³; zero where there is no volume, or nobody asked
    bases: Tensor | None = None  # (T,) int64, the point each step began at, -1 at a start; None: not written down
    calculator: Mapping[str, Any] = field(default_factory=dict)  # settings of the engine, as far as they are known
    policy: str = ""  # who relaxed it, where that is known
    fmax: float = 0.0  # eV/Å, what it was to reach; 0: not written down

    def __len__(self) -> int:
        return len(self.energies)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the calculator; its name alone where no more was written down."""
        return self.calculator or {"name": self.engine}

    @property
    def n_atoms(self) -> int:
        return len(self.numbers)

    @property
    def structures(self) -> Structures:
        """All of its structures, as one object."""
        steps = len(self)
        atoms = self.n_atoms
        return Structures(
            positions=self.positions.reshape(-1, 3),
            cells=self.cells,
            periodic=self.pbc.expand(steps, 3),
            atomic_numbers=self.numbers.repeat(steps),
            structure_index=torch.arange(steps).repeat_interleave(atoms),
            movable=self.movable.repeat(steps),
            cell_free=torch.full((steps,), self.cell_free),
        )

    @property
    def evaluation(self) -> Evaluation:
        """What the potential said of them."""
        return Evaluation(self.energies, self.forces.reshape(-1, 3), self.stresses)


def trajectory_of(entry: Entry) -> Trajectory:
    """A relaxation of a journal that has at least one point."""
    beginning = entry.beginning
    points = entry.points
    cells = [beginning.cell if point.cell is None else point.cell for point in points]
    stresses = [voigt_6_to_full_3x3_stress(np.zeros(6) if p.stress is None else p.stress) for p in points]
    return Trajectory(
        key=beginning.key,
        kind=beginning.kind,
        engine=str(beginning.calculator.get("name", "unknown")),
        outcome=_outcome(entry),
        cell_free=beginning.cell_free,
        numbers=torch.from_numpy(beginning.numbers),
        pbc=torch.from_numpy(beginning.pbc),
        movable=torch.from_numpy(beginning.movable),
        cells=_stacked(cells),
        positions=_stacked([point.positions for point in points]),
        energies=torch.tensor([point.energy for point in points], dtype=torch.float64),
        forces=_stacked([point.forces for point in points]),
        stresses=_stacked(stresses),
        bases=torch.tensor([point.base for point in points]),
        calculator=beginning.calculator,
        policy=beginning.policy,
        fmax=beginning.fmax,
    )


def _outcome(entry: Entry) -> int:
    """As told; whoever drives a relaxer step by step tells no end, but its last forces do."""
    beginning = entry.beginning
    forces = entry.points[-1].forces
    if entry.outcome != Outcome.RUNNING or beginning.cell_free or not beginning.movable.any():
        return entry.outcome
    largest = np.linalg.norm(forces[beginning.movable], axis=1).max()
    return int(Outcome.CONVERGED if largest < beginning.fmax else Outcome.RUNNING)


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays))
