"""Policies that follow a stiffness model: the step is what the stiffness makes of the forces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.model.actions import Gate, MoveActions
from relaxion.model.backbone import LARGEST_GATE_FACTOR, N_INFORMATION_HIDDEN
from relaxion.model.layers import Generator
from relaxion.model.roles import Policy, StochasticPolicy, squashed_log_density
from relaxion.model.solve import solve
from relaxion.model.stiffness import Stiffness, Unknowns, strain_matrices
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, StiffnessSettings
from relaxion.structures import Move, State

SMALLEST_FACTOR = 0.1
SMALLEST_CURVATURE = 1e-9  # eV: of a last move that is none
LOG_DEVIATION_RANGE = (-10.0, 2.0)  # before tanh

N_FACTORS = 3  # of each structure
FIRST_ANSWERS = (0.0, 0.0, 1.0)  # of the gate: factors of about 1, trust of three quarters


@dataclass(frozen=True, eq=False)
class MoveFactors:
    """Three positive factors per structure: how boldly, how stiffly at least, and how far it moves."""

    scales: Tensor  # (n_structures,) of the whole move, R6.4's factor
    floors: Tensor  # (n_structures,) of the floor of the stiffness
    trusts: Tensor  # (n_structures,) of the greatest lengths, at most 1

    @classmethod
    def of(cls, values: Tensor, largest: float) -> MoveFactors:
        """From numbers between -1 and 1, (n_structures, 3)."""
        logarithm = math.log(largest)
        scales, floors = torch.exp(logarithm * values[:, :2]).unbind(dim=1)
        return cls(scales, floors, torch.exp(logarithm * (values[:, 2] - 1) / 2))


def damping(stiffness: Stiffness, frame: SolveInputs) -> Tensor:
    """The factor of each structure's move, differentiable, float64; 1 at a start and for free cells. (n_structures,)

    Where the last move met more stiffness than the model expects, step less. A model that is too soft along some mode
    jumps over the minimum for ever, and far from minima the curvature of no single place holds for a whole step. So the
    move is shortened by (s·Bs) / (s·y), s the last move and y the drop of the forces on it, wherever that is below 1.
    One factor per structure: the direction stays, and with it the descent. The stress before the last move is not part
    of a state, so a free cell has no whole secant.
    """
    state, structures, cells = frame.state, frame.state.structures, torch.zeros_like(frame.pulls.cells)
    last = Unknowns(state.last_move.displacements.double(), cells)
    before = (state.last_forces * structures.movable[:, None]).double()
    drop = Unknowns(before - frame.pulls.atoms, cells)
    met = last.dot(drop, structures)
    expected = last.dot(stiffness.to(torch.float64).apply(last), structures)
    stiffer = (met > expected) & (met > SMALLEST_CURVATURE) & ~structures.cell_free
    factors = expected / torch.where(stiffer, met, torch.ones_like(met))
    return torch.where(stiffer, factors.clamp_min(SMALLEST_FACTOR), torch.ones_like(met))


class StiffnessActions(MoveActions):
    """Moves chosen by three factors per structure: that many dimensions has the choice (SAC's entropy)."""

    def dimensions(self, observations: State) -> Tensor:
        return torch.full((observations.n_structures,), float(N_FACTORS))


class StiffnessPolicy(Policy):
    """π(s) = scale · B(s)⁻¹F, shortened as a whole to trust · bounds: one factor per structure, so always downhill.

    With `damped` it is also shortened where the last move met more stiffness than B has (`damping`).

    Without environment information there is no gate: scale and trust are exactly 1 and the floor is the network's.
    """

    bounds: Tensor

    def __init__(
        self, actions: MoveActions, settings: StiffnessSettings | None = None, generator: Generator = None
    ) -> None:
        super().__init__()
        self.settings = settings = settings or StiffnessSettings()
        self.network = StiffnessNetwork(settings, generator)
        self._make_more()
        # last, so that it takes no draws from the others
        names = settings.environment_information
        self.gate = Gate(names, N_INFORMATION_HIDDEN, generator, FIRST_ANSWERS) if names else None
        # a buffer: a saved policy carries the bounds it was trained for
        self.register_buffer("bounds", torch.tensor([actions.max_displacement_angstrom, actions.max_strain]))

    def _make_more(self) -> None:
        """Parameters of a subclass."""

    def forward(self, observations: State) -> Move:
        return self.move(observations, self.factors(observations))

    def factors(self, state: State) -> MoveFactors | None:
        """What the gate says; None where there is no gate."""
        if self.gate is None:
            return None
        return MoveFactors.of(torch.tanh(self.gate(state)), LARGEST_GATE_FACTOR)

    def gate_factors(self, observations: State) -> Tensor:
        """The factor of each structure's move, for the log; exactly 1 where there is no gate. (n_structures,)"""
        factors = self.factors(observations)
        return torch.ones(observations.n_structures, dtype=self.network.dtype) if factors is None else factors.scales

    def move(self, state: State, factors: MoveFactors | None = None) -> Move:
        """The move with given factors."""
        answer = self.newton(state, factors)
        move = Move(answer.atoms, strain_matrices(answer.cells)).allowed(state.structures)
        if factors is None:
            return move.bounded(state.structures, float(self.bounds[0]), float(self.bounds[1]))
        return _within(move.scaled(factors.scales, state.structures), state, self.bounds, factors.trusts)

    def newton(self, state: State, factors: MoveFactors | None = None) -> Unknowns:
        """B⁻¹F, damped where the settings say so, before scale and bounds."""
        frame = SolveInputs.of(state, self.settings, self.network.dtype)
        stiffness = self.network.stiffness(frame, None if factors is None else factors.floors)
        answer = solve(stiffness, frame.pulls)
        if self.settings.damped:
            answer = answer.scaled(damping(stiffness, frame), state.structures)
        return Unknowns(answer.atoms.to(self.network.dtype), answer.cells.to(self.network.dtype))


def _within(move: Move, state: State, bounds: Tensor, trusts: Tensor) -> Move:
    """`Move.bounded` with bounds of each structure's own."""
    longest, largest = bounds[0] * trusts, bounds[1] * trusts
    factors = torch.minimum(
        longest / torch.maximum(move.largest_displacements(state.structures), longest),
        largest / torch.maximum(move.strain_sizes(), largest),
    )
    return move.scaled(factors, state.structures)


class StiffnessGaussianPolicy(StiffnessPolicy, StochasticPolicy):
    """Noise on the factors: log scale, log floor and log trust of each structure; `forward` is its middle.

    The density is that of the factors, each between -1 and 1, so the target entropy is -3 per structure
    (`StiffnessActions`).
    Every draw goes downhill. Without a gate the middle of the factors is learned as three numbers for all structures.
    Penalty: `penalty_weight` · mean square of the factors before tanh.
    """

    def __init__(
        self,
        actions: MoveActions,
        settings: StiffnessSettings | None = None,
        generator: Generator = None,
        penalty_weight: float = 0.0,
    ) -> None:
        super().__init__(actions, settings, generator)
        self.penalty_weight = penalty_weight

    def _make_more(self) -> None:
        self.middle = torch.nn.Parameter(torch.tensor(FIRST_ANSWERS))
        self.log_deviations = torch.nn.Parameter(torch.full((N_FACTORS,), -1.0))

    def factors(self, state: State) -> MoveFactors:
        return MoveFactors.of(torch.tanh(self._middles(state)), LARGEST_GATE_FACTOR)

    def _middles(self, state: State) -> Tensor:
        """Before tanh, (n_structures, 3)."""
        return self.middle.expand(state.n_structures, -1) if self.gate is None else self.gate(state)

    def sample(self, observations: State, generator: torch.Generator) -> tuple[Move, Tensor, Tensor]:
        noise = torch.randn((observations.n_structures, N_FACTORS), generator=generator, dtype=self.network.dtype)
        return self.sample_with(observations, noise)

    def sample_with(self, observations: State, noise: Tensor) -> tuple[Move, Tensor, Tensor]:
        """The draw that belongs to standard normal noise, (n_structures, 3)."""
        middles, logarithms = self._middles(observations), self.log_deviations.clamp(*LOG_DEVIATION_RANGE)
        drawn = middles + logarithms.exp() * noise
        log_densities = squashed_log_density(drawn, noise, logarithms)
        move = self.move(observations, MoveFactors.of(torch.tanh(drawn), LARGEST_GATE_FACTOR))
        penalties = self.penalty_weight * middles.square().mean(dim=1)
        return move, log_densities, penalties
