"""What a backbone is: one shape of constructor, what goes in, what comes out; chosen by a word."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from relaxion.networks.surroundings import Surroundings
from relaxion.settings import Settings


class BackboneSettings(Settings):
    """Size and reach of the network that looks at atoms."""

    backbone: Literal["light", "tensor_field"] = "light"
    """light: scalars and vectors, plain PyTorch. tensor_field: up to l = 2, on e3nn; several times slower."""

    channels: int = Field(default=16, ge=1)
    """Scalars, vectors (and l = 2 tensors) of each atom. A multiple of 16 fills the processor's registers."""

    n_layers: int = Field(default=2, ge=1)
    """Rounds of messages: an atom sees `n_layers` · cutoff far."""

    cutoff_angstrom: float = Field(default=4.5, gt=0)
    """How far an atom sees in one round: second neighbours in most metals. Every neighbour within it counts."""

    n_radial: int = Field(default=8, ge=2)
    """Functions of the reduced distance, from 0.5 to 2.5 sums of covalent radii."""

    stiffness_ev_per_angstrom2: float = Field(default=5.0, gt=0)
    """Unit in which moves are compared with forces: F/k is the step a usual metal bond asks for."""


@dataclass(frozen=True, eq=False)
class AtomInputs:
    """What is known of each atom before it looks around."""

    scalars: Tensor  # (n_atoms, n_scalars), the same in every frame
    vectors: Tensor  # (n_atoms, n_vectors, 3), turning with the structure
    force_scales: Tensor  # (n_atoms,) eV/Å, size of the forces around each atom; never 0


@dataclass(frozen=True, eq=False)
class Features:
    """What each atom knows after it has looked around, once for each of the networks that run side by side."""

    scalars: Tensor  # (n_networks, n_atoms, channels), the same in every frame
    vectors: Tensor  # (n_networks, n_atoms, channels, 3), turning with the structure


class Backbone(nn.Module, ABC):
    """Atoms and pairs -> what each atom knows. Sees no environment information, ever (R6.3).

    All are made as `make_backbone` makes them.
    """

    @abstractmethod
    def forward(
        self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int
    ) -> Features: ...


def make_backbone(
    settings: BackboneSettings,
    n_scalars: int,
    n_vectors: int,
    n_pair_extras: int,
    n_networks: int,
    generator: torch.Generator | None,
) -> Backbone:
    """The backbone that the settings name. e3nn is loaded only where it is asked for."""
    if settings.backbone == "light":
        from relaxion.networks.light import LightBackbone as Chosen
    else:
        from relaxion.networks.tensor_field import TensorFieldBackbone as Chosen
    return Chosen(settings, n_scalars, n_vectors, n_pair_extras, n_networks, generator)
