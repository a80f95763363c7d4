"""One relaxation, every evaluated structure of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from ase.symbols import Symbols
from scipy.linalg import polar
from torch import Tensor

from relaxion.structures import Evaluation, Outcome, Structures


@dataclass(frozen=True, eq=False)
class RelaxationStart:
    """A relaxation before its first point."""

    key: str
    kind: str
    calculator: Mapping[str, Any]  # name and settings
    fmax: float  # eV/Å
    cell_free: bool
    numbers: np.ndarray  # (n_atoms,)
    pbc: np.ndarray  # (3,)
    movable: np.ndarray  # (n_atoms,)
    cell: np.ndarray  # (3, 3) Å
    policy: str = ""


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
    def formula(self) -> str:
        """Of the whole cell."""
        return Symbols(self.numbers.numpy()).get_chemical_formula()

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

    @property
    def start(self) -> RelaxationStart:
        """What was known before its first point."""
        return RelaxationStart(
            key=self.key,
            kind=self.kind,
            calculator={**self.calculator, "name": self.engine},
            fmax=self.fmax,
            cell_free=self.cell_free,
            numbers=self.numbers.numpy(),
            pbc=self.pbc.numpy(),
            movable=self.movable.numpy(),
            cell=self.cells[0].numpy(),
            policy=self.policy,
        )

    def unturned(self) -> Trajectory:
        """Turned so that every cell is the first one under a symmetric deformation; forces and stresses turn along."""
        if not self.cell_free:
            return self
        first = self.cells[0].numpy()
        turns = np.stack([polar(np.linalg.solve(first, cell), side="left")[0].T for cell in self.cells.numpy()])
        turn = torch.from_numpy(turns)
        return replace(
            self,
            cells=self.cells @ turn,
            positions=self.positions @ turn,
            forces=self.forces @ turn,
            stresses=turn.mT @ self.stresses @ turn,
        )

    def with_outcome_of_forces(self) -> Trajectory:
        """Whoever drives a relaxer step by step writes no outcome, but its last forces show one."""
        if self.outcome != Outcome.RUNNING or self.cell_free or not bool(self.movable.any()):
            return self
        largest = self.forces[-1][self.movable].norm(dim=1).max()
        return replace(self, outcome=int(Outcome.CONVERGED)) if float(largest) < self.fmax else self
