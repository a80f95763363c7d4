"""B⁻¹f: dense Cholesky for small structures, preconditioned conjugate gradients for large ones, in float64.

Gradients come from one more step of refinement: u = u* + B*⁻¹(f - B(θ)u*), where a star means detached. Its value is
the solution, and its derivative B⁻¹(df - dB·u) is exact, though nothing dense is ever differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relaxion.model.stiffness import Stiffness, Unknowns
from relaxion.structures.structures import atom_rows, per_structure_sum


def sparse_product(stiffness: Stiffness, *, coarse: bool = False) -> Callable[[Unknowns], Unknowns]:
    """`product(u)` = B·u on the free coordinates, without gradients; `coarse`: to six digits, in half of the time.

    Atoms by sparse matrices of blocks. What couples them to a cell is dense: six columns.
    """
    kind = np.float32 if coarse else np.float64
    structures = stiffness.structures
    index = structures.structure_index
    n_structures = structures.n_structures
    springs = _sparse_springs(stiffness).astype(kind)
    coordinates = _sparse_coordinates(stiffness).astype(kind)
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
    border, corner = stiffness.cell_springs(stiffness.blocks)
    return border, stiffness.cell_coordinates(), corner


def _sparse_springs(stiffness: Stiffness) -> scipy.sparse.bsr_array | scipy.sparse.csr_array:
    structures = stiffness.structures
    first = stiffness.centers[::2]
    second = stiffness.neighbors[::2]
    blocks = stiffness.blocks
    diagonal = stiffness.floors[structures.structure_index, None, None] * torch.eye(3, dtype=blocks.dtype)
    diagonal = diagonal.index_add(0, first, blocks).index_add(0, second, blocks)
    atoms = torch.arange(structures.n_atoms)
    rows = torch.cat([atoms, first, second])
    columns = torch.cat([atoms, second, first])
    return _of_blocks(rows, columns, torch.cat([diagonal, -blocks, -blocks]), structures.n_atoms)


def _sparse_coordinates(stiffness: Stiffness) -> scipy.sparse.bsr_array | scipy.sparse.csr_array:
    arms = stiffness.arms
    n_atoms = stiffness.structures.n_atoms
    own = arms.new_zeros((n_atoms, *arms.shape[1:])).index_add_(0, stiffness.centers, arms)
    atoms = torch.arange(n_atoms)
    rows = torch.cat([stiffness.centers, atoms])
    columns = torch.cat([stiffness.neighbors, atoms])
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


LARGEST_DENSE = 200  # atoms; above it conjugate gradients are quicker
MOST_NUMBERS = 3e7  # in the matrices of one batch: 240 MB
RELATIVE_TOLERANCE = 1e-7  # of the residual of conjugate gradients, where gradients are wanted
COARSE_TOLERANCE = 1e-3  # where only a step is: the stiffness itself is not known better
MOST_ITERATIONS = 1000

SHARES = (1.0, 0.5, 0.25, 0.125)  # of the softening, tried until B is positive definite; then none
LEAST_STIFF = 0.05  # share of the springs' stiffness that must be left along every direction
PROBES = 60  # directions of conjugate gradients that are looked at where matrices are too large

Inverse = Callable[[Unknowns], Unknowns]
Method = Literal["auto", "dense", "gradients"]


def solve(
    stiffness: Stiffness, right: Unknowns, method: Method = "auto", tolerance: float = RELATIVE_TOLERANCE
) -> Unknowns:
    """B⁻¹f on the free coordinates, zero elsewhere, in the precision of `right`; differentiable once.

    `tolerance`: of the residual, where the structure is too large for a matrix.
    """
    exact = stiffness.to(torch.float64)
    wanted = Unknowns(right.atoms.double(), right.cells.double()).masked(stiffness.free)
    inverse = inverse_of(exact.detached(), method, tolerance)
    with torch.no_grad():
        answer = inverse(wanted)
    if exact.differentiable or (torch.is_grad_enabled() and (right.atoms.requires_grad or right.cells.requires_grad)):
        residual = wanted - exact.apply(answer)
        atoms, cells = _Inverse.apply(residual.atoms, residual.cells, inverse)
        answer = answer + Unknowns(atoms, cells)
    return Unknowns(answer.atoms.to(right.atoms.dtype), answer.cells.to(right.cells.dtype))


class _Inverse(torch.autograd.Function):
    """B*⁻¹ of a vector, whose gradient is B*⁻¹ of the gradient: the matrix is symmetric."""

    @staticmethod
    def forward(ctx: Any, atoms: Tensor, cells: Tensor, inverse: Inverse) -> tuple[Tensor, Tensor]:
        ctx.inverse = inverse
        answer = inverse(Unknowns(atoms, cells))
        return answer.atoms, answer.cells

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        back = ctx.inverse(Unknowns(*gradients))
        return back.atoms, back.cells, None


def softened_by(stiffness: Stiffness, softening: Tensor, pulls: Unknowns) -> Stiffness:
    """The same with k∥ and k⊥ of the pairs lower by (n_pairs, 2) eV/Å²: by all of it where a twentieth of the stiffness
    is left along every direction, else by a half, a quarter, an eighth, or not at all.

    Each structure has its own share, which has no gradient. Of large structures, whose matrix is never built, only the
    directions that conjugate gradients take from `pulls` are looked at.
    """
    with torch.no_grad():
        shares, matrices = _shares(stiffness.detached().to(torch.float64), softening.detach().double(), pulls)
    taken = softening * shares.to(softening.dtype).index_select(0, stiffness.link_structure[::2])[:, None]
    softened = replace(stiffness, along=stiffness.along - taken[:, 0], across=stiffness.across - taken[:, 1])
    return softened if matrices is None else softened.with_matrices(matrices)


def _shares(stiffness: Stiffness, softening: Tensor, pulls: Unknowns) -> tuple[Tensor, list[Tensor] | None]:
    """Of each structure the first of `SHARES` that leaves it stiff, else 0; and the softened matrices, if there are."""
    shares = softening.new_zeros(stiffness.structures.n_structures)
    groups = by_size(stiffness)
    if len(groups) > 1:
        for which, some in groups:
            own = pulls.select(stiffness.structures.counts, which)
            shares[which] = _shares(some, softening[stiffness.links_of(which)[0][::2] // 2], own)[0]
        return shares, None
    layout = stiffness.layout
    small = bool((stiffness.structures.counts <= LARGEST_DENSE).all())
    softer = stiffness.matrices_of(stiffness.blocks_of(*softening.unbind(dim=1))) if small else []
    for matrix, free in zip(softer, layout.packed(stiffness.free), strict=small):
        matrix.mul_(free[:, :, None]).mul_(free[:, None, :])
    for share in SHARES:
        if small:
            trials = ((1 - LEAST_STIFF) * b - share * s for b, s in zip(stiffness.matrices, softer, strict=True))
            definite = torch.cat([torch.linalg.cholesky_ex(trial)[1] == 0 for trial in trials])[layout.order.argsort()]
        else:
            definite = _is_definite(stiffness, share * softening, pulls)
        shares = torch.where((shares == 0) & definite, share, shares)
        if bool((shares > 0).all()):
            break
    taken = [share[:, None, None] * matrix for share, matrix in zip(layout.of_structures(shares), softer, strict=small)]
    return shares, [b - s for b, s in zip(stiffness.matrices, taken, strict=True)] if small else None


def _is_definite(stiffness: Stiffness, softening: Tensor, pulls: Unknowns) -> Tensor:
    """Whether each structure keeps the least share of its stiffness when softened by so much, booleans. No matrices."""
    left = 1 - LEAST_STIFF
    rest = replace(
        stiffness,
        along=left * stiffness.along - softening[:, 0],
        across=left * stiffness.across - softening[:, 1],
        arms=math.sqrt(left) * stiffness.arms,
        floors=left * stiffness.floors,
        cell_floors=left * stiffness.cell_floors,
    )
    product = sparse_product(rest, coarse=True)
    return _descent(rest, product, _block_jacobi(stiffness), pulls, PROBES, COARSE_TOLERANCE)[1] > 0


def by_size(stiffness: Stiffness) -> list[tuple[Tensor, Stiffness]]:
    """Those that have matrices, and those that are too large for it: their numbers and their stiffness."""
    large = stiffness.structures.counts > LARGEST_DENSE
    if bool((large == large[:1]).all()):
        return [(torch.arange(len(large)), stiffness)]
    return [(which, stiffness.select(which)) for which in ((~large).nonzero().flatten(), large.nonzero().flatten())]


def inverse_of(stiffness: Stiffness, method: Method = "auto", tolerance: float = RELATIVE_TOLERANCE) -> Inverse:
    """B⁻¹ as a function, made once for many right sides; `stiffness` in float64 and without gradients."""
    counts = stiffness.structures.counts
    groups = by_size(stiffness)
    if len(groups) == 1:
        small = bool((counts <= LARGEST_DENSE).all()) and 9 * int(counts.square().sum()) <= MOST_NUMBERS
        if method == "dense" or (method == "auto" and small):
            return _cholesky(stiffness)
        return gradients_of(stiffness, sparse_product(stiffness, coarse=tolerance >= COARSE_TOLERANCE), tolerance)
    inverses = [(which, inverse_of(some, method, tolerance)) for which, some in groups]

    def inverse(right: Unknowns) -> Unknowns:
        answer = Unknowns(torch.zeros_like(right.atoms), torch.zeros_like(right.cells))
        for which, own in inverses:
            part = own(right.select(counts, which))
            answer.atoms[atom_rows(counts, which)[0]] = part.atoms
            answer.cells[which] = part.cells
        return answer

    return inverse


def _cholesky(stiffness: Stiffness) -> Inverse:
    layout = stiffness.layout
    factors = [torch.linalg.cholesky(matrix) for matrix in stiffness.matrices]

    def inverse(right: Unknowns) -> Unknowns:
        packed = layout.packed(right.masked(stiffness.free))
        answers = [
            torch.cholesky_solve(part[:, :, None], factor)[:, :, 0]
            for part, factor in zip(packed, factors, strict=True)
        ]
        return layout.unpacked(answers).masked(stiffness.free)

    return inverse


def gradients_of(stiffness: Stiffness, apply: Inverse, tolerance: float) -> Inverse:
    """B⁻¹ as a function where B·u is one already (`apply`)."""
    precondition = _block_jacobi(stiffness)

    def inverse(right: Unknowns) -> Unknowns:
        return _descent(stiffness, apply, precondition, right, MOST_ITERATIONS, tolerance)[0]

    return inverse


def _descent(
    stiffness: Stiffness, apply: Inverse, precondition: Inverse, right: Unknowns, most: int, tolerance: float
) -> tuple[Unknowns, Tensor]:
    """Conjugate gradients: the answer, and `lowest`, the lowest curvature met by each structure that was not yet done.

    Where a curvature, or the preconditioner, is not positive, B is not what it should be: that structure keeps the
    answer it has. `lowest` is then not above 0.
    """
    structures = stiffness.structures
    residual = right.masked(stiffness.free)
    answer = Unknowns(torch.zeros_like(residual.atoms), torch.zeros_like(residual.cells))
    goal = tolerance**2 * residual.dot(residual, structures)
    direction = nearer = precondition(residual)
    size = residual.dot(nearer, structures)
    lowest = torch.full_like(size, math.inf)
    for _ in range(most):
        done = (residual.dot(residual, structures) <= goal) | (lowest <= 0)
        if bool(done.all()):
            break
        resisted = apply(direction)
        curvature = direction.dot(resisted, structures)
        lowest = torch.where(done, lowest, torch.minimum(lowest, torch.minimum(curvature, size)))
        sound = lowest > 0
        # a structure that is done has a size of about 0 and stands still
        length = torch.where(sound, size / curvature.clamp_min(1e-300), 0.0)
        answer = answer + direction.scaled(length, structures)
        residual = residual - resisted.scaled(length, structures)
        nearer = precondition(residual)
        new_size = residual.dot(nearer, structures)
        turn = torch.where(sound, new_size / size.clamp_min(1e-300), 0.0)
        direction = nearer + direction.scaled(turn, structures)
        size = new_size
    return answer, lowest


def _block_jacobi(stiffness: Stiffness) -> Inverse:
    """The inverse of about the diagonal blocks of B: 3 × 3 of each atom, 6 × 6 of each cell."""
    structures = stiffness.structures
    dtype = stiffness.vectors.dtype
    blocks = stiffness.blocks
    different = (stiffness.centers != stiffness.neighbors).to(dtype)
    seen = blocks * different[::2, None, None]
    arms = stiffness.arms * different[:, None, None]
    outer = torch.bmm(arms.mT, arms)  # of what a neighbour adds to the coordinates of others
    totals = arms.new_zeros((structures.n_atoms, *arms.shape[1:])).index_add_(0, stiffness.centers, arms)
    atoms = stiffness.floors[structures.structure_index, None, None] * torch.eye(3, dtype=dtype)
    atoms = atoms + torch.bmm(totals.mT, totals)
    atoms.index_add_(0, stiffness.neighbors, outer)
    atoms.index_add_(0, stiffness.centers[::2], seen).index_add_(0, stiffness.neighbors[::2], seen)
    atoms = _inverted(atoms, stiffness.free.atoms.to(dtype))
    cells = None
    if stiffness.has_free_cell:
        _, corner = stiffness.cell_springs(stiffness.blocks)
        corner = corner + stiffness.cell_floors[:, None, None] * torch.eye(6, dtype=dtype)
        felt = stiffness.cell_coordinates()
        corner = corner.index_add(0, structures.structure_index, torch.bmm(felt.mT, felt))
        cells = _inverted(corner, stiffness.free.cells.to(dtype))

    def inverse(right: Unknowns) -> Unknowns:
        of_cells = right.cells if cells is None else torch.bmm(cells, right.cells[:, :, None])[:, :, 0]
        return Unknowns(torch.bmm(atoms, right.atoms[:, :, None])[:, :, 0], of_cells)

    return inverse


def _inverted(blocks: Tensor, free: Tensor) -> Tensor:
    """Inverse on the free coordinates, zero elsewhere."""
    inside = blocks * free[:, :, None] * free[:, None, :] + torch.diag_embed(1 - free)
    return torch.linalg.inv(inside) * free[:, :, None] * free[:, None, :]
