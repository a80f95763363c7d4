"""The environment gate: how boldly a whole structure moves, one positive factor each (R6.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from relaxion.errors import SettingsError
from relaxion.networks.environment_information import check_names, environment_information
from relaxion.networks.stacked import StackedMLP
from relaxion.structures import State


class Gate(nn.Module):
    """exp(log(largest) · tanh(network(information))): between 1/largest and largest, never 0."""

    def __init__(
        self, names: Sequence[str], n_hidden: int, largest: float, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if not names:
            raise SettingsError(
                "a gate was asked for with no environment information; name some, e.g. "
                "environment_information = ['log_largest_force'], or leave the gate out"
            )
        check_names(names)
        self.names, self.log_largest = tuple(names), math.log(largest)
        self.network = StackedMLP(len(names), n_hidden, 1, 1, generator)
        with torch.no_grad():  # begins near 1: the plain network's moves
            self.network.answer.weight.mul_(0.1)

    def forward(self, state: State) -> Tensor:
        """One factor per structure, (n_structures,)."""
        information = environment_information(state, self.names, self.network.answer.weight.dtype)
        return torch.exp(self.log_largest * torch.tanh(self.network(information[None])[0, :, 0]))
