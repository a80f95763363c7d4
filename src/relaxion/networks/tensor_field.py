"""The tensor-field backbone on e3nn: scalars, vectors and l = 2 tensors (Thomas et al. 2018).

Spherical harmonics and coupling coefficients are e3nn's; the products are written out for the eleven ways in which
0e + 1o + 2e couple with 0e + 1o + 2e, because e3nn's compiled ones take several times longer for so few channels.
Signs of e3nn's coefficients differ between its releases; here they are fixed, so that weights stay good.

A neighbour speaks nine rows: one of l = 0, three of l = 1, five of l = 2, and nine are heard. The matrices that couple
them hold the harmonics of the pair's direction; filters weight each way from l to l, for each channel. The gradient is
written out as in `light.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from relaxion.errors import MissingExtraError
from relaxion.networks.backbone import AtomInputs, Backbone, BackboneSettings, Features
from relaxion.networks.layers import (
    InvariantUpdate,
    PairFilter,
    Scratch,
    StackedLinear,
    StackedMLP,
    mixed,
    packed,
    unpacked,
)
from relaxion.networks.surroundings import Surroundings

SIZES = (1, 3, 5)  # components of 0e, 1o, 2e

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


def _o3():
    try:
        from e3nn import o3
    except ImportError as error:
        raise MissingExtraError(
            "the tensor_field backbone needs e3nn, which is not installed; try: pip install 'relaxion[train]', "
            "or choose backbone = 'light'"
        ) from error
    return o3


@lru_cache(maxsize=32)
def coupling(path: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Coefficients that couple two tensors to a third of order one, (2l₁+1, 2l₂+1, 2l₃+1)."""
    # dtype given: e3nn would take the global default. Not a buffer: .float().double() would round it.
    exact = _o3().wigner_3j(*path, dtype=torch.float64)
    first = exact[exact.abs() > 1e-6][0]
    return (exact * first.sign() * math.sqrt(2 * path[2] + 1)).to(dtype)


class TensorFieldLayer(nn.Module):
    """Neighbours speak through the harmonics of their direction, then the atom thinks."""

    def __init__(
        self,
        settings: BackboneSettings,
        n_pair_inputs: int,
        n_networks: int,
        generator: torch.Generator | None,
        is_last: bool,
    ) -> None:
        super().__init__()
        channels = settings.channels
        self.speak = nn.ModuleList(
            [StackedLinear(channels, channels, n_networks, generator, bias=False) for _ in SIZES]
        )
        self.filter = PairFilter(n_pair_inputs, len(PATHS), channels, n_networks, generator)
        self.update = InvariantUpdate(channels, 2, 1 if is_last else 2, n_networks, generator)

    def forward(
        self, tensors: list[Tensor], surroundings: Surroundings, couplings: list[Tensor], pair_inputs: Tensor
    ) -> list[Tensor]:
        """Tensors of l = 0, 1, 2, each (n_networks, n_atoms, 2l+1, channels)."""
        n_networks = len(tensors[0])
        words = torch.cat([mixed(layer, t) for layer, t in zip(self.speak, tensors, strict=True)], dim=2)
        heard = TensorMessages.apply(
            packed(words),
            pair_inputs,
            self.filter(n_networks),
            *couplings,
            surroundings.centers,
            surroundings.neighbors,
        )  # (n_atoms, 9, n_networks · channels)
        # halved: three or four ways lead to each l, and together they must stay of order one
        heard = unpacked(heard * (0.5 * surroundings.normalisers[:, None, None]), n_networks)
        scalars, *higher = [t + h for t, h in zip(tensors, heard.split(SIZES, dim=2), strict=True)]
        scalars, higher = self.update(scalars[:, :, 0], higher)
        return [scalars[:, :, None], *higher]


class TensorFieldBackbone(Backbone):
    """l ≤ 2: sees angles in one round of messages."""

    def __init__(
        self,
        settings: BackboneSettings,
        n_scalars: int,
        n_vectors: int,
        n_pair_extras: int,
        n_networks: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        channels, n_pair_inputs = settings.channels, settings.n_radial * (1 + n_pair_extras)
        _o3()  # absent: say so now, not at the first step
        self.embed_scalars = StackedMLP(n_scalars, channels, channels, n_networks, generator)
        self.embed_vectors = StackedLinear(n_vectors, 3 * channels, n_networks, generator, bias=False)
        last = settings.n_layers - 1
        self.layers = nn.ModuleList(
            [
                TensorFieldLayer(settings, n_pair_inputs, n_networks, generator, number == last)
                for number in range(settings.n_layers)
            ]
        )

    def forward(self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int) -> Features:
        scalars = self.embed_scalars(inputs.scalars.expand(n_networks, -1, -1))
        vectors, one, other = mixed(
            self.embed_vectors, inputs.vectors.transpose(1, 2).expand(n_networks, -1, -1, -1)
        ).chunk(3, dim=3)
        tensors = torch.einsum("ijk,naic,najc->nakc", coupling((1, 1, 2), one.dtype), one, other)
        known = [scalars[:, :, None], vectors, tensors]
        couplings = pair_couplings(surroundings.directions)
        for layer in self.layers:
            known = layer(known, surroundings, couplings, pair_inputs)
        return Features(known[0][:, :, 0], known[1].transpose(2, 3))


def pair_couplings(directions: Tensor) -> list[Tensor]:
    """For each l of the speaker the matrix to all l of the message, (n_pairs, 9, 2l+1), harmonics inside."""
    harmonics = _o3().spherical_harmonics([0, 1, 2], directions, normalize=False, normalization="component")
    of_degree = harmonics.split(SIZES, dim=1)
    ways = ([(1, 1, 0), (1, 2, 1), (1, 1, 2)], [(2, 2, 0), (2, 1, 1), (2, 2, 2)])
    matrices = [
        torch.cat([torch.einsum("imk,pm->pki", coupling(p, harmonics.dtype), of_degree[p[1]]) for p in paths], dim=1)
        for paths in ways
    ]
    return [harmonics[:, :, None], *matrices]
