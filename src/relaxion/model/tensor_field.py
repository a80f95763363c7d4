"""The tensor-field backbone on e3nn: scalars, vectors and l = 2 tensors (Thomas et al. 2018).

Spherical harmonics and coupling coefficients are e3nn's; the products are written out for the eleven ways in which
0e + 1o + 2e couple with 0e + 1o + 2e, because e3nn's compiled ones take several times longer for so few channels.
Signs of e3nn's coefficients differ between its releases; here they are fixed, so that weights stay good.

A neighbour speaks nine rows: one of l = 0, three of l = 1, five of l = 2, and nine are heard. The matrices that couple
them hold the harmonics of the pair's direction; filters weight each way from l to l, for each channel. The gradient is
written out, as that of the light backbone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from relaxion.errors import MissingExtraError
from relaxion.model.backbone import AtomInputs, Backbone, Features
from relaxion.model.layers import (
    Generator,
    InvariantUpdate,
    Messages,
    PairFilter,
    Scratch,
    StackedLinear,
    SummedMessages,
    Surroundings,
    mixed,
    packed,
    unpacked,
)

SIZES = (1, 3, 5)  # components of 0e, 1o, 2e

# (l of the speaker, l of the harmonic, l of the message). The sum is even: nothing else is right under inversion.
PATHS = (
    (0, 0, 0), (0, 1, 1), (0, 2, 2),
    (1, 1, 0), (1, 2, 1), (1, 1, 2),
    (2, 2, 0), (2, 1, 1), (2, 2, 2),
    (1, 0, 1), (2, 0, 2),
)  # fmt: skip
ROWS = (slice(0, 1), slice(1, 4), slice(4, 9))  # of l = 0, 1, 2


class TensorMessages(Messages):
    """Σ_paths filter · (harmonic coupled with what the neighbour speaks). Geometry: `pair_couplings`."""

    n_heard = 9
    numbers_at_once = 16384

    def said(self, scratch: Scratch, near: Tensor, filters: Tensor, geometry: Sequence[Tensor]) -> Tensor:
        vectors, tensors = _coupled(scratch, near, geometry)
        scalars = torch.mul(filters[:, 0:3], near[:, :1], out=scratch("scalars", len(near), 3, near.shape[2]))
        messages = scratch("messages", *near.shape)
        for degree, rows in enumerate(ROWS):
            message = torch.mul(scalars[:, degree, None], geometry[0][:, rows], out=messages[:, rows])
            message.addcmul_(filters[:, 3 + degree, None], vectors[:, rows])
            message.addcmul_(filters[:, 6 + degree, None], tensors[:, rows])
        messages[:, ROWS[1]].addcmul_(filters[:, 9, None], near[:, ROWS[1]])
        messages[:, ROWS[2]].addcmul_(filters[:, 10, None], near[:, ROWS[2]])
        return messages

    def gradients(
        self, scratch: Scratch, near: Tensor, back: Tensor, filters: Tensor, geometry: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        products = scratch("products", *near.shape)
        to_near = scratch("to_near", *near.shape)
        to_filters = scratch("to_filters", *filters.shape)
        vectors, tensors = _coupled(scratch, near, geometry)
        # products with all nine rows at once, then their sums over the rows of each l
        for place, factors in ((0, geometry[0]), (3, vectors), (6, tensors)):
            torch.mul(back, factors, out=products)
            for degree, rows in enumerate(ROWS):
                torch.sum(products[:, rows], dim=1, out=to_filters[:, place + degree])
        torch.mul(to_filters[:, :3], filters[:, :3], out=products[:, :3])
        torch.sum(products[:, :3], dim=1, out=to_near[:, 0])
        to_filters[:, :3].mul_(near[:, :1])
        torch.mul(back[:, 1:], near[:, 1:], out=products[:, 1:])
        for degree, matrix in ((1, geometry[1]), (2, geometry[2])):
            rows = ROWS[degree]
            torch.sum(products[:, rows], dim=1, out=to_filters[:, 8 + degree])
            coupled = vectors  # not needed any more
            for other, those in enumerate(ROWS):
                torch.mul(filters[:, 3 * degree + other, None], back[:, those], out=coupled[:, those])
            torch.mul(filters[:, 8 + degree, None], back[:, rows], out=to_near[:, rows])
            to_near[:, rows] += torch.bmm(matrix.transpose(1, 2), coupled)
        return to_near, to_filters


def _coupled(scratch: Scratch, near: Tensor, geometry: Sequence[Tensor]) -> list[Tensor]:
    """What is spoken as l = 1 and as l = 2, seen through the harmonics, (n_pairs, 9, width) each."""
    ways = zip(("vectors", "tensors"), geometry[1:], ROWS[1:], strict=True)
    return [torch.bmm(matrix, near[:, rows], out=scratch(name, *near.shape)) for name, matrix, rows in ways]


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

    def __init__(self, channels: int, n_pair_inputs: int, n_networks: int, generator: Generator, is_last: bool) -> None:
        super().__init__()
        _o3()  # absent: say so now, not at the first step
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
        ends = (surroundings.centers, surroundings.neighbors)
        words = torch.cat([mixed(layer, t) for layer, t in zip(self.speak, tensors, strict=True)], dim=2)
        heard = SummedMessages.apply(
            TensorMessages(), packed(words), pair_inputs, self.filter(n_networks), *ends, *couplings
        )  # (n_atoms, 9, n_networks · channels)
        # halved: three or four ways lead to each l, and together they must stay of order one
        heard = unpacked(heard * (0.5 * surroundings.normalisers[:, None, None]), n_networks)
        scalars, *higher = [t + h for t, h in zip(tensors, heard.split(SIZES, dim=2), strict=True)]
        scalars, higher = self.update(scalars[:, :, 0], higher)
        return [scalars[:, :, None], *higher]


class TensorFieldBackbone(Backbone):
    """l ≤ 2: sees angles in one round of messages."""

    n_embedded = 3
    layer = TensorFieldLayer

    def forward(self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int) -> Features:
        scalars, vectors = self._embedded(inputs, n_networks)
        vectors, one, other = vectors.chunk(3, dim=3)
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
