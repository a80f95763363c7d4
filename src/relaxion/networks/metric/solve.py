"""B⁻¹f: dense Cholesky for small structures, preconditioned conjugate gradients for large ones, in float64.

Gradients come from one more step of refinement: u = u* + B*⁻¹(f - B(θ)u*), where a star means detached. Its value is
the solution, and its derivative B⁻¹(df - dB·u) is exact, though nothing dense is ever differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relaxion.networks.metric.matrices import dense, sparse_product
from relaxion.networks.metric.stiffness import Stiffness, Unknowns

LARGEST_DENSE = 128  # atoms; above it conjugate gradients are quicker
MOST_PADDED_NUMBERS = 3e7  # of all padded matrices: 240 MB
RELATIVE_TOLERANCE = 1e-7  # of the residual of conjugate gradients
MOST_ITERATIONS = 1000

Inverse = Callable[[Unknowns], Unknowns]
Method = Literal["auto", "dense", "gradients"]


def solve(stiffness: Stiffness, right: Unknowns, method: Method = "auto") -> Unknowns:
    """B⁻¹f on the free coordinates, zero elsewhere, in the precision of `right`; differentiable once."""
    exact = stiffness.to(torch.float64)
    wanted = Unknowns(right.atoms.double(), right.cells.double()).masked(stiffness.free)
    inverse = inverse_of(exact.detached(), method)
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


def inverse_of(stiffness: Stiffness, method: Method = "auto") -> Inverse:
    """B⁻¹ as a function, made once for many right sides; `stiffness` in float64 and without gradients."""
    counts = stiffness.structures.counts
    largest = int(counts.max()) if len(counts) else 0
    small = largest <= LARGEST_DENSE and 9 * len(counts) * largest**2 <= MOST_PADDED_NUMBERS
    if method == "dense" or (method == "auto" and small):
        return _cholesky(stiffness)
    return _conjugate_gradients(stiffness)


def _cholesky(stiffness: Stiffness) -> Inverse:
    matrix, layout = dense(stiffness)
    factor = torch.linalg.cholesky(matrix)

    def inverse(right: Unknowns) -> Unknowns:
        packed = layout.packed(right.masked(stiffness.free), stiffness.structures)
        answer = torch.cholesky_solve(packed[:, :, None], factor)[:, :, 0]
        return layout.unpacked(answer, stiffness.structures).masked(stiffness.free)

    return inverse


def _conjugate_gradients(stiffness: Stiffness) -> Inverse:
    precondition, apply = _block_jacobi(stiffness), sparse_product(stiffness)
    structures = stiffness.structures

    def inverse(right: Unknowns) -> Unknowns:
        residual = right.masked(stiffness.free)
        answer = Unknowns(torch.zeros_like(residual.atoms), torch.zeros_like(residual.cells))
        goal = RELATIVE_TOLERANCE**2 * residual.dot(residual, structures)
        direction = nearer = precondition(residual)
        size = residual.dot(nearer, structures)
        for _ in range(MOST_ITERATIONS):
            if bool((residual.dot(residual, structures) <= goal).all()):
                break
            resisted = apply(direction)
            # a structure that is done has a size of about 0 and stands still
            length = size / direction.dot(resisted, structures).clamp_min(1e-300)
            answer = answer + direction.scaled(length, structures)
            residual = residual - resisted.scaled(length, structures)
            nearer = precondition(residual)
            new_size = residual.dot(nearer, structures)
            direction = nearer + direction.scaled(new_size / size.clamp_min(1e-300), structures)
            size = new_size
        return answer

    return inverse


def _block_jacobi(stiffness: Stiffness) -> Inverse:
    """The inverse of about the diagonal blocks of B: 3 × 3 of each atom, 6 × 6 of each cell."""
    structures, dtype = stiffness.structures, stiffness.vectors.dtype
    blocks, different = stiffness.blocks, (stiffness.centers != stiffness.neighbors).to(dtype)
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
        _, corner = stiffness.cell_springs(stiffness.cell_floors[:, None, None] * torch.eye(6, dtype=dtype))
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
