"""Policies for atoms: a state in, a move out; and their heads. Shapes and the way through: docs/agents.md.

Bounds act on lengths, so that equivariance survives (R6.5).

A direct policy answers with the move. A stiffness policy answers with a stiffness model; the step is what that makes of
the forces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from relaxion.model.actions import Gate, MoveActions, strain_scales, stresses_of
from relaxion.model.backbone import (
    LARGEST_GATE_FACTOR,
    N_INFORMATION_HIDDEN,
    N_STATE_VECTORS,
    AtomNetworkSettings,
    Observer,
)
from relaxion.model.layers import Generator, StackedLinear, StackedMLP, mixed, structure_mean, tamed
from relaxion.model.roles import Policy, StochasticPolicy, log_tanh_slope, squashed_log_density
from relaxion.model.solve import solve
from relaxion.model.stiffness import Stiffness, Unknowns, strain_matrices, strain_vectors, symmetric_outer
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, StiffnessSettings
from relaxion.structures import Move, State
from relaxion.structures.structures import per_structure_sum

LOG_DEVIATION_RANGE = (-20.0, 2.0)  # before squashing and gate, as for vectors
STRESS_FLOOR = 1e-4  # eV/Å³, below any tolerance: directions of smaller stresses fade away
N_PRODUCTS = 4  # outer products per atom that make up its part of the strain


def squashed(vectors: Tensor) -> Tensor:
    """û · tanh|u| over the last axis: direction kept, length below 1, smooth at zero."""
    length = _lengths(vectors)[..., None]
    return vectors * (torch.tanh(length) / length)


def log_volume_change(vectors: Tensor) -> Tensor:
    """log |det ∂squashed(u)/∂u| over the last axis of d components.

    The length changes by tanh'(r), the d - 1 directions across it by tanh(r)/r. Exact for long vectors too, where
    1 - tanh² has no digits left.
    """
    length = _lengths(vectors)
    along = log_tanh_slope(length)
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


class DisplacementHead(nn.Module):
    """u_i = Σ_c w_c(scalars_i) · v_ic."""

    def __init__(self, channels: int, n_vectors: int, generator: Generator) -> None:
        super().__init__()
        self.weights = StackedMLP(channels, channels, n_vectors, 1, generator)

    def forward(self, scalars: Tensor, vectors: Tensor) -> Tensor:
        """scalars (n_atoms, channels), vectors (n_atoms, n_vectors, 3) -> (n_atoms, 3)."""
        weights = self.weights(scalars[None])[0]
        return (weights[:, :, None] * vectors).sum(dim=1) / vectors.shape[1] ** 0.5


class StrainHead(nn.Module):
    """Mean over the atoms of outer products of their vectors and of a pressure, and the stress by a learned factor.

    Trace (l = 0) and deviator (l = 2) both come from the products; the backbone need not know l = 2.
    """

    def __init__(self, channels: int, n_vectors: int, generator: Generator) -> None:
        super().__init__()
        self.factors = StackedLinear(n_vectors, 2 * N_PRODUCTS, 1, generator, bias=False)
        self.weights = StackedMLP(channels, channels, N_PRODUCTS + 3, 1, generator)

    def forward(self, state: State, scalars: Tensor, vectors: Tensor) -> Tensor:
        """(n_structures, 6); meaningless for fixed cells."""
        weights, pressures, by_stress = self.weights(scalars[None])[0].split((N_PRODUCTS, 1, 2), dim=1)
        one, other = mixed(self.factors, vectors.transpose(1, 2)[None])[0].transpose(1, 2).chunk(2, dim=1)
        other = other / torch.sqrt(1 + other.square().sum(dim=2, keepdim=True))  # grows with the length, not its square
        products = (weights[:, :, None, None] * symmetric_outer(one, other)).mean(dim=1)  # (n_atoms, 3, 3)
        identity = torch.eye(3, dtype=scalars.dtype)
        pooled = structure_mean(products + pressures[:, :, None] * identity, state.structures)
        factors = structure_mean(by_stress, state.structures)[:, :, None, None]  # (n_structures, 2, 1, 1)
        stress = stress_directions(state, scalars.dtype)
        traces = stress.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        return strain_vectors(pooled + factors[:, 0] * stress + factors[:, 1] * traces * identity)


def stress_directions(state: State, dtype: torch.dtype) -> Tensor:
    """Stresses of length one, fading to zero with the last of them, (n_structures, 3, 3)."""
    stresses = stresses_of(state, dtype)
    sizes = torch.sqrt(stresses.flatten(1).square().sum(dim=1) + STRESS_FLOOR**2)
    return stresses / sizes[:, None, None]


@dataclass(frozen=True, eq=False)
class RawMove:
    """A move before its bounds, in units of the greatest lengths. No strain is proposed where no cell is free."""

    atoms: Tensor  # (n_atoms, 3)
    cells: Tensor | None  # (n_structures, 6)
    scalars: Tensor  # (n_atoms, channels), what the atoms know
    atom_units: Tensor  # (n_atoms,) size that answers of order one have
    cell_units: Tensor | None  # (n_structures,)


class AtomPolicy(Policy):
    """π(s): one displacement per atom and a strain per free cell, times the gate, bounded by length.

    u = greatest length · squashed(gate · Σ_c w_c v_c). Parameters of a plain policy are those of a gated one without
    the gate's, made from the same draws of the generator.
    """

    bounds: Tensor

    def __init__(
        self, actions: MoveActions, settings: AtomNetworkSettings | None = None, generator: Generator = None
    ) -> None:
        super().__init__()
        self.settings = settings = settings or AtomNetworkSettings()
        n_vectors = settings.channels + N_STATE_VECTORS
        self.observer = Observer(settings, generator)
        self.displacement_head = DisplacementHead(settings.channels, n_vectors, generator)
        self.strain_head = StrainHead(settings.channels, n_vectors, generator)
        self._make_more(generator)
        # last, so that it takes no draws from the others
        names = settings.environment_information
        self.gate = Gate(names, N_INFORMATION_HIDDEN, generator) if names else None
        # a buffer: a saved policy carries the bounds it was trained for
        self.register_buffer("bounds", torch.tensor([actions.max_displacement_angstrom, actions.max_strain]))

    def _make_more(self, generator: Generator) -> None:
        """Heads of a subclass."""

    def forward(self, observations: State) -> Move:
        proposal = self.propose(observations)
        factors = None if self.gate is None else self.gate_factors(observations)
        return self._bounded(observations, *_gated(observations, proposal.atoms, proposal.cells, factors))

    def gate_factors(self, observations: State) -> Tensor:
        """The gate's factor of each structure, exactly 1 where there is no gate. (n_structures,)

        exp(log(largest) · tanh(gate)): between 1/largest and largest, never 0.
        """
        if self.gate is None:
            return torch.ones(observations.n_structures, dtype=self.observer.dtype)
        largest = math.log(LARGEST_GATE_FACTOR)
        return torch.exp(largest * torch.tanh(self.gate(observations)[:, 0]))

    def propose(self, state: State) -> RawMove:
        """The move before gate and bounds."""
        features, inputs = self.observer(state)
        scalars = features.scalars[0]
        force_scales = inputs.force_scales
        # forces and history join the features again: steepest descent is one weight away
        vectors = torch.cat([features.vectors[0], inputs.vectors], dim=1)
        atom_units = self._units(force_scales / self.observer.stiffness, 0)
        atoms = atom_units[:, None] * self.displacement_head(scalars, vectors)
        if not bool(state.structures.cell_free.any()):
            return RawMove(atoms, None, scalars, atom_units, None)
        cell_units = self._units(strain_scales(state, force_scales, self.observer.stiffness), 1)
        cells = cell_units[:, None] * self.strain_head(state, scalars, vectors)
        return RawMove(atoms, cells, scalars, atom_units, cell_units)

    def _units(self, asked_for: Tensor, bound: int) -> Tensor:
        """The size the forces ask for, or the greatest length, as a share of the latter."""
        return asked_for / self.bounds[bound] if self.settings.moves_follow_forces else torch.ones_like(asked_for)

    def _bounded(self, state: State, atoms: Tensor, cells: Tensor | None) -> Move:
        """Lengths below the bounds, nothing for what may not move."""
        structures = state.structures
        displacements = self.bounds[0] * squashed(atoms)
        if cells is None:
            strains = atoms.new_zeros((structures.n_structures, 3, 3))
        else:
            strains = strain_matrices(self.bounds[1] * squashed(cells))
        return Move(displacements, strains).allowed(structures)


def _gated(state: State, atoms: Tensor, cells: Tensor | None, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Times one factor per structure; untouched where there is none."""
    if factors is None:
        return atoms, cells
    atoms = atoms * factors.index_select(0, state.structures.structure_index)[:, None]
    return atoms, None if cells is None else cells * factors[:, None]


