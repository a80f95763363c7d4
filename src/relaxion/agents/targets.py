"""Pieces that several agents share, as functions: targets, slow copies, one step down a loss."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from relaxion.agents.adam import Adam
from relaxion.errors import SettingsError

Network = TypeVar("Network", bound=nn.Module)


def bellman_target(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """y = r + γ (1 - d) V(s'); `discounts` already holds γ (1 - d), or γⁿ (1 - d) for n steps. (batch,)"""
    return torch.addcmul(rewards, discounts, next_values)


def project_onto_support(rewards: Tensor, discounts: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """The distribution of r + γ z, z ~ `probabilities`, moved onto evenly spaced bins (R5.3). (batch, n_bins)

    Bin i takes Σ_j p_j · max(0, 1 - |b_j - i|), b_j the place of r + γ z_j counted in bins and kept within the ends.
    Places, not values: differences of neighbouring places are exact in float32, so no mass is lost or made, on
    grid points and beyond the ends too (the usual floor and ceil give both neighbours nothing there).
    """
    n_bins = len(support)
    if probabilities.shape[1] != n_bins:
        raise SettingsError(f"the critic has {probabilities.shape[1]} bins, the support {n_bins}: make n_bins agree")
    spacing = (support[-1] - support[0]) / (n_bins - 1)
    moved = rewards[:, None] + discounts[:, None] * support  # (batch, n_bins) values
    places = ((moved - support[0]) / spacing).clamp(0, n_bins - 1)  # (batch, n_bins)
    numbers = torch.arange(n_bins, dtype=places.dtype, device=places.device)
    shares = (1 - (places[:, None, :] - numbers[:, None]).abs()).clamp_min(0)  # (batch, to bin, from bin)
    return torch.bmm(shares, probabilities[:, :, None])[:, :, 0]


def target_copy(network: Network) -> Network:
    """A copy that follows by `soft_update` only."""
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def soft_update(target: nn.Module, online: nn.Module, rate: float) -> None:
    """θ' ← τ θ + (1 - τ) θ'."""
    slow, fast = zip(*zip(target.parameters(), online.parameters(), strict=True), strict=True)
    torch._foreach_lerp_(slow, fast, rate)  # pyright: ignore[reportPrivateImportUsage]


def descend(loss: Tensor, optimizer: Adam) -> Tensor:
    """One step down the loss for the optimizer's own parameters; the norm of the gradient, ().

    Gradients exist only for the parameters that step, and only here: the critics stay untouched by the policy's
    loss (R2.5), no leftovers can meet the policy's own (R4.2), and the work for all others is saved.
    """
    gradients = torch.autograd.grad(loss, optimizer.parameters, allow_unused=True, materialize_grads=True)
    optimizer.step(gradients)
    return torch.stack(torch._foreach_norm(gradients)).norm()  # pyright: ignore[reportPrivateImportUsage]
