"""The stiffness as matrices: dense ones for small structures, products with sparse ones for large structures.

Dense: one per structure, padded to the largest. Rows: three per atom, then six for the cell. Padding and what may not
move has a 1 on the diagonal and zeros beside it.

Sparse: B = S + GᵀG, where S has springs and floors and G = ∂q/∂(u, ε) the collective coordinates; GᵀG is never formed.
Made once, B·u is several times quicker than from the links anew. Rows: three per atom, then six per structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from relaxion.networks.metric.stiffness import Stiffness, Unknowns
from relaxion.structures import Structures

SMALL = 16  # atoms; up to here structures are padded together


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

    def padded(self, values: Tensor, structures: Structures) -> Tensor:
        """Of each atom, (n_atoms, …) -> (n_structures, n_largest, …), zero where there is none."""
        zeros = values.new_zeros((structures.n_structures * self.n_largest, *values.shape[1:]))
        padded = zeros.index_copy(0, structures.structure_index * self.n_largest + self.places, values)
        return padded.view(structures.n_structures, self.n_largest, *values.shape[1:])

    def packed(self, unknowns: Unknowns, structures: Structures) -> Tensor:
        """(n_structures, n_rows)."""
        flat = self.padded(unknowns.atoms, structures).flatten(1)
        return torch.cat([flat, unknowns.cells], dim=1) if self.has_cell else flat

    def unpacked(self, values: Tensor, structures: Structures) -> Unknowns:
        """The opposite of `packed`."""
        atoms = values[:, : 3 * self.n_largest].reshape(-1, 3)
        atoms = atoms.index_select(0, structures.structure_index * self.n_largest + self.places)
        cells = values[:, 3 * self.n_largest :] if self.has_cell else values.new_zeros((len(values), 6))
        return Unknowns(atoms, cells)


def by_size(stiffness: Stiffness) -> list[tuple[Tensor, Stiffness]]:
    """Structures of similar size together, so that little is padded: their numbers and their stiffness."""
    octaves = torch.log2(stiffness.structures.counts.clamp_min(SMALL).double()).ceil()
    groups = octaves.unique()
    if len(groups) <= 1:
        return [(torch.arange(stiffness.structures.n_structures), stiffness)]
    numbers = [(octaves == group).nonzero().flatten() for group in groups]
    return [(which, stiffness.select(which)) for which in numbers]


def dense(stiffness: Stiffness) -> tuple[Tensor, Layout]:
    """B of every structure, (n_structures, n_rows, n_rows), and where its rows belong."""
    structures = stiffness.structures
    layout = Layout.of(structures, has_cell=bool(structures.cell_free.any()))  # also where a mask fixes all strains
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
    felt, corner = stiffness.cell_springs(blocks.new_zeros((structures.n_structures, 6, 6)))
    border = layout.padded(felt, structures).permute(0, 2, 1, 3).reshape(-1, 6, 3 * n)
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
    cells = layout.padded(stiffness.cell_coordinates(), structures)
    return torch.cat([rows, cells.reshape(-1, n * n_coordinates, 6)], dim=2)


def sparse_product(stiffness: Stiffness) -> Callable[[Unknowns], Unknowns]:
    """`product(u)` = B·u on the free coordinates, without gradients."""
    n_atoms = stiffness.structures.n_atoms
    springs, coordinates = _sparse_springs(stiffness), _sparse_coordinates(stiffness)
    transposed = coordinates.T.tocsr()

    def product(change: Unknowns) -> Unknowns:
        masked = change.masked(stiffness.free)
        flat = torch.cat([masked.atoms.flatten(), masked.cells.flatten()]).numpy()
        answer = torch.from_numpy(springs @ flat + transposed @ (coordinates @ flat))
        return Unknowns(answer[: 3 * n_atoms].view(-1, 3), answer[3 * n_atoms :].view(-1, 6)).masked(stiffness.free)

    return product


def _sparse_springs(stiffness: Stiffness) -> scipy.sparse.csr_array:
    structures = stiffness.structures
    n_atoms, n_structures = structures.n_atoms, structures.n_structures
    first, second, blocks = stiffness.centers[::2], stiffness.neighbors[::2], stiffness.blocks
    diagonal = stiffness.floors[structures.structure_index, None, None] * torch.eye(3, dtype=blocks.dtype)
    diagonal = diagonal.index_add(0, first, blocks).index_add(0, second, blocks)
    atoms = torch.arange(n_atoms)
    rows, columns, values = [atoms, first, second], [atoms, second, first], [diagonal, -blocks, -blocks]
    parts = [_entries(3 * torch.cat(rows), 3 * torch.cat(columns), torch.cat(values))]
    cells = 3 * n_atoms + 6 * torch.arange(n_structures)
    corner = stiffness.cell_floors[:, None, None] * torch.eye(6, dtype=blocks.dtype)
    if stiffness.has_free_cell:
        border, corner = stiffness.cell_springs(corner)
        of_atoms = cells.index_select(0, structures.structure_index)
        parts += [_entries(of_atoms, 3 * atoms, border), _entries(3 * atoms, of_atoms, border.mT)]
    parts.append(_entries(cells, cells, corner))
    return _matrix(parts, (3 * n_atoms + 6 * n_structures, 3 * n_atoms + 6 * n_structures))


def _sparse_coordinates(stiffness: Stiffness) -> scipy.sparse.csr_array:
    structures, arms = stiffness.structures, stiffness.arms
    n_atoms, n_coordinates = structures.n_atoms, arms.shape[1]
    own = arms.new_zeros((n_atoms, n_coordinates, 3)).index_add_(0, stiffness.centers, arms)
    atoms = torch.arange(n_atoms)
    rows, columns = torch.cat([stiffness.centers, atoms]), torch.cat([stiffness.neighbors, atoms])
    parts = [_entries(n_coordinates * rows, 3 * columns, torch.cat([arms, -own]))]
    if stiffness.has_free_cell:
        cells = 3 * n_atoms + 6 * structures.structure_index
        parts.append(_entries(n_coordinates * atoms, cells, stiffness.cell_coordinates()))
    return _matrix(parts, (n_coordinates * n_atoms, 3 * n_atoms + 6 * structures.n_structures))


Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


def _entries(rows: Tensor, columns: Tensor, blocks: Tensor) -> Entries:
    """Single entries of blocks whose upper left corners are given."""
    _, height, width = blocks.shape
    row = (rows[:, None, None] + torch.arange(height)[:, None]).expand_as(blocks)
    column = (columns[:, None, None] + torch.arange(width)).expand_as(blocks)
    return row.reshape(-1).int().numpy(), column.reshape(-1).int().numpy(), blocks.reshape(-1).numpy()


def _matrix(parts: list[Entries], shape: tuple[int, int]) -> scipy.sparse.csr_array:
    row, column, value = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
    return scipy.sparse.coo_array((value, (row, column)), shape=shape).tocsr()
