"""B⁻¹f: dense Cholesky for small structures, preconditioned conjugate gradients for large ones, in float64.

Gradients come from one more step of refinement: u = u* + B*⁻¹(f - B(θ)u*), where a star means detached. Its value is
the solution, and its derivative B⁻¹(df - dB·u) is exact, though nothing dense is ever differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relaxion.model.solve import by_size, dense, sparse_product
from relaxion.model.stiffness import Stiffness, Unknowns
from relaxion.structures.structures import atom_rows

LARGEST_DENSE = 200  # atoms; above it conjugate gradients are quicker
MOST_PADDED_NUMBERS = 3e7  # of the padded matrices of one group: 240 MB
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
    shares, counts = softening.new_zeros(stiffness.structures.n_structures), stiffness.structures.counts
    exact, softer = stiffness.detached().to(torch.float64), softening.detach().double()
    with torch.no_grad():
        for which, some in by_size(exact):
            pairs = exact.links_of(which)[0][::2] // 2
            shares[which] = _shares(some, softer[pairs], pulls.select(counts, which)).to(shares.dtype)
    along, across = (softening * shares.index_select(0, stiffness.link_structure[::2])[:, None]).unbind(dim=1)
    return replace(stiffness, along=stiffness.along - along, across=stiffness.across - across)


def _shares(stiffness: Stiffness, softening: Tensor, pulls: Unknowns, tried: Sequence[float] = SHARES) -> Tensor:
    """Of each structure the first of `tried` that leaves it stiff, else 0."""
    shares = tried[0] * _definite(stiffness, tried[0] * softening, pulls).double()
    left = (shares == 0).nonzero().flatten()
    if len(left) and len(tried) > 1:
        pairs, own = stiffness.links_of(left)[0][::2] // 2, pulls.select(stiffness.structures.counts, left)
        shares[left] = _shares(stiffness.select(left), softening[pairs], own, tried[1:])
    return shares


def _definite(stiffness: Stiffness, softening: Tensor, pulls: Unknowns) -> Tensor:
    """Whether each structure keeps the least share of its stiffness when softened by so much, booleans."""
    left = 1 - LEAST_STIFF
    rest = replace(
        stiffness,
        along=left * stiffness.along - softening[:, 0],
        across=left * stiffness.across - softening[:, 1],
        arms=math.sqrt(left) * stiffness.arms,
        floors=left * stiffness.floors,
        cell_floors=left * stiffness.cell_floors,
    )
    if _largest(rest) <= LARGEST_DENSE:  # however many there are: a share depends on no other structure
        return torch.linalg.cholesky_ex(dense(rest)[0])[1] == 0
    product = sparse_product(rest, coarse=True)
    return _descent(rest, product, _block_jacobi(stiffness), pulls, PROBES, COARSE_TOLERANCE)[1] > 0


def inverse_of(stiffness: Stiffness, method: Method = "auto", tolerance: float = RELATIVE_TOLERANCE) -> Inverse:
    """B⁻¹ as a function, made once for many right sides; `stiffness` in float64 and without gradients."""
    groups = by_size(stiffness)
    if len(groups) == 1:
        return _inverse_of(stiffness, method, tolerance)
    inverses = [(which, _inverse_of(some, method, tolerance)) for which, some in groups]
    counts = stiffness.structures.counts

    def inverse(right: Unknowns) -> Unknowns:
        answer = Unknowns(torch.zeros_like(right.atoms), torch.zeros_like(right.cells))
        for which, own in inverses:
            part = own(right.select(counts, which))
            answer.atoms[atom_rows(counts, which)[0]], answer.cells[which] = part.atoms, part.cells
        return answer

    return inverse


def _inverse_of(stiffness: Stiffness, method: Method, tolerance: float) -> Inverse:
    """Of structures of similar size."""
    if method == "dense" or (method == "auto" and _is_small(stiffness)):
        return _cholesky(stiffness)
    return _conjugate_gradients(stiffness, tolerance)


def _is_small(stiffness: Stiffness) -> bool:
    """Whether matrices are quicker."""
    largest, number = _largest(stiffness), stiffness.structures.n_structures
    return largest <= LARGEST_DENSE and 9 * number * largest**2 <= MOST_PADDED_NUMBERS


def _largest(stiffness: Stiffness) -> int:
    """Atoms of the largest structure."""
    counts = stiffness.structures.counts
    return int(counts.max()) if len(counts) else 0


def _cholesky(stiffness: Stiffness) -> Inverse:
    matrix, layout = dense(stiffness)
    factor = torch.linalg.cholesky(matrix)

    def inverse(right: Unknowns) -> Unknowns:
        packed = layout.packed(right.masked(stiffness.free), stiffness.structures)
        answer = torch.cholesky_solve(packed[:, :, None], factor)[:, :, 0]
        return layout.unpacked(answer, stiffness.structures).masked(stiffness.free)

    return inverse


def _conjugate_gradients(stiffness: Stiffness, tolerance: float) -> Inverse:
    product = sparse_product(stiffness, coarse=tolerance >= COARSE_TOLERANCE)
    return gradients_of(stiffness, product, tolerance)


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
