"""Messages of the tensor-field backbone, with their gradient written out, as in `light_messages`.

A neighbour speaks nine rows: one of l = 0, three of l = 1, five of l = 2, and nine are heard. The matrices that couple
them hold the harmonics of the pair's direction; filters weight each way from l to l, for each channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relaxion.networks.scratch import Scratch

NUMBERS_AT_ONCE = 16384  # pairs · width in a piece

# (l of the speaker, l of the harmonic, l of the message). The sum is even: nothing else is right under inversion.
PATHS = (
    (0, 0, 0), (0, 1, 1), (0, 2, 2),
    (1, 1, 0), (1, 2, 1), (1, 1, 2),
    (2, 2, 0), (2, 1, 1), (2, 2, 2),
    (1, 0, 1), (2, 0, 2),
)  # fmt: skip
ROWS = (slice(0, 1), slice(1, 4), slice(4, 9))  # of l = 0, 1, 2


class TensorMessages(torch.autograd.Function):
    """Σ_j Σ_paths filter · (harmonic coupled with what neighbour j speaks)."""

    @staticmethod
    def forward(
        ctx: Any,
        spoken: Tensor,  # (n_atoms, 9, width)
        pair_inputs: Tensor,  # (n_pairs, n_inputs)
        weight: Tensor,  # (n_inputs, 11 · width), of the filters
        harmonics: Tensor,  # (n_pairs, 9, 1): from l = 0 to all
        from_vectors: Tensor,  # (n_pairs, 9, 3): from l = 1 to all
        from_tensors: Tensor,  # (n_pairs, 9, 5): from l = 2 to all
        centers: Tensor,  # (n_pairs,) int64
        neighbors: Tensor,  # (n_pairs,) int64
    ) -> Tensor:
        """(n_atoms, 9, width)."""
        ctx.save_for_backward(
            spoken, pair_inputs, weight, harmonics, from_vectors, from_tensors, centers, neighbors
        )  # fmt: skip
        width, scratch = spoken.shape[2], Scratch(spoken, len(centers), NUMBERS_AT_ONCE)
        heard = torch.zeros_like(spoken)
        for part, count in scratch.pieces():
            near = torch.index_select(spoken, 0, neighbors[part], out=scratch("near", count, 9, width))
            filters = _filters(scratch, pair_inputs[part], weight, width)
            vectors = torch.bmm(from_vectors[part], near[:, ROWS[1]], out=scratch("vectors", count, 9, width))
            tensors = torch.bmm(from_tensors[part], near[:, ROWS[2]], out=scratch("tensors", count, 9, width))
            scalars = torch.mul(filters[:, 0:3], near[:, :1], out=scratch("scalars", count, 3, width))
            messages = scratch("messages", count, 9, width)
            for degree, rows in enumerate(ROWS):
                message = torch.mul(scalars[:, degree, None], harmonics[part, rows], out=messages[:, rows])
                message.addcmul_(filters[:, 3 + degree, None], vectors[:, rows])
                message.addcmul_(filters[:, 6 + degree, None], tensors[:, rows])
            messages[:, ROWS[1]].addcmul_(filters[:, 9, None], near[:, ROWS[1]])
            messages[:, ROWS[2]].addcmul_(filters[:, 10, None], near[:, ROWS[2]])
            heard.index_add_(0, centers[part], messages)
        return heard

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        spoken, pair_inputs, weight, *couplings, centers, neighbors = ctx.saved_tensors
        width, scratch = spoken.shape[2], Scratch(spoken, len(centers), NUMBERS_AT_ONCE)
        to_spoken, to_weight = torch.zeros_like(spoken), torch.zeros_like(weight)
        to_pairs = torch.empty_like(pair_inputs) if ctx.needs_input_grad[1] else None
        for part, count in scratch.pieces():
            near = torch.index_select(spoken, 0, neighbors[part], out=scratch("near", count, 9, width))
            back = torch.index_select(gradients[0], 0, centers[part], out=scratch("back", count, 9, width))
            filters = _filters(scratch, pair_inputs[part], weight, width)
            to_near, to_filters = _backward(scratch, near, back, filters, [matrix[part] for matrix in couplings])
            to_spoken.index_add_(0, neighbors[part], to_near)
            flat = to_filters.view(count, -1)
            to_weight.addmm_(pair_inputs[part].T, flat)
            if to_pairs is not None:
                torch.mm(flat, weight.T, out=to_pairs[part])
        return to_spoken, to_pairs, to_weight, None, None, None, None, None


def _filters(scratch: Scratch, pair_inputs: Tensor, weight: Tensor, width: int) -> Tensor:
    """(pairs of the piece, 11, width)."""
    out = scratch("filters", len(pair_inputs), weight.shape[1])
    return torch.mm(pair_inputs, weight, out=out).view(-1, len(PATHS), width)


def _backward(
    scratch: Scratch, near: Tensor, back: Tensor, filters: Tensor, couplings: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of what is spoken and of the filters, for one piece."""
    harmonics, from_vectors, from_tensors = couplings
    shape, products = near.shape, scratch("products", *near.shape)
    vectors = torch.bmm(from_vectors, near[:, ROWS[1]], out=scratch("vectors", *shape))
    tensors = torch.bmm(from_tensors, near[:, ROWS[2]], out=scratch("tensors", *shape))
    to_near, to_filters = scratch("to_near", *shape), scratch("to_filters", *filters.shape)
    # products with all nine rows at once, then their sums over the rows of each l
    for place, factors in ((0, harmonics), (3, vectors), (6, tensors)):
        torch.mul(back, factors, out=products)
        for degree, rows in enumerate(ROWS):
            torch.sum(products[:, rows], dim=1, out=to_filters[:, place + degree])
    torch.mul(to_filters[:, :3], filters[:, :3], out=products[:, :3])
    torch.sum(products[:, :3], dim=1, out=to_near[:, 0])
    to_filters[:, :3].mul_(near[:, :1])
    torch.mul(back[:, 1:], near[:, 1:], out=products[:, 1:])
    for degree, matrix in ((1, from_vectors), (2, from_tensors)):
        rows = ROWS[degree]
        torch.sum(products[:, rows], dim=1, out=to_filters[:, 8 + degree])
        coupled = vectors  # not needed any more
        for other, those in enumerate(ROWS):
            torch.mul(filters[:, 3 * degree + other, None], back[:, those], out=coupled[:, those])
        torch.mul(filters[:, 8 + degree, None], back[:, rows], out=to_near[:, rows])
        to_near[:, rows] += torch.bmm(matrix.transpose(1, 2), coupled)
    return to_near, to_filters
