"""Programs that keep what they made for the first cell: started anew before it differs much, and once they failed.

Plane-wave codes that stay up between force calls keep the plane waves, and some the k-points, of the cell they were
started with. pw.x 6.7 makes plane waves anew once the volume has changed by 10 % and keeps the old k-points: from there
on its energies are wrong by tenths of an eV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from relaxion.potentials.base import close_calculator

MOST_CELL_CHANGE = 0.06  # of the volume, or of a length in any direction; pw.x errs from 0.10


class RelaunchedCalculator(Calculator):
    """Asks a calculator made by `make`, and makes another one before the cell has changed by `most_cell_change`."""

    def __init__(self, make: Callable[[], Calculator], most_cell_change: float = MOST_CELL_CHANGE) -> None:
        """`make`: without arguments, called at the first force call and whenever the cell has changed too much."""
        super().__init__()
        self.implemented_properties = ["energy", "free_energy", "forces", "stress"]
        self.make = make
        self.most_cell_change = most_cell_change
        self.inner: Calculator | None = None  # what is asked now
        self.launches = 0
        self._launched_with: np.ndarray | None = None  # (3, 3) Å, rows are cell vectors

    def calculate(
        self, atoms: Atoms | None = None, properties: Sequence[str] = ("energy",), system_changes: Any = all_changes
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        cell = np.array(self.atoms.cell)
        if self._launched_with is not None and cell_change(self._launched_with, cell) >= self.most_cell_change:
            self.close()
        if self.inner is None:
            self.inner = self.make()
            self._launched_with = cell
            self.launches += 1
        try:
            for name in properties:
                self.inner.get_property(name, self.atoms)
        except Exception:
            self.close()  # a program that gave up answers no more: another one may, at another place
            raise
        self.results = dict(self.inner.results)

    def close(self) -> None:
        """End the program; the next force call starts another one."""
        if self.inner is not None:
            close_calculator(self.inner)
        self.inner = None
        self._launched_with = None


def cell_change(before: np.ndarray, after: np.ndarray) -> float:
    """Largest relative change of the volume and of lengths in any direction. Rotations do not count.

    Cells without a volume (molecules, slabs without a third vector) are compared by their vectors.
    """
    if np.linalg.matrix_rank(before) < 3:
        size = float(np.linalg.norm(before, axis=1).max())
        return float(np.abs(after - before).max()) / size if size else float(np.any(after))
    stretches = np.linalg.svd(np.linalg.solve(before, after), compute_uv=False)
    return float(max(np.abs(stretches - 1.0).max(), abs(stretches.prod() - 1.0)))
