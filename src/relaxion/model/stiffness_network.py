"""The stiffness network: from a state to how stiff the structure is. The way through it: docs/how-it-works.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import silu

from relaxion.model.actions import stresses_of
from relaxion.model.backbone import (
    N_STATE_SCALARS,
    N_STATE_VECTORS,
    UNIT_STIFFNESS,
    AtomInputs,
    BackboneSettings,
    InformationSettings,
    backbone_class,
    state_inputs,
)
from relaxion.model.layers import (
    Generator,
    StackedLinear,
    StackedMLP,
    Surroundings,
    mixed,
    pair_inputs,
    softened,
    stress_along,
    structure_mean,
    tamed,
)
from relaxion.model.solve import COARSE_TOLERANCE, softened_by, solve
from relaxion.model.stiffness import LARGEST_EXPONENT, SPRINGS, Stiffness, Unknowns, strain_matrices, strain_vectors
from relaxion.settings import Settings
from relaxion.structures import State
from relaxion.structures.structures import moved_to

LARGEST_ANSWER = 4.0  # springs and floors lie within e^±4 of the prior, arms within ±4: B stays far from singular
SWITCH_WIDTH = 1.0  # Å before the cutoff, over which springs fade
FORCE_SCALARS = slice(N_STATE_SCALARS - 4, N_STATE_SCALARS - 2)
HISTORY_SCALARS = slice(N_STATE_SCALARS - 2, None)
FIRST_SOFTENING = -3.0  # logarithm of what softens a pair before learning, of its k∥: k⊥ then begins at about 0
N_DOTS = 8  # vectors of each atom that are looked at along each link
PAIRS_AT_ONCE = 2048  # of which everything is known at once

CONSTANTS = {  # former settings, by the names that policy files have for them
    "spring_stiffness_ev_per_angstrom2": 4.0,
    "spring_decay": 7.0,
    "largest_spring_exponent": 3.0,
    "spring_across": 0.05,
    "floor_ev_per_angstrom2": 0.5,
    "cell_floor_ev_per_angstrom3": 0.1,
}


class StiffnessShape(Settings):
    """A stiffness model beyond its backbone. Springs begin as those of `optimizer/hessian/springs.py`."""

    younger = ("damped", "softens")
    retired = CONSTANTS

    n_hidden: int = Field(default=32, ge=1)
    """Hidden units of the head that looks at links."""

    n_coordinates: int = Field(default=4, ge=0)
    """M, collective coordinates of each atom: what embedding and angles look like to second order."""

    sees_forces: bool = True
    """Forces are inputs: how far the minimum is, and so how much stiffness changes on the way."""

    sees_history: bool = False
    """Last move and change of forces are inputs."""

    looks_ahead: bool = True
    """A first solve with the springs alone gives the network the expected change of each pair."""

    damped: bool = False
    """The move is shortened where the last one met more stiffness than predicted (`policies.damping`). Of the bare
    policy only: the safeguard has secants of its own."""

    softens: bool = False
    """Pairs may also soften a structure: k∥ and k⊥ may be negative, as they are where a bond is pressed together or
    stretched beyond the steepest place of its attraction. B stays positive definite, as far as that can be seen without
    its matrix where a structure is large (`solve.softened_by`)."""


class StiffnessSettings(InformationSettings, BackboneSettings, StiffnessShape):
    """The stiffness network: backbone, shape, gate. Springs are the classical optimizer's, times exp(network)."""

    channels: int = Field(default=32, ge=1)
    """As in every backbone."""

    cutoff_angstrom: float = Field(default=5.0, gt=0)
    """How far springs reach: second neighbours of the largest metals, smoothly."""

    n_radial: int = Field(default=12, ge=2)
    """Functions of the reduced distance."""


