"""The light backbone: scalars and vectors only, plain PyTorch, after PaiNN (Schütt, Unke, Gastegger 2021).

The gradient of its messages is written out, in pieces that fit into the processor's cache. What autograd would do holds
some thirty tensors of pairs × channels, each too large for the cache: 2 to 3 times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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

NUMBERS_AT_ONCE = 24576  # pairs · width in a piece


class LightMessages(torch.autograd.Function):
    """Σ_j of (f₀ w₀, f₁ w₁ v + f₂ w₂ r̂): f filters of the pair, w words and v vectors of neighbour j."""

    @staticmethod
    def forward(
        ctx: Any,
        spoken: Tensor,  # (n_atoms, 6, width), words and vectors of each atom
        pair_inputs: Tensor,  # (n_pairs, n_inputs)
        weight: Tensor,  # (n_inputs, 3 · width), of the filters
        directions: Tensor,  # (n_pairs, 3)
        centers: Tensor,  # (n_pairs,) int64
        neighbors: Tensor,  # (n_pairs,) int64
    ) -> Tensor:
        """(n_atoms, 4, width): a scalar and a vector."""
        ctx.save_for_backward(spoken, pair_inputs, weight, directions, centers, neighbors)
        width, scratch = spoken.shape[2], Scratch(spoken, len(centers), NUMBERS_AT_ONCE)
        heard = spoken.new_zeros((len(spoken), 4, width))
        for part, count in scratch.pieces():
            near = torch.index_select(spoken, 0, neighbors[part], out=scratch("near", count, 6, width))
            words = torch.mm(pair_inputs[part], weight, out=scratch("words", count, 3 * width)).view(-1, 3, width)
            words.mul_(near[:, :3])
            messages = scratch("messages", count, 4, width)
            messages[:, 0] = words[:, 0]
            vectors = torch.mul(words[:, 1:2], near[:, 3:], out=messages[:, 1:])
            vectors.addcmul_(words[:, 2:3], directions[part, :, None])
            heard.index_add_(0, centers[part], messages)
        return heard

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        spoken, pair_inputs, weight, directions, centers, neighbors = ctx.saved_tensors
        width, scratch = spoken.shape[2], Scratch(spoken, len(centers), NUMBERS_AT_ONCE)
        to_spoken, to_weight = torch.zeros_like(spoken), torch.zeros_like(weight)
        to_pairs = torch.empty_like(pair_inputs) if ctx.needs_input_grad[1] else None
        for part, count in scratch.pieces():
            near = torch.index_select(spoken, 0, neighbors[part], out=scratch("near", count, 6, width))
            back = torch.index_select(gradients[0], 0, centers[part], out=scratch("back", count, 4, width))
            filters = torch.mm(pair_inputs[part], weight, out=scratch("filters", count, 3 * width)).view(-1, 3, width)
            products = scratch("products", count, 3, width)
            to_words = scratch("to_words", count, 3, width)
            to_words[:, 0] = back[:, 0]
            torch.sum(torch.mul(back[:, 1:], near[:, 3:], out=products), dim=1, out=to_words[:, 1])
            torch.sum(torch.mul(back[:, 1:], directions[part, :, None], out=products), dim=1, out=to_words[:, 2])
            to_near = scratch("to_near", count, 6, width)
            torch.mul(to_words, filters, out=to_near[:, :3])
            torch.mul((filters[:, 1] * near[:, 1])[:, None], back[:, 1:], out=to_near[:, 3:])
            to_spoken.index_add_(0, neighbors[part], to_near)
            to_filters = to_words.mul_(near[:, :3]).view(-1, 3 * width)
            to_weight.addmm_(pair_inputs[part].T, to_filters)
            if to_pairs is not None:
                torch.mm(to_filters, weight.T, out=to_pairs[part])
        return to_spoken, to_pairs, to_weight, None, None, None


class LightLayer(nn.Module):
    """Neighbours speak, then the atom thinks."""

    def __init__(
        self, settings: BackboneSettings, n_pair_inputs: int, n_networks: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        channels = settings.channels
        self.words = StackedMLP(channels, channels, 3 * channels, n_networks, generator)
        self.filter = PairFilter(n_pair_inputs, 3, channels, n_networks, generator)
        self.update = InvariantUpdate(channels, 1, 1, n_networks, generator)

    def forward(
        self, scalars: Tensor, vectors: Tensor, surroundings: Surroundings, pair_inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """scalars (n_networks, n_atoms, channels), vectors (n_networks, n_atoms, 3, channels)."""
        n_networks, n_atoms, channels = scalars.shape
        words = self.words(scalars).view(n_networks, n_atoms, 3, channels)
        spoken = packed(torch.cat([words, vectors], dim=2))
        heard = LightMessages.apply(
            spoken,
            pair_inputs,
            self.filter(n_networks),
            surroundings.directions,
            surroundings.centers,
            surroundings.neighbors,
        )  # (n_atoms, 4, n_networks · channels)
        heard = unpacked(heard * surroundings.normalisers[:, None, None], n_networks)
        scalars, (vectors,) = self.update(scalars + heard[:, :, 0], [vectors + heard[:, :, 1:]])
        return scalars, vectors


class LightBackbone(Backbone):
    """l ≤ 1: quick on a CPU, and needs nothing but PyTorch where a policy is used."""

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
        self.embed_scalars = StackedMLP(n_scalars, channels, channels, n_networks, generator)
        self.embed_vectors = StackedLinear(n_vectors, channels, n_networks, generator, bias=False)
        self.layers = nn.ModuleList(
            [LightLayer(settings, n_pair_inputs, n_networks, generator) for _ in range(settings.n_layers)]
        )

    def forward(self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int) -> Features:
        scalars = self.embed_scalars(inputs.scalars.expand(n_networks, -1, -1))
        vectors = mixed(self.embed_vectors, inputs.vectors.transpose(1, 2).expand(n_networks, -1, -1, -1))
        for layer in self.layers:
            scalars, vectors = layer(scalars, vectors, surroundings, pair_inputs)
        return Features(scalars, vectors.transpose(2, 3))
