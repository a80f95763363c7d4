"""Actions that are vectors in a box: any finite bounds, different for each component, not only around zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relaxion.errors import SettingsError


class BoxActions:
    """The action domain of control tasks. Noise is measured in half ranges, so 0.1 means the same in every unit."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low = torch.as_tensor(low, dtype=torch.float32)  # (n_components,)
        self.high = torch.as_tensor(high, dtype=torch.float32)  # (n_components,)
        if self.low.ndim != 1 or self.low.shape != self.high.shape or len(self.low) == 0:
            raise SettingsError(
                f"bounds of actions must be two vectors of one length, got {tuple(self.low.shape)} "
                f"and {tuple(self.high.shape)}; flatten the action space first"
            )
        if not bool((torch.isfinite(self.low) & torch.isfinite(self.high) & (self.low < self.high)).all()):
            raise SettingsError(
                f"actions need finite bounds with low < high, got low {self.low.tolist()}, high {self.high.tolist()}; "
                "rescale the action space, e.g. with gymnasium.wrappers.RescaleAction"
            )
        self.centre = self.low / 2 + self.high / 2  # halved first: the sum of two large bounds may overflow
        self.half_range = self.high / 2 - self.low / 2

    @property
    def n_components(self) -> int:
        return len(self.low)

    def bound(self, actions: Tensor) -> Tensor:
        """The nearest actions inside the box."""
        return torch.clamp(actions, self.low, self.high)  # (batch, n_components)

    def perturb(
        self,
        actions: Tensor,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: Tensor | None = None,  # noqa: ARG002  one unit for all
    ) -> Tensor:
        """Actions + half range · clip(N(0, scale), ±clip), not yet bounded."""
        noise = scale * torch.randn(actions.shape, generator=generator, dtype=actions.dtype)
        if clip is not None:
            noise = noise.clamp(-clip, clip)
        return actions + self.half_range * noise  # (batch, n_components)

    def random(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the box, one action per observation."""
        fraction = torch.rand((len(observations), self.n_components), generator=generator)
        return self.bound(torch.lerp(self.low, self.high, fraction))  # (batch, n_components)

    def dimensions(self, observations: Tensor) -> Tensor:
        """n_components for each observation."""
        return torch.full((len(observations),), float(self.n_components))  # (batch,)
