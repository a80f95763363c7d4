"""Symmetric strains as vectors of six orthonormal components: their length is the Frobenius norm in every frame."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def strain_vectors(strains: Tensor) -> Tensor:
    """(n, 3, 3) symmetric -> (n, 6): xx, yy, zz, √2 yz, √2 xz, √2 xy."""
    diagonal = strains.diagonal(dim1=1, dim2=2)
    across = torch.stack([strains[:, 1, 2], strains[:, 0, 2], strains[:, 0, 1]], dim=1)
    return torch.cat([diagonal, math.sqrt(2) * across], dim=1)


def strain_matrices(vectors: Tensor) -> Tensor:
    """(n, 6) -> (n, 3, 3), the opposite of `strain_vectors`."""
    xx, yy, zz, yz, xz, xy = (vectors * vectors.new_tensor([1, 1, 1, *[math.sqrt(0.5)] * 3])).unbind(dim=1)
    return torch.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], dim=1).view(-1, 3, 3)


def symmetric_outer(one: Tensor, other: Tensor) -> Tensor:
    """Half of a⊗b + b⊗a over the last axis: trace (l = 0) and deviator (l = 2) of two vectors."""
    product = one[..., :, None] * other[..., None, :]
    return (product + product.transpose(-1, -2)) / 2
