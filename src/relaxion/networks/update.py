"""The part of a layer where an atom thinks for itself: invariants gate what turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from relaxion.networks.stacked import StackedLinear, StackedMLP, mixed


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
