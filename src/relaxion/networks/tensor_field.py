"""The tensor-field backbone on e3nn: scalars, vectors and l = 2 tensors (Thomas et al. 2018).

Spherical harmonics and coupling coefficients are e3nn's; the products are written out for the eleven ways in which
0e + 1o + 2e couple with 0e + 1o + 2e, because e3nn's compiled ones take several times longer for so few channels.
Signs of e3nn's coefficients differ between its releases; here they are fixed, so that weights stay good.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from relaxion.errors import MissingExtraError
from relaxion.networks.backbone import Backbone, BackboneSettings
from relaxion.networks.features import AtomInputs, Features
from relaxion.networks.stacked import PairFilter, StackedLinear, StackedMLP, mixed, packed, unpacked
from relaxion.networks.surroundings import Surroundings
from relaxion.networks.tensor_messages import PATHS, TensorMessages
from relaxion.networks.update import InvariantUpdate

SIZES = (1, 3, 5)  # components of 0e, 1o, 2e


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
