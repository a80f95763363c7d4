"""Bounds that act on lengths, so that equivariance survives (R6.5), and the densities that come of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus


def squashed(vectors: Tensor) -> Tensor:
    """û · tanh|u| over the last axis: direction kept, length below 1, smooth at zero."""
    length = _lengths(vectors)[..., None]
    return vectors * (torch.tanh(length) / length)


def log_volume_change(vectors: Tensor) -> Tensor:
    """log |det ∂squashed(u)/∂u| over the last axis of d components.

    The length changes by tanh'(r), the d - 1 directions across it by tanh(r)/r. Exact for long vectors too, where
    1 - tanh² has no digits left: log tanh'(r) = 2 (log 2 - r - softplus(-2r)).
    """
    length = _lengths(vectors)
    along = 2 * (math.log(2) - length - softplus(-2 * length))
    decay = torch.exp(-2 * length)
    across = torch.log(-torch.expm1(-2 * length)) - torch.log1p(decay) - torch.log(length)
    return along + (vectors.shape[-1] - 1) * across


def gaussian_log_density(noise: Tensor, log_deviations: Tensor) -> Tensor:
    """log density of mean + deviation · noise, the same deviation along every one of the last axis' components."""
    components = noise.shape[-1]
    spread = components * (log_deviations + 0.5 * math.log(2 * math.pi))
    return -0.5 * noise.square().sum(dim=-1) - spread


def _lengths(vectors: Tensor) -> Tensor:
    # a vector of 1e-6 is the zero of both precisions: tanh(r)/r is 1 there to the last digit;
    # in units of the largest component, because squares of 1e20 are infinite in float32
    unit = vectors.detach().abs().amax(dim=-1, keepdim=True).clamp_min(1)
    return torch.sqrt((vectors / unit).square().sum(dim=-1) + 1e-12) * unit[..., 0]
