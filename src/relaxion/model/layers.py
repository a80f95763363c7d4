"""Layers of several networks of equal shape, run as one product, and messages between atoms.

The input says how many of the networks answer. Twin critics have separate parameters but the same atoms: pairs, gathers
and sums are made once for both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

Generator: TypeAlias = torch.Generator | None
"""What parameters are drawn with; None: torch's own."""


class Scratch:
    """Buffers for the pieces of a long list of pairs, used again for piece after piece; lives as long as one call.

    Touching fresh memory takes longer than the arithmetic done in it.
    """

    def __init__(self, like: Tensor, n_pairs: int, numbers_at_once: int) -> None:
        self.like, self.n_pairs = like, n_pairs
        self.size = 1 + numbers_at_once // like.shape[-1]  # pairs in a piece; a row of `like` is a channel vector
        self.held: dict[str, Tensor] = {}

    def pieces(self) -> Iterator[slice]:
        """Where each piece lies."""
        for first in range(0, self.n_pairs, self.size):
            yield slice(first, min(first + self.size, self.n_pairs))

    def __call__(self, name: str, count: int, *shape: int) -> Tensor:
        """(count, …), whatever was in it last; two names never share memory."""
        if name not in self.held:
            self.held[name] = self.like.new_empty((self.size, *shape))
        return self.held[name][:count]

    def gathered(self, name: str, values: Tensor, rows: Tensor) -> Tensor:
        """values[rows]."""
        return torch.index_select(values, 0, rows, out=self(name, len(rows), *values.shape[1:]))

    def filters(self, pair_inputs: Tensor, weight: Tensor) -> Tensor:
        """(pairs of the piece, n_parts, width)."""
        out = self("filters", len(pair_inputs), weight.shape[1])
        return torch.mm(pair_inputs, weight, out=out).view(len(out), -1, self.like.shape[-1])


