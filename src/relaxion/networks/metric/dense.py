"""The stiffness as dense matrices, one per structure, padded to the largest: for small structures.

Rows: three per atom, then six for the cell. Padding and what may not move has a 1 on the diagonal and zeros beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.networks.metric.stiffness import Stiffness, Unknowns
from relaxion.structures import Structures


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the atoms of a structure stand in its padded matrix."""

    places: Tensor  # (n_atoms,) int64, number of an atom within its structure
    n_largest: int
    has_cell: bool

    @classmethod
    def of(cls, structures: Structures, *, has_cell: bool) -> Layout:
        counts = structures.counts
        starts = (counts.cumsum(0) - counts).index_select(0, structures.structure_index)
        largest = int(counts.max()) if len(counts) else 0
        return cls(torch.arange(structures.n_atoms) - starts, largest, has_cell)

    @property
    def n_rows(self) -> int:
        return 3 * self.n_largest + 6 * self.has_cell

    def packed(self, unknowns: Unknowns, structures: Structures) -> Tensor:
        """(n_structures, n_rows)."""
        atoms = unknowns.atoms
        padded = atoms.new_zeros((structures.n_structures * self.n_largest, 3))
        padded = padded.index_copy(0, structures.structure_index * self.n_largest + self.places, atoms)
        flat = padded.view(structures.n_structures, 3 * self.n_largest)
        return torch.cat([flat, unknowns.cells], dim=1) if self.has_cell else flat

    def unpacked(self, values: Tensor, structures: Structures) -> Unknowns:
        """The opposite of `packed`."""
        atoms = values[:, : 3 * self.n_largest].reshape(-1, 3)
        atoms = atoms.index_select(0, structures.structure_index * self.n_largest + self.places)
        cells = values[:, 3 * self.n_largest :] if self.has_cell else values.new_zeros((len(values), 6))
        return Unknowns(atoms, cells)


def dense(stiffness: Stiffness) -> tuple[Tensor, Layout]:
    """B of every structure, (n_structures, n_rows, n_rows), and where its rows belong."""
    structures = stiffness.structures
    layout = Layout.of(structures, has_cell=stiffness.has_free_cell)
    matrix = _springs(stiffness, layout)
    if stiffness.arms.shape[1]:
        rows = _collective(stiffness, layout)
        matrix.baddbmm_(rows.mT, rows)
    floors = stiffness.floors[:, None].expand(-1, 3 * layout.n_largest)
    if layout.has_cell:
        floors = torch.cat([floors, stiffness.cell_floors[:, None].expand(-1, 6)], dim=1)
    matrix.diagonal(dim1=1, dim2=2).add_(floors)
    free = layout.packed(
        Unknowns(stiffness.free.atoms.to(matrix.dtype), stiffness.free.cells.to(matrix.dtype)), structures
    )
    matrix.mul_(free[:, :, None]).mul_(free[:, None, :])
    matrix.diagonal(dim1=1, dim2=2).add_(1 - free)
    return matrix, layout


def strain_columns(vectors: Tensor) -> Tensor:
    """r·ε for each of the six unit strains, (n, 6, 3)."""
    half = math.sqrt(0.5)
    x, y, z = vectors.unbind(dim=1)
    zero = torch.zeros_like(x)
    columns = [
        [x, zero, zero],
        [zero, y, zero],
        [zero, zero, z],
        [zero, half * z, half * y],
        [half * z, zero, half * x],
        [half * y, half * x, zero],
    ]
    return torch.stack([torch.stack(column, dim=1) for column in columns], dim=1)


def _springs(stiffness: Stiffness, layout: Layout) -> Tensor:
    """The springs' part."""
    structures, n = stiffness.structures, layout.n_largest
    first, second = stiffness.centers[::2], stiffness.neighbors[::2]
    owners = stiffness.link_structure[::2]
    blocks = stiffness.blocks
    i, j = layout.places.index_select(0, first), layout.places.index_select(0, second)
    # each block once between its atoms; what it adds to their diagonals is a sum over rows, quicker than a second index
    joined = blocks.new_zeros((structures.n_structures * n * n, 9))
    joined.index_add_(0, (owners * n + i) * n + j, blocks.reshape(-1, 9))
    joined = joined.view(-1, n, n, 9)
    joined = joined + joined.transpose(1, 2)  # blocks are symmetric
    sums = joined.sum(dim=2)
    joined.neg_().diagonal(dim1=1, dim2=2).add_(sums.transpose(1, 2))
    atoms = joined.view(-1, n, n, 3, 3).transpose(2, 3).reshape(-1, 3 * n, 3 * n)
    if not layout.has_cell:
        return atoms
    columns = strain_columns(stiffness.vectors[::2])  # (n_pairs, 6, 3)
    felt = torch.bmm(columns, blocks)  # (n_pairs, 6, 3) eV/Å, what a unit strain does to the pair
    border = blocks.new_zeros((structures.n_structures * n, 6, 3))
    border.index_add_(0, owners * n + j, felt)
    border.index_add_(0, owners * n + i, -felt)
    border = border.view(-1, n, 6, 3).permute(0, 2, 1, 3).reshape(-1, 6, 3 * n)
    corner = blocks.new_zeros((structures.n_structures, 6, 6)).index_add_(0, owners, torch.bmm(felt, columns.mT))
    return torch.cat([torch.cat([atoms, border.mT], dim=2), torch.cat([border, corner], dim=2)], dim=1)


def _collective(stiffness: Stiffness, layout: Layout) -> Tensor:
    """∂q_im/∂(u, ε), (n_structures, n_largest · M, n_rows)."""
    structures, n = stiffness.structures, layout.n_largest
    n_coordinates = stiffness.arms.shape[1]
    i = layout.places.index_select(0, stiffness.centers)
    j = layout.places.index_select(0, stiffness.neighbors)
    start = (stiffness.link_structure * n + i) * n
    grid = stiffness.arms.new_zeros((structures.n_structures * n * n, n_coordinates, 3))
    grid.index_add_(0, start + j, stiffness.arms)
    own = grid.view(-1, n, n, 3 * n_coordinates)
    own.diagonal(dim1=1, dim2=2).sub_(own.sum(dim=2).transpose(1, 2))
    rows = grid.view(-1, n, n, n_coordinates, 3).transpose(2, 3).reshape(-1, n * n_coordinates, 3 * n)
    if not layout.has_cell:
        return rows
    columns = strain_columns(stiffness.vectors)
    felt = torch.bmm(stiffness.arms, columns.mT)  # (n_links, M, 6)
    cells = felt.new_zeros((structures.n_structures * n, n_coordinates, 6))
    cells.index_add_(0, stiffness.link_structure * n + i, felt)
    return torch.cat([rows, cells.view(-1, n * n_coordinates, 6)], dim=2)
