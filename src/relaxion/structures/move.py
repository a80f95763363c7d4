"""What an optimizer or a policy proposes: a displacement per atom and a strain per structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from relaxion.structures.structures import Structures, atom_rows


@dataclass(frozen=True, eq=False)
class Move:
    """Displacements and strains; the strain is zero where the cell is fixed."""

    displacements: Tensor  # (n_atoms, 3) Å
    strains: Tensor  # (n_structures, 3, 3), symmetric, no unit

    @classmethod
    def zero(cls, structures: Structures) -> Move:
        """The move that changes nothing."""
        return cls(torch.zeros_like(structures.positions), torch.zeros_like(structures.cells))

    @classmethod
    def between(cls, before: Structures, after: Structures) -> Move:
        """The move that takes `before` to `after`, measured without wrapping through the cell.

        The strain is read from the cells (zero for a structure without volume); displacements are the rest.
        """
        strains = torch.zeros_like(before.cells)
        solid = before.volumes > 0
        identity = torch.eye(3, dtype=before.dtype)
        strains[solid] = torch.linalg.solve(before.cells[solid], after.cells[solid]) - identity
        strained = before.moved(cls(torch.zeros_like(before.positions), strains)).positions
        return cls(after.positions - strained, strains)

    def scaled(self, factors: Tensor, structures: Structures) -> Self:
        """Each structure's part of the move times its own factor."""
        return replace(
            self,
            displacements=self.displacements * factors[structures.structure_index, None],
            strains=self.strains * factors[:, None, None],
        )

    def allowed(self, structures: Structures) -> Self:
        """Nothing for atoms that may not move, no strain for fixed cells."""
        return replace(
            self,
            displacements=self.displacements * structures.movable[:, None],
            strains=self.strains * structures.cell_free[:, None, None],
        )

    def select(self, counts: Tensor, which: Tensor) -> Self:
        """The part that belongs to the chosen structures (`counts`: atoms of each structure)."""
        which = which.nonzero().flatten() if which.dtype == torch.bool else which
        rows, _ = atom_rows(counts, which)
        return replace(self, displacements=self.displacements[rows], strains=self.strains[which])