class Messages(ABC):
    """What neighbours say along each pair, for one piece of the pairs at a time; and the gradient of that.

    What autograd would do holds some thirty tensors of pairs × channels, each too large for the processor's cache: 2 to
    3 times slower.
    """

    n_heard: int  # rows of a message
    numbers_at_once: int  # pairs · width in a piece

    @abstractmethod
    def said(self, scratch: Scratch, near: Tensor, filters: Tensor, geometry: Sequence[Tensor]) -> Tensor:
        """Messages of the piece, (n_pairs, n_heard, width), from what the neighbours speak; may overwrite filters."""

    @abstractmethod
    def gradients(
        self, scratch: Scratch, near: Tensor, back: Tensor, filters: Tensor, geometry: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of what the neighbours speak, and of the filters, from the gradient of the messages."""


class SummedMessages(torch.autograd.Function):
    """Σ_j over the neighbours of each atom, (n_atoms, n_heard, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Messages,
        spoken: Tensor,  # (n_atoms, rows, width)
        pair_inputs: Tensor,  # (n_pairs, n_inputs)
        weight: Tensor,  # (n_inputs, n_parts · width), of the filters
        centers: Tensor,  # (n_pairs,) int64
        neighbors: Tensor,  # (n_pairs,) int64
        *geometry: Tensor,  # (n_pairs, …), not differentiated
    ) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(spoken, pair_inputs, weight, centers, neighbors, *geometry)
        scratch = Scratch(spoken, len(centers), kind.numbers_at_once)
        heard = spoken.new_zeros((len(spoken), kind.n_heard, spoken.shape[2]))
        for part in scratch.pieces():
            near = scratch.gathered("near", spoken, neighbors[part])
            filters = scratch.filters(pair_inputs[part], weight)
            heard.index_add_(0, centers[part], kind.said(scratch, near, filters, [g[part] for g in geometry]))
        return heard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        spoken, pair_inputs, weight, centers, neighbors, *geometry = ctx.saved_tensors
        scratch = Scratch(spoken, len(centers), ctx.kind.numbers_at_once)
        to_spoken, to_weight = torch.zeros_like(spoken), torch.zeros_like(weight)
        to_pairs = torch.empty_like(pair_inputs) if ctx.needs_input_grad[2] else None
        for part in scratch.pieces():
            near = scratch.gathered("near", spoken, neighbors[part])
            back = scratch.gathered("back", gradients[0], centers[part])
            filters = scratch.filters(pair_inputs[part], weight)
            to_near, to_filters = ctx.kind.gradients(scratch, near, back, filters, [g[part] for g in geometry])
            to_spoken.index_add_(0, neighbors[part], to_near)
            flat = to_filters.view(len(near), -1)
            to_weight.addmm_(pair_inputs[part].T, flat)
            if to_pairs is not None:
                torch.mm(flat, weight.T, out=to_pairs[part])
        return None, to_spoken, to_pairs, to_weight, *[None] * (2 + len(geometry))


def uniform_parameter(shape: tuple[int, ...], n_in: int, generator: Generator) -> nn.Parameter:
    """Uniform within ±√(3 / n_in): keeps the variance of order one through a layer."""
    bound = math.sqrt(3 / n_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class StackedLinear(nn.Module):
    """y_k = x_k W_k + b_k for each network k."""

    def __init__(self, n_in: int, n_out: int, n_networks: int, generator: Generator, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = uniform_parameter((n_networks, n_in, n_out), n_in, generator)
        self.bias = nn.Parameter(torch.zeros(n_networks, 1, n_out)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """(n_networks or fewer, n_rows, n_in) -> (same, n_rows, n_out): fewer inputs ask the first networks only."""
        weight = _first(self.weight, len(inputs))
        if self.bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(_first(self.bias, len(inputs)), inputs, weight)


def _first(parameter: Tensor, number: int) -> Tensor:
    return parameter if number == len(parameter) else parameter[:number]


def tamed(scalars: Tensor) -> Tensor:
    """x / √(1 + mean x²) over the channels: itself where it is small, of order one where it is not.

    Without it scalars scale vectors and vectors scalars in turns, and an unusual state grows with a high power.
    """
    return scalars * torch.rsqrt(1 + scalars.square().mean(dim=-1, keepdim=True))


class StackedMLP(nn.Module):
    """Two layers with SiLU between them, on tamed inputs."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.hidden = StackedLinear(n_in, n_hidden, n_networks, generator)
        self.answer = StackedLinear(n_hidden, n_out, n_networks, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answer(silu(self.hidden(tamed(inputs))))


class PairFilter(nn.Module):
    """Weights of the messages along each pair, from what is known of the pair: linear, all networks in one product."""

    def __init__(self, n_in: int, n_parts: int, channels: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        # few of the radial functions are awake at any distance: a larger start than for a usual layer
        self.weight = uniform_parameter((n_networks, n_in, n_parts, channels), max(1, n_in // 4), generator)

    def forward(self, n_networks: int) -> Tensor:
        """The matrix that takes what is known of a pair to its weights, (n_in, n_parts · n_networks · channels)."""
        return _first(self.weight, n_networks).permute(1, 2, 0, 3).flatten(1)


def packed(values: Tensor) -> Tensor:
    """(n_networks, n_atoms, rows, channels) -> (n_atoms, rows, n_networks · channels), as pairs want it."""
    n_networks, n_atoms, rows, channels = values.shape
    return values.permute(1, 2, 0, 3).reshape(n_atoms, rows, n_networks * channels)


def unpacked(values: Tensor, n_networks: int) -> Tensor:
    """The opposite of `packed`."""
    n_atoms, rows, width = values.shape
    return values.view(n_atoms, rows, n_networks, width // n_networks).permute(2, 0, 1, 3)


def mixed(layer: nn.Module, values: Tensor) -> Tensor:
    """The layer on the channels of (n_networks, n_atoms, rows, channels): the same for every row."""
    n_networks, n_atoms, rows, _ = values.shape
    return layer(values.reshape(n_networks, n_atoms * rows, -1)).view(n_networks, n_atoms, rows, -1)


class InvariantUpdate(nn.Module):
    """Scalars learn the lengths of the tensors and the products between them; the tensors are scaled by scalars.

    Only the first `n_changed` tensors are: one that nobody reads afterwards would have dead parameters.
    """

    def __init__(self, channels: int, n_tensors: int, n_changed: int, n_networks: int, generator: Generator) -> None:
        super().__init__()
        self.channels, self.n_changed = channels, n_changed
        self.pairs = nn.ModuleList(
            [StackedLinear(channels, 2 * channels, n_networks, generator, bias=False) for _ in range(n_tensors)]
        )
        self.think = StackedMLP(
            (1 + 2 * n_tensors) * channels, channels, (1 + n_tensors + n_changed) * channels, n_networks, generator
        )

    def forward(self, scalars: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Scalars (n_networks, n_atoms, channels), tensors (n_networks, n_atoms, components, channels)."""
        halves = [mixed(layer, t).chunk(2, dim=-1) for layer, t in zip(self.pairs, tensors, strict=True)]
        sizes = [torch.sqrt(one.square().sum(dim=2) + 1e-6) for one, _ in halves]
        # by the length of one: a product of two lengths would grow with the square of the forces
        products = [(one * other).sum(dim=2) / size for (one, other), size in zip(halves, sizes, strict=True)]
        thoughts = self.think(torch.cat([scalars, *sizes, *products], dim=2)).split(self.channels, dim=2)
        weights, gates = thoughts[1 : 1 + len(halves)], thoughts[1 + len(halves) :]
        scalars = scalars + thoughts[0]
        for product, weight in zip(products, weights, strict=True):
            scalars = scalars + weight * product
        changed = [
            t + g[:, :, None] * u for t, g, (_, u) in zip(tensors[: self.n_changed], gates, halves, strict=False)
        ]
        return scalars, changed
