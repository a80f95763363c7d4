"""What an optimizer or a policy proposes: a displacement per atom and a strain per structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from relaxion.structures.structures import Structures, atom_rows, concatenated, numbers_of, per_structure_max


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

    def to(self, dtype: torch.dtype) -> Self:
        """The same move in another precision."""
        return replace(self, displacements=self.displacements.to(dtype), strains=self.strains.to(dtype))

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
        which = numbers_of(which)
        rows, _ = atom_rows(counts, which)
        return replace(self, displacements=self.displacements[rows], strains=self.strains[which])

    @classmethod
    def concatenate(cls, parts: Sequence[Move]) -> Move:
        """One move from several, in order."""
        return cls(**concatenated(parts, ("displacements", "strains")))

    def largest_displacements(self, structures: Structures) -> Tensor:
        """How far the atom that moves most moves, for each structure."""
        lengths = self.displacements.norm(dim=1)  # (n_atoms,) Å
        return per_structure_max(lengths, structures.structure_index, structures.n_structures)

    def strain_sizes(self) -> Tensor:
        """Frobenius norms of the strains: the same in every frame, never below the largest stretch."""
        return self.strains.flatten(1).norm(dim=1)  # (n_structures,)

    def bounded(self, structures: Structures, max_displacement: float, max_strain: float) -> Self:
        """Shortened as a whole until no atom moves farther (Å) and no strain is larger than the bounds.

        One factor per structure, taken from lengths: the direction survives, and with it equivariance (R6.5).
        """
        factors = torch.minimum(
            max_displacement / self.largest_displacements(structures).clamp_min(max_displacement),
            max_strain / self.strain_sizes().clamp_min(max_strain),
        )
        return self.scaled(factors, structures)