@dataclass(frozen=True, eq=False)
class SolveInputs:
    """Pairs, pulls and springs of a state before any learning; pairs in the order of the graph."""

    state: State
    surroundings: Surroundings
    springs: Tensor  # (n_pairs,) eV/Å², prior k∥, faded out at the cutoff
    pulls: Unknowns  # forces and -V·stress, float64

    @classmethod
    def of(cls, state: State, settings: StiffnessSettings, dtype: torch.dtype) -> SolveInputs:
        surroundings = Surroundings.of(state, settings.cutoff_angstrom, settings.n_radial, dtype)
        distances = torch.linalg.vector_norm(surroundings.vectors[::2], dim=1)
        exponent = -SPRINGS.decay * (surroundings.reduced - 1)
        springs = SPRINGS.stiffness * torch.exp(exponent.clamp_max(LARGEST_EXPONENT))
        fraction = ((distances - settings.cutoff_angstrom) / SWITCH_WIDTH + 1).clamp(0, 1)
        faded = 1 - fraction.square() * (3 - 2 * fraction)
        return cls(state, surroundings, springs * faded, pulls_of(state))

    def prior(self) -> Stiffness:
        """The springs alone."""
        structures = self.state.structures
        floors = self.springs.new_full((structures.n_structures,), SPRINGS.floor)
        cell_floors = SPRINGS.cell_floor * structures.volumes.to(floors.dtype).clamp_min(1)
        return self.stiffness(
            along=self.springs,
            across=SPRINGS.across * self.springs,
            arms=self.springs.new_zeros((2 * len(self.springs), 0, 3)),
            floors=floors,
            cell_floors=cell_floors,
        )

    def stiffness(self, **learned: Tensor) -> Stiffness:
        """B of these pairs with its `LEARNED` parts."""
        around = self.surroundings
        return Stiffness(
            structures=self.state.structures,
            centers=around.centers,
            neighbors=around.neighbors,
            link_structure=around.pair_structure,
            vectors=around.vectors,
            free=Stiffness.all_free(self.state.structures),
            **learned,
        )

    def stretches(self, move: Unknowns) -> Tensor:
        """What a move does to each pair, along it and across it, in tenths of an Å, softened, (n_pairs, 2)."""
        around = self.surroundings
        dtype = self.springs.dtype
        atoms = move.atoms.to(dtype)
        changes = atoms.index_select(0, around.neighbors[::2]) - atoms.index_select(0, around.centers[::2])
        if bool(self.state.structures.cell_free.any()):
            strains = strain_matrices(move.cells.to(dtype)).index_select(0, around.pair_structure[::2])
            changes = changes + torch.bmm(around.vectors[::2, None], strains)[:, 0]
        directions = around.directions[::2]
        along = (changes * directions).sum(dim=1, keepdim=True)
        across = torch.linalg.vector_norm(changes - along * directions, dim=1, keepdim=True)
        return torch.cat([softened(10 * along), torch.log1p(10 * across)], dim=1)


def pulls_of(state: State) -> Unknowns:
    """What drives atoms and cells: forces, and -V·stress of free cells; zero for what may not move. float64."""
    structures = state.structures
    atoms = (state.evaluation.forces * structures.movable[:, None]).double()
    if not bool(structures.cell_free.any()):
        return Unknowns(atoms, atoms.new_zeros((structures.n_structures, 6)))
    stresses = stresses_of(state, torch.float64)
    symmetric = (stresses + stresses.mT) / 2
    cells = -(structures.volumes.double() * structures.cell_free)[:, None] * strain_vectors(symmetric)
    return Unknowns(atoms, cells)


