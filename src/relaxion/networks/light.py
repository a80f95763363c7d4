"""The light backbone: scalars and vectors only, plain PyTorch, after PaiNN (Schütt, Unke, Gastegger 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relaxion.networks.backbone import Backbone, BackboneSettings
from relaxion.networks.features import AtomInputs, Features
from relaxion.networks.light_messages import LightMessages
from relaxion.networks.stacked import PairFilter, StackedLinear, StackedMLP, mixed, packed, unpacked
from relaxion.networks.surroundings import Surroundings
from relaxion.networks.update import InvariantUpdate


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
