"""From a state, and for critics a move, to the features of every atom: inputs and pairs, then the backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relaxion.model.backbone import AtomInputs, BackboneSettings, Features, InformationSettings, backbone_class
from relaxion.model.layers import (
    N_DESCRIPTORS,
    Generator,
    Surroundings,
    changes_along,
    descriptors,
    lengths,
    pair_inputs,
    softened,
    stress_along,
)
from relaxion.structures import Move, State
from relaxion.structures.structures import per_structure_sum

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
    around = surroundings.envelope * squares.index_select(0, surroundings.neighbors)
    weights = surroundings.normalisers.square()  # 1 / (1 + Σ envelope)
    summed = per_structure_sum(around, surroundings.centers, len(forces))
    return torch.sqrt(weights * (squares + summed) + FORCE_FLOOR**2)


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
    """A network for atoms: what it sees, and how far environment information may speak."""

    moves_follow_forces: bool = True
    """Proposed moves are measured in F/k, F the root mean square force around an atom: near the minimum the same answer
    gives a smaller step, and none where there is no force. False: in the greatest length allowed."""


class Observer(nn.Module):
    """`n_networks` backbones side by side. With `sees_moves` they judge a move, without they see the state only."""

    def __init__(
        self, settings: BackboneSettings, generator: Generator, *, n_networks: int = 1, sees_moves: bool = False
    ) -> None:
        super().__init__()
        self.cutoff, self.n_radial = settings.cutoff_angstrom, settings.n_radial
        self.stiffness = settings.stiffness_ev_per_angstrom2  # eV/Å²
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
