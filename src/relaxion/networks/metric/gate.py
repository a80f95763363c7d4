"""The knobs of a metric policy: how boldly, how stiffly at least, and how far a whole structure moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from relaxion.errors import SettingsError
from relaxion.networks.environment_information import check_names, environment_information
from relaxion.networks.stacked import StackedMLP
from relaxion.structures import State

N_KNOBS = 3


@dataclass(frozen=True, eq=False)
class Knobs:
    """Three positive factors per structure."""

    scales: Tensor  # (n_structures,) of the whole move, R6.4's factor
    floors: Tensor  # (n_structures,) of the floor of the stiffness
    trusts: Tensor  # (n_structures,) of the greatest lengths, at most 1

    @classmethod
    def of(cls, values: Tensor, largest: float) -> Knobs:
        """From numbers between -1 and 1, (n_structures, 3)."""
        logarithm = math.log(largest)
        scales, floors = torch.exp(logarithm * values[:, :2]).unbind(dim=1)
        return cls(scales, floors, torch.exp(logarithm * (values[:, 2] - 1) / 2))


class MetricGate(nn.Module):
    """Environment information -> where the knobs stand, before tanh brings them between -1 and 1."""

    def __init__(self, names: Sequence[str], n_hidden: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not names:
            raise SettingsError(
                "a gate was asked for with no environment information; name some, e.g. "
                "environment_information = ['log_largest_force'], or leave the gate out"
            )
        check_names(names)
        self.names = tuple(names)
        self.network = StackedMLP(len(names), n_hidden, N_KNOBS, 1, generator)
        assert self.network.answer.bias is not None
        with torch.no_grad():  # begins near the plain policy: factors of about 1, trust of three quarters
            self.network.answer.weight.mul_(0.1)
            self.network.answer.bias[..., 2] = 1.0

    def forward(self, state: State) -> Tensor:
        """(n_structures, 3)."""
        information = environment_information(state, self.names, self.network.answer.weight.dtype)
        return self.network(information[None])[0]
