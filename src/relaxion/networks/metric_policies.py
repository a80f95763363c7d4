"""Policies that follow a metric: Move = bounded(B⁻¹F)."""

from __future__ import annotations

import torch
from torch import Tensor

from relaxion.networks.metric import Frame, MetricNetwork, MetricSettings
from relaxion.networks.metric_solve import solve
from relaxion.networks.move_actions import MoveActions
from relaxion.networks.roles import Policy
from relaxion.networks.strains import strain_matrices
from relaxion.structures import Move, State


class MetricPolicy(Policy):
    """π(s) = B(s)⁻¹F, shortened as a whole to the bounds."""

    bounds: Tensor

    def __init__(
        self,
        actions: MoveActions,
        settings: MetricSettings | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.network = MetricNetwork(settings, generator)
        self.register_buffer("bounds", torch.tensor([actions.max_displacement_angstrom, actions.max_strain]))

    def unbounded(self, state: State) -> Move:
        frame = Frame.of(state, self.network.settings, self.network.dtype)
        answer = solve(self.network.stiffness(frame), frame.pulls)
        return Move(answer.atoms, strain_matrices(answer.cells))

    def forward(self, observations: State) -> Move:
        move = self.unbounded(observations)
        return move.bounded(observations.structures, float(self.bounds[0]), float(self.bounds[1]))