class StiffnessNetwork(nn.Module):
    """State -> Stiffness, the same in every frame."""

    def __init__(self, settings: StiffnessSettings | None = None, generator: Generator = None) -> None:
        super().__init__()
        self.settings = settings = settings or StiffnessSettings()
        n_scalars, n_vectors = self._n_inputs()
        self.n_pair_extras = 1 + 2 * settings.looks_ahead  # stress along the pair; what is going to happen to it
        self.backbone = backbone_class(settings)(settings, n_scalars, n_vectors, self.n_pair_extras, 1, generator)
        channels = settings.channels
        hidden = settings.n_hidden
        self.dots = StackedLinear(channels + n_vectors, N_DOTS + settings.n_coordinates, 1, generator, bias=False)
        self.from_center = StackedLinear(channels, hidden, 1, generator)
        self.from_neighbor = StackedLinear(channels, hidden, 1, generator, bias=False)
        n_link = settings.n_radial * (1 + self.n_pair_extras) + 2 * N_DOTS
        self.from_link = StackedLinear(n_link, hidden, 1, generator, bias=False)
        self.think = StackedLinear(hidden, hidden, 1, generator)
        self.to_springs = StackedLinear(hidden, 2, 1, generator)
        self.to_arms = StackedLinear(hidden, 2 * settings.n_coordinates, 1, generator)
        self.to_floors = StackedMLP(channels, channels, 2, 1, generator)
        small = [self.to_springs, self.to_arms, self.to_floors.answer]
        if settings.softens:
            self.to_softening = StackedLinear(hidden, 2, 1, generator)
            small.append(self.to_softening)
        with torch.no_grad():  # an untrained network says about what the springs say
            for layer in small:
                layer.weight.mul_(0.1)

    def _n_inputs(self) -> tuple[int, int]:
        hidden = (not self.settings.sees_forces) + (not self.settings.sees_history)
        n_vectors = (2 if self.settings.sees_forces else 0) + (2 if self.settings.sees_history else 0)
        return N_STATE_SCALARS - 2 * hidden, max(n_vectors, 1)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters; states are cast to it. Solves are in float64 always."""
        return self.to_springs.weight.dtype

    def forward(self, state: State) -> Stiffness:
        frame = SolveInputs.of(state, self.settings, self.dtype)
        return self.stiffness(frame)

    def stiffness(self, frame: SolveInputs, floor_factors: Tensor | None = None) -> Stiffness:
        """The learned springs, coordinates and floors; `floor_factors`: of each structure, a gate's."""
        extras = [stress_along(frame.state, frame.surroundings)]
        if self.settings.looks_ahead:
            with torch.no_grad():
                ahead = solve(frame.prior(), frame.pulls, tolerance=COARSE_TOLERANCE)
                extras.append(frame.stretches(ahead))
        pairs = pair_inputs(frame.surroundings, torch.cat(extras, dim=1))
        inputs = self._inputs(frame)
        here = frame.springs.device
        device = self.to_springs.weight.device
        learned = self._learned(moved_to(device, frame), moved_to(device, inputs), moved_to(device, pairs))
        answer = {name: moved_to(here, tensor) for name, tensor in learned.items()}
        softening = answer.pop("softening", None)
        stiffness = frame.stiffness(**answer)
        if floor_factors is not None:
            floors = stiffness.floors * floor_factors
            cell_floors = stiffness.cell_floors * floor_factors
            stiffness = replace(stiffness, floors=floors, cell_floors=cell_floors)
        return stiffness if softening is None else softened_by(stiffness, softening, frame.pulls)

    def _learned(self, frame: SolveInputs, inputs: AtomInputs, pairs: Tensor) -> dict[str, Tensor]:
        """What only the network knows, where the network is."""
        features = self.backbone(inputs, frame.surroundings, pairs, 1)
        vectors = torch.cat([features.vectors[0], inputs.vectors], dim=1)
        return self._answer(frame, features.scalars[0], vectors, pairs)

    def _inputs(self, frame: SolveInputs) -> AtomInputs:
        inputs = state_inputs(frame.state, frame.surroundings, UNIT_STIFFNESS)
        scalars = [inputs.scalars[:, : FORCE_SCALARS.start]]
        vectors = []
        if self.settings.sees_forces:
            scalars.append(inputs.scalars[:, FORCE_SCALARS])
            vectors += [inputs.vectors[:, :1], softened(frame.pulls.atoms.to(self.dtype))[:, None]]
        if self.settings.sees_history:
            scalars.append(inputs.scalars[:, HISTORY_SCALARS])
            vectors.append(inputs.vectors[:, 1:N_STATE_VECTORS])
        if not vectors:
            vectors.append(torch.zeros_like(inputs.vectors[:, :1]))
        return AtomInputs(torch.cat(scalars, dim=1), torch.cat(vectors, dim=1), inputs.force_scales)

    def _answer(self, frame: SolveInputs, scalars: Tensor, vectors: Tensor, pairs: Tensor) -> dict[str, Tensor]:
        scalars = tamed(scalars)
        looked_at = mixed(self.dots, vectors.transpose(1, 2)[None])[0]  # (n_atoms, 3, N_DOTS + M)
        seen = softened(looked_at[:, :, :N_DOTS].transpose(1, 2)).transpose(1, 2)
        towards = looked_at[:, :, N_DOTS:]
        towards = towards * torch.rsqrt(1 + towards.square().sum(dim=1, keepdim=True))
        as_center = self.from_center(scalars[None])[0]
        as_neighbor = self.from_neighbor(scalars[None])[0]
        ends = torch.cat([as_center, as_neighbor], dim=1), torch.cat([as_neighbor, as_center], dim=1)
        # what is known of links is twenty times as much as what comes out: in pieces it stays in the processor's cache
        size = max(len(pairs), 1) if torch.is_grad_enabled() else PAIRS_AT_ONCE
        pieces = [slice(first, first + size) for first in range(0, max(len(pairs), 1), size)]
        answers = [self._of_pairs(frame, part, pairs[part], seen, towards, ends) for part in pieces]
        answer = {name: torch.cat([each[name] for each in answers]) for name in answers[0]}
        floors = structure_mean(self.to_floors(scalars[None])[0], frame.state.structures)  # (n_structures, 2)
        floors = torch.exp(bounded(floors))
        volumes = frame.state.structures.volumes.to(floors.dtype).clamp_min(1)
        answer["floors"] = SPRINGS.floor * floors[:, 0]
        answer["cell_floors"] = SPRINGS.cell_floor * volumes * floors[:, 1]
        return answer

    def _of_pairs(
        self, frame: SolveInputs, part: slice, pairs: Tensor, seen: Tensor, towards: Tensor, ends: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """k∥, k⊥ and softening of some pairs, eV/Å²; arms of their links, a_ijm = √k · (α_m r̂ + β_m v_im)."""
        around = frame.surroundings
        both = slice(2 * part.start, 2 * part.stop)
        centers = around.centers[both]
        directions = around.directions[both]
        springs = frame.springs[part, None]  # (n_pairs, 1)
        links = self._links(centers[::2], centers[1::2], directions[::2, :, None], pairs, seen, ends)
        weights = bounded(self.to_arms(links[None])[0]) * torch.sqrt(springs).repeat_interleave(2, dim=0)
        along, across = weights.chunk(2, dim=1)  # (n_links, M)
        vectors = towards.index_select(0, centers).unbind(dim=1)
        columns = zip(directions[:, :, None].unbind(dim=1), vectors, strict=True)
        answer = {"arms": torch.stack([along * unit + across * vector for unit, vector in columns], dim=2)}
        pairs = (links[::2] + links[1::2])[None]  # a pair is what both of its ends say of it
        stiff = springs * torch.exp(bounded(self.to_springs(pairs)[0]))
        answer |= {"along": stiff[:, 0], "across": SPRINGS.across * stiff[:, 1]}
        if self.settings.softens:
            answer["softening"] = springs * torch.exp(bounded(self.to_softening(pairs)[0]) + FIRST_SOFTENING)
        return answer

    def _links(
        self, first: Tensor, second: Tensor, directions: Tensor, pairs: Tensor, seen: Tensor, ends: Sequence[Tensor]
    ) -> Tensor:
        """What is known of the links i→j and j→i, (n_links, n_hidden): the ends change places, and r̂ its sign.

        One product with the weights of both side by side is quicker than one for each link.
        """
        x, y, z = directions.unbind(dim=1)
        dots = []
        for a, b, c in (seen.index_select(0, end).unbind(dim=1) for end in (first, second)):
            dots.append(a * x + b * y + c * z)  # (n_pairs, N_DOTS)
        of_pair, of_center, of_neighbor = self.from_link.weight[0].split([pairs.shape[1], N_DOTS, N_DOTS])
        there = torch.cat([of_pair, of_center, of_neighbor])
        back = torch.cat([of_pair, -of_neighbor, -of_center])
        known = torch.cat([pairs, *dots], dim=1) @ torch.cat([there, back], dim=1)
        known = known + ends[0].index_select(0, first) + ends[1].index_select(0, second)
        return silu(self.think(silu(known).view(1, -1, self.settings.n_hidden))[0])


def bounded(values: Tensor) -> Tensor:
    """Themselves while small, within ±`LARGEST_ANSWER` always."""
    return 2 * LARGEST_ANSWER * torch.sigmoid(2 / LARGEST_ANSWER * values) - LARGEST_ANSWER  # quicker than tanh