class AtomGaussianPolicy(AtomPolicy, StochasticPolicy):
    """A Gaussian around the proposal, alike in every direction, then gate and bounds; `forward` is its middle.

    The density is that of the move in the units the policy acts in (`RawMove`): F/k where moves follow the forces, so
    that the same spread around every state has the same entropy and large forces are no reward. Penalty:
    `penalty_weight` · mean square of the proposal, which keeps tanh awake.
    """

    def __init__(
        self,
        actions: MoveActions,
        settings: AtomNetworkSettings | None = None,
        generator: Generator = None,
        penalty_weight: float = 0.0,
    ) -> None:
        super().__init__(actions, settings, generator)
        self.penalty_weight = penalty_weight

    def _make_more(self, generator: Generator) -> None:
        # log deviations of an atom, and its part of the cell's
        self.deviation_head = StackedLinear(self.settings.channels, 2, 1, generator)

    def sample(self, observations: State, generator: torch.Generator) -> tuple[Move, Tensor, Tensor]:
        dtype = self.observer.dtype
        atom_noise = torch.randn((observations.structures.n_atoms, 3), generator=generator, dtype=dtype)
        cell_noise = torch.randn((observations.n_structures, 6), generator=generator, dtype=dtype)
        return self.sample_with(observations, atom_noise, cell_noise)

    def sample_with(self, observations: State, atom_noise: Tensor, cell_noise: Tensor) -> tuple[Move, Tensor, Tensor]:
        """The draw that belongs to standard normal noise, (n_atoms, 3) and (n_structures, 6)."""
        structures = observations.structures
        proposal = self.propose(observations)
        atom_deviations, cell_deviations = self.log_deviations(observations, proposal)
        atoms = proposal.atoms + atom_deviations.exp()[:, None] * atom_noise
        cells = proposal.cells
        if cells is not None:
            cells = cells + cell_deviations.exp()[:, None] * cell_noise
        if self.gate is not None:  # it widens what it multiplies, along each component
            factors = self.gate_factors(observations)
            atoms, cells = _gated(observations, atoms, cells, factors)
            atom_deviations = atom_deviations + factors.log().index_select(0, structures.structure_index)
            cell_deviations = cell_deviations + factors.log()
        of_atoms = _log_densities(atom_noise, atom_deviations, atoms, proposal.atom_units) * structures.movable
        log_densities = per_structure_sum(of_atoms, structures.structure_index, structures.n_structures)
        if cells is not None and proposal.cell_units is not None:
            of_cells = _log_densities(cell_noise, cell_deviations, cells, proposal.cell_units)
            log_densities = log_densities + of_cells * structures.cell_free
        return self._bounded(observations, atoms, cells), log_densities, self._penalties(observations, proposal)

    def log_deviations(self, state: State, proposal: RawMove) -> tuple[Tensor, Tensor]:
        """Before gate and squashing, of atoms (n_atoms,) and of cells (n_structures,), fixed ones without meaning."""
        heads = self.deviation_head(tamed(proposal.scalars)[None])[0]
        of_atoms = heads[:, 0] + proposal.atom_units.log()
        of_cells = structure_mean(heads[:, 1], state.structures)
        if proposal.cell_units is not None:
            of_cells = of_cells + proposal.cell_units.log()
        return of_atoms.clamp(*LOG_DEVIATION_RANGE), of_cells.clamp(*LOG_DEVIATION_RANGE)

    def _penalties(self, state: State, proposal: RawMove) -> Tensor:
        squares = proposal.atoms.square().mean(dim=1) * state.structures.movable
        return self.penalty_weight * structure_mean(squares, state.structures)  # (n_structures,)


