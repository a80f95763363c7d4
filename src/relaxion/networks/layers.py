"""Layers of several networks of equal shape, run as one product. The input says how many of them answer.

Twin critics have separate parameters but the same atoms: pairs, gathers and sums are made once for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class Scratch:
    """Buffers for the pieces of a long list of pairs, used again for piece after piece; lives as long as one call.

    Touching fresh memory takes longer than the arithmetic done in it.
    """

    def __init__(self, like: Tensor, n_pairs: int, numbers_at_once: int) -> None:
        self.like, self.n_pairs = like, n_pairs
        self.size = 1 + numbers_at_once // like.shape[-1]  # pairs in a piece; a row of `like` is a channel vector
        self.held: dict[str, Tensor] = {}

    def pieces(self) -> Iterator[tuple[slice, int]]:
        """Where each piece lies, and how many pairs it has."""
        for first in range(0, self.n_pairs, self.size):
            count = min(self.size, self.n_pairs - first)
            yield slice(first, first + count), count

    def __call__(self, name: str, count: int, *shape: int) -> Tensor:
        """(count, …), whatever was in it last; two names never share memory."""
        if name not in self.held:
            self.held[name] = self.like.new_empty((self.size, *shape))
        return self.held[name][:count]


def uniform_parameter(shape: tuple[int, ...], n_in: int, generator: torch.Generator | None) -> nn.Parameter:
    """Uniform within ±√(3 / n_in): keeps the variance of order one through a layer."""
    bound = math.sqrt(3 / n_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))


class StackedLinear(nn.Module):
    """y_k = x_k W_k + b_k for each network k."""

    def __init__(
        self, n_in: int, n_out: int, n_networks: int, generator: torch.Generator | None, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = uniform_parameter((n_networks, n_in, n_out), n_in, generator)
        self.bias = nn.Parameter(torch.zeros(n_networks, 1, n_out)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """(n_networks or fewer, n_rows, n_in) -> (same, n_rows, n_out): fewer inputs ask the first networks only."""
        number = len(inputs)
        if self.bias is None:
            return torch.bmm(inputs, _first(self.weight, number))
        return torch.baddbmm(_first(self.bias, number), inputs, _first(self.weight, number))


def _first(parameter: Tensor, number: int) -> Tensor:
    return parameter if number == len(parameter) else parameter[:number]


def tamed(scalars: Tensor) -> Tensor:
    """x / √(1 + mean x²) over the channels: itself where it is small, of order one where it is not.

    Without it scalars scale vectors and vectors scalars in turns, and an unusual state grows with a high power.
    """
    return scalars * torch.rsqrt(1 + scalars.square().mean(dim=-1, keepdim=True))


class StackedMLP(nn.Module):
    """Two layers with SiLU between them, on tamed inputs."""

    def __init__(
        self, n_in: int, n_hidden: int, n_out: int, n_networks: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.hidden = StackedLinear(n_in, n_hidden, n_networks, generator)
        self.answer = StackedLinear(n_hidden, n_out, n_networks, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answer(silu(self.hidden(tamed(inputs))))


class PairFilter(nn.Module):
    """Weights of the messages along each pair, from what is known of the pair: linear, all networks in one product."""

    def __init__(
        self, n_in: int, n_parts: int, channels: int, n_networks: int, generator: torch.Generator | None
    ) -> None:
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

    def __init__(
        self, channels: int, n_tensors: int, n_changed: int, n_networks: int, generator: torch.Generator | None
    ) -> None:
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
