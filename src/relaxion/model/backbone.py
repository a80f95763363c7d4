"""What a backbone is: one shape of constructor, what goes in, what comes out; chosen by a word. And the light one.

The light backbone has scalars and vectors only, after PaiNN (Schütt, Unke, Gastegger 2021).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from relaxion.model.layers import (
    N_DESCRIPTORS,
    Generator,
    InvariantUpdate,
    Messages,
    PairFilter,
    Scratch,
    StackedLinear,
    StackedMLP,
    SummedMessages,
    Surroundings,
    changes_along,
    descriptors,
    lengths,
    mixed,
    packed,
    pair_inputs,
    softened,
    stress_along,
    unpacked,
)
from relaxion.settings import Settings
from relaxion.structures import Move, State

UNIT_STIFFNESS = 5.0  # eV/Å², in which moves are compared with forces: F/k is the step a usual metal bond asks for
N_INFORMATION_HIDDEN = 16  # hidden units of the gate, and width of the projected information in the critics' tail
# The gate's factor lies between this and its inverse. In a stiffness policy scale and floor have such a factor each,
# and the trust radius is shortened by at most it.
LARGEST_GATE_FACTOR = 10.0
CONSTANTS = {  # former settings, by the names that policy files have for them
    "stiffness_ev_per_angstrom2": UNIT_STIFFNESS, "n_information_hidden": N_INFORMATION_HIDDEN,
    "largest_gate_factor": LARGEST_GATE_FACTOR,
}  # fmt: skip


class BackboneSettings(Settings):
    """Size and reach of the network that looks at atoms."""

    retired = CONSTANTS

    backbone: Literal["light", "tensor_field"] = "light"
    """light: scalars and vectors, plain PyTorch. tensor_field: up to l = 2, on e3nn; several times slower."""

    channels: int = Field(default=16, ge=1)
    """Scalars, vectors (and l = 2 tensors) of each atom. A multiple of 16 fills the processor's registers."""

    n_layers: int = Field(default=2, ge=1)
    """Rounds of messages: an atom sees `n_layers` · cutoff far."""

    cutoff_angstrom: float = Field(default=4.5, gt=0)
    """How far an atom sees in one round: second neighbours in most metals. Every neighbour within it counts."""

    n_radial: int = Field(default=8, ge=2)
    """Functions of the reduced distance, from 0.5 to 2.5 sums of covalent radii."""


class InformationSettings(Settings):
    """Environment information in the gate of a policy and the tail of critics."""

    environment_information: tuple[str, ...] = ()
    """Names of numbers per structure for gate and critics' tail (`environment_information.py`). None: the plain
    network, with no trace of either."""


@dataclass(frozen=True, eq=False)
class AtomInputs:
    """What is known of each atom before it looks around."""

    scalars: Tensor  # (n_atoms, n_scalars), the same in every frame
    vectors: Tensor  # (n_atoms, n_vectors, 3), turning with the structure
    force_scales: Tensor  # (n_atoms,) eV/Å, size of the forces around each atom; never 0


@dataclass(frozen=True, eq=False)
class Features:
    """What each atom knows after it has looked around, once for each of the networks that run side by side."""

    scalars: Tensor  # (n_networks, n_atoms, channels), the same in every frame
    vectors: Tensor  # (n_networks, n_atoms, channels, 3), turning with the structure


class Backbone(nn.Module, ABC):
    """Atoms and pairs -> what each atom knows. Sees no environment information, ever (R6.3)."""

    n_embedded: int  # vectors of each channel before the first layer
    layer: type[nn.Module]  # one round of messages

    def __init__(
        self,
        settings: BackboneSettings,
        n_scalars: int,
        n_vectors: int,
        n_pair_extras: int,
        n_networks: int,
        generator: Generator,
    ) -> None:
        super().__init__()
        channels = settings.channels
        n_pair_inputs = settings.n_radial * (1 + n_pair_extras)
        self.embed_scalars = StackedMLP(n_scalars, channels, channels, n_networks, generator)
        self.embed_vectors = StackedLinear(n_vectors, self.n_embedded * channels, n_networks, generator, bias=False)
        are_last = [False] * (settings.n_layers - 1) + [True]
        self.layers = nn.ModuleList(
            [self.layer(channels, n_pair_inputs, n_networks, generator, is_last) for is_last in are_last]
        )

    @abstractmethod
    def forward(
        self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int
    ) -> Features: ...

    def _embedded(self, inputs: AtomInputs, n_networks: int) -> tuple[Tensor, Tensor]:
        """Scalars (n_networks, n_atoms, channels), vectors (n_networks, n_atoms, 3, n_embedded · channels)."""
        vectors = inputs.vectors.transpose(1, 2).expand(n_networks, -1, -1, -1)
        return self.embed_scalars(inputs.scalars.expand(n_networks, -1, -1)), mixed(self.embed_vectors, vectors)


