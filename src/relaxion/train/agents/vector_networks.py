"""Networks for control tasks: observations and actions are vectors.

Policies answer in the environment's units, critics take them; inside, every action runs from -1 to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from relaxion.errors import SettingsError
from relaxion.model.roles import CategoricalCritic, Critics, Policy, StochasticPolicy, squashed_log_density
from relaxion.settings import Settings

LOG_DEVIATION_RANGE = (-20.0, 2.0)  # of the Gaussian before tanh, as in the authors' SAC


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


class VectorNetworkSettings(Settings):
    """Size of the networks for vectors."""

    widths: tuple[PositiveInt, ...] = Field(default=(256, 256), min_length=1)
    """Hidden units of each layer, of policy and critics alike. (256, 256) in SAC's paper and TD3's code."""


class Layers(nn.Module):
    """`n_networks` separate multilayer perceptrons of equal shape, run as one batched product per layer.

    Measured 5 to 10 % faster than a loop for two critics of (256, 256) on one core. Activations are overwritten by
    their ReLU: the products do not need them in their backward pass.
    """

    def __init__(self, sizes: Sequence[int], n_networks: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.n_networks = n_networks
        for number, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
            bound = 1 / math.sqrt(n_in)  # torch's own choice for nn.Linear
            weight = torch.empty(n_networks, n_in, n_out)
            bias = torch.empty(n_networks, 1, n_out)
            self.register_parameter(
                f"weight_{number}", nn.Parameter(weight.uniform_(-bound, bound, generator=generator))
            )
            self.register_parameter(f"bias_{number}", nn.Parameter(bias.uniform_(-bound, bound, generator=generator)))

    def forward(self, inputs: Tensor) -> Tensor:
        """The answers of all, (n_networks, batch, n_out)."""
        *layers, (last_weight, last_bias) = self._layers()
        hidden = inputs.expand(self.n_networks, *inputs.shape)
        for weight, bias in layers:
            hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
        if last_weight.shape[2] == 1:  # a batched product with one column takes four times as long as its sum
            return (hidden * last_weight.transpose(1, 2)).sum(dim=2, keepdim=True) + last_bias
        return torch.baddbmm(last_bias, hidden, last_weight)

    def first(self, inputs: Tensor) -> Tensor:
        """The answer of the first alone, (batch, n_out)."""
        *layers, (last_weight, last_bias) = self._layers()
        for weight, bias in layers:
            inputs = torch.relu_(torch.addmm(bias[0], inputs, weight[0]))
        return torch.addmm(last_bias[0], inputs, last_weight[0])

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each layer. From the module's own dictionary: `ParameterList` takes ten times longer."""
        parameters = iter(self._parameters.values())
        return list(zip(parameters, parameters, strict=True))  # pyright: ignore[reportReturnType]


class _Boxed(nn.Module):
    """Layers beside the bounds of their actions, as buffers: a saved policy carries those it was trained for."""

    centre: Tensor
    half_range: Tensor

    def __init__(
        self, sizes: Sequence[int], actions: BoxActions, generator: torch.Generator | None, n_networks: int = 1
    ) -> None:
        super().__init__()
        self.layers = Layers(sizes, n_networks, generator)
        self.register_buffer("centre", actions.centre.clone())
        self.register_buffer("half_range", actions.half_range.clone())

    def _joined(self, observations: Tensor, actions: Tensor) -> Tensor:
        return torch.cat([observations, (actions - self.centre) / self.half_range], dim=-1)


class VectorPolicy(_Boxed, Policy):
    """π(s) = centre + half range · tanh(layers(s))."""

    def __init__(
        self,
        n_observations: int,
        actions: BoxActions,
        widths: Sequence[int] = (256, 256),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__((n_observations, *widths, actions.n_components), actions, generator)

    def forward(self, observations: Tensor) -> Tensor:
        inside = torch.tanh(self.layers(observations)[0])
        return torch.addcmul(self.centre, self.half_range, inside)  # (batch, n_components)


class VectorGaussianPolicy(_Boxed, StochasticPolicy):
    """a = centre + half range · tanh(u), u ~ N(mean(s), deviation(s)).

    The density is that of tanh(u), not of a: so the target entropy -dimensions asks for the same spread whatever the
    units of the action are. Penalty: `penalty_weight` · mean square of the Gaussian's mean, which keeps tanh awake.
    """

    def __init__(
        self,
        n_observations: int,
        actions: BoxActions,
        widths: Sequence[int] = (256, 256),
        generator: torch.Generator | None = None,
        penalty_weight: float = 0.0,
    ) -> None:
        super().__init__((n_observations, *widths, 2 * actions.n_components), actions, generator)
        self.penalty_weight = penalty_weight

    def forward(self, observations: Tensor) -> Tensor:
        mean, _ = self.gaussian(observations)
        return self.centre + self.half_range * torch.tanh(mean)  # (batch, n_components)

    def gaussian(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log deviation before tanh, (batch, n_components) each."""
        mean, log_deviation = self.layers(observations)[0].chunk(2, dim=-1)
        return mean, log_deviation.clamp(*LOG_DEVIATION_RANGE)

    def sample(self, observations: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_deviation = self.gaussian(observations)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        before_tanh = mean + log_deviation.exp() * noise
        log_densities = squashed_log_density(before_tanh, noise, log_deviation)
        penalties = self.penalty_weight * mean.square().mean(dim=-1)
        return self.centre + self.half_range * torch.tanh(before_tanh), log_densities, penalties


class VectorCritics(_Boxed, Critics):
    """`n_critics` values of observation and action."""

    def __init__(
        self,
        n_observations: int,
        actions: BoxActions,
        widths: Sequence[int] = (256, 256),
        n_critics: int = 2,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__((n_observations + actions.n_components, *widths, 1), actions, generator, n_critics)

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.layers(self._joined(observations, actions))[:, :, 0].T  # (batch, n_critics)

    def first(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.layers.first(self._joined(observations, actions))[:, 0]  # (batch,)


class VectorCategoricalCritic(_Boxed, CategoricalCritic):
    """Logits of `n_bins` value bins for observation and action."""

    def __init__(
        self,
        n_observations: int,
        actions: BoxActions,
        widths: Sequence[int] = (256, 256),
        n_bins: int = 51,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__((n_observations + actions.n_components, *widths, n_bins), actions, generator)

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.layers(self._joined(observations, actions))[0]  # (batch, n_bins)
