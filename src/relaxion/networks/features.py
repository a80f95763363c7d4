"""What goes into a backbone and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def lengths(vectors: Tensor, floor: float) -> Tensor:
    """√(|v|² + floor²) over the last axis: smooth at zero, never zero."""
    return torch.sqrt(vectors.square().sum(dim=-1) + floor * floor)


def softened(vectors: Tensor) -> Tensor:
    """v · log(1 + |v|) / |v| over the last axis: v where it is short, its logarithm's length where it is long."""
    size = lengths(vectors, 1e-6)[..., None]
    return vectors * (torch.log1p(size) / size)