def backbone_class(settings: BackboneSettings) -> type[Backbone]:
    """The backbone that the settings name. e3nn is loaded only where it is asked for."""
    if settings.backbone == "light":
        return LightBackbone
    from relaxion.model.tensor_field import TensorFieldBackbone

    return TensorFieldBackbone


class LightMessages(Messages):
    """(f₀ a, f₁ v + f₂ b r̂): f filters of the pair, a and b words and v vectors of the neighbour. Scalar and vector."""

    n_heard = 4
    numbers_at_once = 24576

    def said(self, scratch: Scratch, near: Tensor, filters: Tensor, geometry: Sequence[Tensor]) -> Tensor:
        messages = scratch("messages", len(near), 4, near.shape[2])
        lengths = torch.mul(filters[:, 2], near[:, 1], out=scratch("lengths", len(near), near.shape[2]))
        torch.mul(filters[:, 0], near[:, 0], out=messages[:, 0])
        for axis in range(3):  # one after the other is quicker than a product of all three with one filter
            along = torch.mul(filters[:, 1], near[:, 2 + axis], out=messages[:, 1 + axis])
            along.addcmul_(lengths, geometry[0][:, axis, None])
        return messages

    def gradients(
        self, scratch: Scratch, near: Tensor, back: Tensor, filters: Tensor, geometry: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        products, to_filters = (scratch(name, *filters.shape) for name in ("products", "to_filters"))
        to_near = scratch("to_near", *near.shape)
        torch.mul(back[:, 0], near[:, 0], out=to_filters[:, 0])
        torch.mul(back[:, 0], filters[:, 0], out=to_near[:, 0])
        torch.sum(torch.mul(back[:, 1:], near[:, 2:], out=products), dim=1, out=to_filters[:, 1])
        along = torch.sum(torch.mul(back[:, 1:], geometry[0][:, :, None], out=products), dim=1)
        torch.mul(along, near[:, 1], out=to_filters[:, 2])
        torch.mul(along, filters[:, 2], out=to_near[:, 1])
        torch.mul(filters[:, 1:2], back[:, 1:], out=to_near[:, 2:])
        return to_near, to_filters


class LightLayer(nn.Module):
    """Neighbours speak, then the atom thinks."""

    def __init__(
        self,
        channels: int,
        n_pair_inputs: int,
        n_networks: int,
        generator: Generator,
        is_last: bool,  # noqa: ARG002  all alike
    ) -> None:
        super().__init__()
        self.words = StackedMLP(channels, channels, 3 * channels, n_networks, generator)
        self.filter = PairFilter(n_pair_inputs, 3, channels, n_networks, generator)
        self.update = InvariantUpdate(channels, 1, 1, n_networks, generator)

    def forward(
        self, scalars: Tensor, vectors: Tensor, surroundings: Surroundings, pair_inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """scalars (n_networks, n_atoms, channels), vectors (n_networks, n_atoms, 3, channels)."""
        n_networks, n_atoms, channels = scalars.shape
        words = self.words(scalars).view(n_networks, n_atoms, 3, channels)
        spoken = packed(torch.cat([words[:, :, ::2], words[:, :, 1:2] * vectors], dim=2))
        ends = (surroundings.centers, surroundings.neighbors)
        heard = SummedMessages.apply(
            LightMessages(), spoken, pair_inputs, self.filter(n_networks), *ends, surroundings.directions
        )  # (n_atoms, 4, n_networks · channels)
        heard = unpacked(heard * surroundings.normalisers[:, None, None], n_networks)
        scalars, (vectors,) = self.update(scalars + heard[:, :, 0], [vectors + heard[:, :, 1:]])
        return scalars, vectors


class LightBackbone(Backbone):
    """l ≤ 1: quick on a CPU, and needs nothing but PyTorch where a policy is used."""

    n_embedded = 1
    layer = LightLayer

    def forward(self, inputs: AtomInputs, surroundings: Surroundings, pair_inputs: Tensor, n_networks: int) -> Features:
        scalars, vectors = self._embedded(inputs, n_networks)
        for layer in self.layers:
            scalars, vectors = layer(scalars, vectors, surroundings, pair_inputs)
        return Features(scalars, vectors.transpose(2, 3))


FORCE_FLOOR = 1e-4  # eV/Å, far below any tolerance; forces fall no farther on the logarithmic scale
LENGTH_FLOOR = 1e-5  # Å
N_STATE_SCALARS = N_DESCRIPTORS + 5
N_STATE_VECTORS = 3


def force_scales(forces: Tensor, surroundings: Surroundings) -> Tensor:
    """Root mean square force of each atom and its neighbours, weighted by the envelope, (n_atoms,) eV/Å.

    A force has no natural unit, a force beside its neighbours' has: near the minimum the same picture comes back,
    only smaller.
    """
    squares = forces.square().sum(dim=1)
    weights = surroundings.normalisers.square()  # 1 / (1 + Σ envelope)
    summed = squares.clone()
    for links in (slice(0, None, 2), slice(1, None, 2)):
        around = surroundings.envelope * squares.index_select(0, surroundings.neighbors[links])
        summed.index_add_(0, surroundings.centers[links], around)
    return torch.sqrt(weights * summed + FORCE_FLOOR**2)


def state_inputs(state: State, surroundings: Surroundings, stiffness: float) -> AtomInputs:
    """Species, forces as direction and logarithm of the length, last move and change of the forces alike."""
    structures = state.structures
    dtype = surroundings.normalisers.dtype
    movable = structures.movable[:, None]
    # nothing relaxes the forces on fixed atoms: they must not look like something left to do
    forces = (state.evaluation.forces * movable).to(dtype)  # (n_atoms, 3) eV/Å
    changes = ((state.evaluation.forces - state.last_forces) * movable).to(dtype)  # (n_atoms, 3) eV/Å
    moved = state.last_move.displacements.to(dtype)  # (n_atoms, 3) Å
    scales = force_scales(forces, surroundings)
    scalars = torch.stack(
        [
            structures.movable.to(dtype),
            torch.log(scales) / 3,
            torch.log(lengths(forces, FORCE_FLOOR)) / 3,
            torch.log(lengths(changes, FORCE_FLOOR)) / 3,
            (torch.log(lengths(moved, LENGTH_FLOOR)) + 3) / 3,  # 0.05 Å is the usual step
        ],
        dim=1,
    )
    unit = scales[:, None]
    vectors = [softened(forces / unit), softened(changes / unit), softened(moved * stiffness / unit)]
    return AtomInputs(
        scalars=torch.cat([descriptors(structures.atomic_numbers, dtype), scalars], dim=1),
        vectors=torch.stack(vectors, dim=1),
        force_scales=scales,
    )


def with_move(inputs: AtomInputs, move: Move, stiffness: float) -> AtomInputs:
    """The same with a displacement to be judged, measured like the last move."""
    relative = move.displacements * (stiffness / inputs.force_scales)[:, None]
    length = torch.log1p(lengths(relative, 1e-3))[:, None]
    return AtomInputs(
        scalars=torch.cat([inputs.scalars, length], dim=1),
        vectors=torch.cat([inputs.vectors, softened(relative)[:, None]], dim=1),
        force_scales=inputs.force_scales,
    )


class AtomNetworkSettings(InformationSettings, BackboneSettings):
    """A network for atoms: its inputs and environment information."""

    moves_follow_forces: bool = True
    """Proposed moves are measured in F/k, F the root mean square force around an atom: near the minimum the same output
    gives a smaller step, and none where there is no force. False: in the greatest length allowed."""


class Observer(nn.Module):
    """`n_networks` backbones side by side. With `sees_moves` they judge a move, without they see the state only."""

    def __init__(
        self, settings: BackboneSettings, generator: Generator, *, n_networks: int = 1, sees_moves: bool = False
    ) -> None:
        super().__init__()
        self.cutoff = settings.cutoff_angstrom
        self.n_radial = settings.n_radial
        self.stiffness = UNIT_STIFFNESS
        self.backbone = backbone_class(settings)(
            settings,
            n_scalars=N_STATE_SCALARS + sees_moves,
            n_vectors=N_STATE_VECTORS + sees_moves,
            n_pair_extras=1 + sees_moves * 2,  # stress along the pair; what the move does to it
            n_networks=n_networks,
            generator=generator,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters; states are cast to it."""
        return next(self.parameters()).dtype

    def forward(self, state: State, move: Move | None = None, n_networks: int = 1) -> tuple[Features, AtomInputs]:
        """Features of the first `n_networks` backbones, and what they began with."""
        surroundings = Surroundings.of(state, self.cutoff, self.n_radial, self.dtype)
        inputs = state_inputs(state, surroundings, self.stiffness)
        extras: list[Tensor] = [stress_along(state, surroundings)]
        if move is not None:
            # noise on what may not move must not matter: exploration and smoothing know no atoms
            move = move.to(self.dtype).allowed(state.structures)
            inputs = with_move(inputs, move, self.stiffness)
            extras.append(changes_along(move, surroundings, self.stiffness, inputs.force_scales))
        pairs = pair_inputs(surroundings, torch.cat(extras, dim=1))
        return self.backbone(inputs, surroundings, pairs, n_networks), inputs
