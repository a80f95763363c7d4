"""Policies for atoms: a state in, a move out; and their heads. Shapes and the way through: docs/agents.md.

Bounds act on lengths, so that equivariance survives (R6.5).
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
from relaxion.model.roles import Policy, StochasticPolicy, log_tanh_slope
from relaxion.model.stiffness import strain_matrices, strain_vectors, symmetric_outer
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
        scalars, force_scales = features.scalars[0], inputs.force_scales
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
        structures, proposal = observations.structures, self.propose(observations)
        atom_deviations, cell_deviations = self.log_deviations(observations, proposal)
        atoms, cells = proposal.atoms + atom_deviations.exp()[:, None] * atom_noise, proposal.cells
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
