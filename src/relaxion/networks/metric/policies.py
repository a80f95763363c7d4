"""Policies that follow a metric: the step is what the stiffness makes of the forces."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from relaxion.networks.metric.damping import damping
from relaxion.networks.metric.gate import N_KNOBS, Knobs, MetricGate
from relaxion.networks.metric.network import Frame, MetricNetwork, MetricSettings
from relaxion.networks.metric.solve import solve
from relaxion.networks.metric.stiffness import Stiffness, Unknowns
from relaxion.networks.move_actions import MoveActions
from relaxion.networks.roles import Policy, StochasticPolicy
from relaxion.networks.strains import strain_matrices
from relaxion.structures import Move, State

LOG_DEVIATION_RANGE = (-10.0, 2.0)  # before tanh


class MetricActions(MoveActions):
    """Moves chosen by turning three knobs per structure: that many dimensions has the choice (SAC's entropy)."""

    def dimensions(self, observations: State) -> Tensor:
        return torch.full((observations.n_structures,), float(N_KNOBS))


class MetricPolicy(Policy):
    """π(s) = scale · B(s)⁻¹F, shortened as a whole to trust · bounds: one factor per structure, so always downhill.

    With `damped` it is also shortened where the last move met more stiffness than B has (`metric_damping.py`).

    Without environment information there is no gate: scale and trust are exactly 1 and the floor is the network's.
    """

    bounds: Tensor

    def __init__(
        self,
        actions: MoveActions,
        settings: MetricSettings | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings = settings or MetricSettings()
        self.network = MetricNetwork(settings, generator)
        self._make_more()
        # last, so that it takes no draws from the others
        names = settings.environment_information
        self.gate = MetricGate(names, settings.n_information_hidden, generator) if names else None
        # a buffer: a saved policy carries the bounds it was trained for
        self.register_buffer("bounds", torch.tensor([actions.max_displacement_angstrom, actions.max_strain]))

    def _make_more(self) -> None:
        """Parameters of a subclass."""

    def forward(self, observations: State) -> Move:
        return self.move(observations, self.knobs(observations))

    def knobs(self, state: State) -> Knobs | None:
        """Where the gate puts the knobs; None where there is no gate."""
        if self.gate is None:
            return None
        return Knobs.of(torch.tanh(self.gate(state)), self.settings.largest_gate_factor)

    def gate_factors(self, observations: State) -> Tensor:
        """The factor of each structure's move, for the log; exactly 1 where there is no gate. (n_structures,)"""
        knobs = self.knobs(observations)
        return torch.ones(observations.n_structures, dtype=self.network.dtype) if knobs is None else knobs.scales

    def move(self, state: State, knobs: Knobs | None = None) -> Move:
        """The move with the knobs as they are given."""
        answer = self.newton(state, knobs)
        move = Move(answer.atoms, strain_matrices(answer.cells)).allowed(state.structures)
        if knobs is None:
            return move.bounded(state.structures, float(self.bounds[0]), float(self.bounds[1]))
        return _within(move.scaled(knobs.scales, state.structures), state, self.bounds, knobs.trusts)

    def newton(self, state: State, knobs: Knobs | None = None) -> Unknowns:
        """B⁻¹F, damped where the settings say so, before scale and bounds."""
        frame = Frame.of(state, self.settings, self.network.dtype)
        stiffness = self.network.stiffness(frame)
        if knobs is not None:
            stiffness = _floored(stiffness, knobs)
        answer = solve(stiffness, frame.pulls)
        if self.settings.damped:
            answer = answer.scaled(damping(stiffness, frame), state.structures)
        return Unknowns(answer.atoms.to(self.network.dtype), answer.cells.to(self.network.dtype))


def _floored(stiffness: Stiffness, knobs: Knobs) -> Stiffness:
    return replace(
        stiffness,
        floors=stiffness.floors * knobs.floors,
        cell_floors=stiffness.cell_floors * knobs.floors,
    )


def _within(move: Move, state: State, bounds: Tensor, trusts: Tensor) -> Move:
    """`Move.bounded` with bounds of each structure's own."""
    longest, largest = bounds[0] * trusts, bounds[1] * trusts
    factors = torch.minimum(
        longest / torch.maximum(move.largest_displacements(state.structures), longest),
        largest / torch.maximum(move.strain_sizes(), largest),
    )
    return move.scaled(factors, state.structures)


class MetricGaussianPolicy(MetricPolicy, StochasticPolicy):
    """Noise on the knobs: log scale, log floor and log trust of each structure; `forward` is its middle.

    The density is that of the knobs, each between -1 and 1, so the target entropy is -3 per structure
    (`MetricActions`).
    Every draw goes downhill. Without a gate the middle of the knobs is learned as three numbers for all structures.
    Penalty: `penalty_weight` · mean square of the knobs before tanh.
    """

    def __init__(
        self,
        actions: MoveActions,
        settings: MetricSettings | None = None,
        generator: torch.Generator | None = None,
        penalty_weight: float = 0.0,
    ) -> None:
        super().__init__(actions, settings, generator)
        self.penalty_weight = penalty_weight

    def _make_more(self) -> None:
        self.middle = torch.nn.Parameter(torch.tensor([0.0, 0.0, 1.0]))
        self.log_deviations = torch.nn.Parameter(torch.full((N_KNOBS,), -1.0))

    def knobs(self, state: State) -> Knobs:
        return Knobs.of(torch.tanh(self._middles(state)), self.settings.largest_gate_factor)

    def _middles(self, state: State) -> Tensor:
        """Before tanh, (n_structures, 3)."""
        return self.middle.expand(state.n_structures, -1) if self.gate is None else self.gate(state)

    def sample(self, observations: State, generator: torch.Generator) -> tuple[Move, Tensor, Tensor]:
        noise = torch.randn((observations.n_structures, N_KNOBS), generator=generator, dtype=self.network.dtype)
        return self.sample_with(observations, noise)

    def sample_with(self, observations: State, noise: Tensor) -> tuple[Move, Tensor, Tensor]:
        """The draw that belongs to standard normal noise, (n_structures, 3)."""
        middles, logarithms = self._middles(observations), self.log_deviations.clamp(*LOG_DEVIATION_RANGE)
        drawn = middles + logarithms.exp() * noise
        gaussian = -0.5 * noise.square() - logarithms - 0.5 * math.log(2 * math.pi)
        squashing = 2 * (math.log(2) - drawn - softplus(-2 * drawn))  # log of the derivative of tanh
        move = self.move(observations, Knobs.of(torch.tanh(drawn), self.settings.largest_gate_factor))
        penalties = self.penalty_weight * middles.square().mean(dim=1)
        return move, (gaussian - squashing).sum(dim=1), penalties