def _log_densities(noise: Tensor, log_deviations: Tensor, before_squashing: Tensor, units: Tensor) -> Tensor:
    """Of the squashed draws in their units: the Gaussian's, less what squashing and units do to volumes."""
    gaussian = gaussian_log_density(noise, log_deviations)
    return gaussian - log_volume_change(before_squashing) + noise.shape[-1] * units.log()


SMALLEST_FACTOR = 0.1
SMALLEST_CURVATURE = 1e-9  # eV: of a last move that is none
STIFFNESS_LOG_DEVIATION_RANGE = (-10.0, 2.0)  # before tanh

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
    state = frame.state
    structures = frame.state.structures
    cells = torch.zeros_like(frame.pulls.cells)
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
    longest = bounds[0] * trusts
    largest = bounds[1] * trusts
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
        middles = self._middles(observations)
        logarithms = self.log_deviations.clamp(*STIFFNESS_LOG_DEVIATION_RANGE)
        drawn = middles + logarithms.exp() * noise
        log_densities = squashed_log_density(drawn, noise, logarithms)
        move = self.move(observations, MoveFactors.of(torch.tanh(drawn), LARGEST_GATE_FACTOR))
        penalties = self.penalty_weight * middles.square().mean(dim=1)
        return move, log_densities, penalties
