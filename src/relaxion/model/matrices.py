"""The stiffness as matrices: dense ones for small structures, products with sparse ones for large structures.

Dense: one per structure, padded to the largest. Rows: three per atom, then six for the cell. Padding and what may not
move has a 1 on the diagonal and zeros beside it.

Sparse: B = S + GᵀG, where S has springs and floors and G = ∂q/∂(u, ε) the collective coordinates; GᵀG is never formed.
Made once, B·u is several times quicker than from the links anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from relaxion.model.stiffness import Stiffness, Unknowns
from relaxion.structures import Structures
from relaxion.structures.structures import per_structure_sum

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


def sparse_product(stiffness: Stiffness, *, coarse: bool = False) -> Callable[[Unknowns], Unknowns]:
    """`product(u)` = B·u on the free coordinates, without gradients; `coarse`: to six digits, in half of the time.

    Atoms by sparse matrices of blocks. What couples them to a cell is dense: six columns.
    """
    kind = np.float32 if coarse else np.float64
    structures = stiffness.structures
    index, n_structures = structures.structure_index, structures.n_structures
    springs, coordinates = _sparse_springs(stiffness).astype(kind), _sparse_coordinates(stiffness).astype(kind)
    transposed = coordinates.T
    with_cells = _with_cells(stiffness) if stiffness.has_free_cell else None

    def product(change: Unknowns) -> Unknowns:
        masked = change.masked(stiffness.free)
        flat = masked.atoms.flatten().numpy().astype(kind, copy=False)
        summed = coordinates @ flat  # (n_atoms · M,)
        cells = stiffness.cell_floors[:, None] * masked.cells
        pulls = torch.zeros_like(masked.atoms)
        if with_cells is not None:
            border, felt, corner = with_cells
            own = masked.cells.index_select(0, index)[:, :, None]  # (n_atoms, 6, 1)
            summed = summed + torch.bmm(felt, own).flatten().numpy().astype(kind, copy=False)
            pulls = torch.bmm(border.mT, own)[:, :, 0]
            back = torch.bmm(felt.mT, torch.from_numpy(summed).double().view(len(felt), -1, 1))[:, :, 0]
            back = back + torch.bmm(border, masked.atoms[:, :, None])[:, :, 0]
            cells = cells + torch.bmm(corner, masked.cells[:, :, None])[:, :, 0]
            cells = cells + per_structure_sum(back, index, n_structures)
        answer = torch.from_numpy(springs @ flat + transposed @ summed).double()
        return Unknowns(answer.view(-1, 3) + pulls, cells).masked(stiffness.free)

    return product


def _with_cells(stiffness: Stiffness) -> tuple[Tensor, Tensor, Tensor]:
    """Pulls at atoms (n_atoms, 6, 3) and changes of coordinates (n_atoms, M, 6) by unit strains; springs' own part."""
    border, corner = stiffness.cell_springs(stiffness.vectors.new_zeros((stiffness.structures.n_structures, 6, 6)))
    return border, stiffness.cell_coordinates(), corner


def _sparse_springs(stiffness: Stiffness) -> scipy.sparse.bsr_array | scipy.sparse.csr_array:
    structures = stiffness.structures
    first, second, blocks = stiffness.centers[::2], stiffness.neighbors[::2], stiffness.blocks
    diagonal = stiffness.floors[structures.structure_index, None, None] * torch.eye(3, dtype=blocks.dtype)
    diagonal = diagonal.index_add(0, first, blocks).index_add(0, second, blocks)
    atoms = torch.arange(structures.n_atoms)
    rows, columns = torch.cat([atoms, first, second]), torch.cat([atoms, second, first])
    return _of_blocks(rows, columns, torch.cat([diagonal, -blocks, -blocks]), structures.n_atoms)


def _sparse_coordinates(stiffness: Stiffness) -> scipy.sparse.bsr_array | scipy.sparse.csr_array:
    arms, n_atoms = stiffness.arms, stiffness.structures.n_atoms
    own = arms.new_zeros((n_atoms, *arms.shape[1:])).index_add_(0, stiffness.centers, arms)
    atoms = torch.arange(n_atoms)
    rows, columns = torch.cat([stiffness.centers, atoms]), torch.cat([stiffness.neighbors, atoms])
    return _of_blocks(rows, columns, torch.cat([arms, -own]), n_atoms)


def _of_blocks(
    rows: Tensor, columns: Tensor, blocks: Tensor, n_atoms: int
) -> scipy.sparse.bsr_array | scipy.sparse.csr_array:
    """Blocks (n, height, 3) at rows and columns of atoms; those at the same place add up."""
    if not blocks.shape[1]:  # springs alone have no collective coordinates
        return scipy.sparse.csr_array((0, 3 * n_atoms), dtype=np.float64)
    order = torch.argsort(rows, stable=True)
    ends = torch.cat([rows.new_zeros(1), torch.bincount(rows, minlength=n_atoms).cumsum(0)])
    parts = (blocks[order].numpy(), columns[order].int().numpy(), ends.int().numpy())
    return scipy.sparse.bsr_array(parts, shape=(blocks.shape[1] * n_atoms, 3 * n_atoms))
