"""From a state, and for critics a move, to what is known of each atom before it looks around."""

from __future__ import annotations

import torch
from torch import Tensor

from relaxion.networks.features import AtomInputs, lengths, softened
from relaxion.networks.species import N_DESCRIPTORS, descriptors
from relaxion.networks.surroundings import Surroundings
from relaxion.structures import Move, State
from relaxion.structures.structures import per_structure_sum

FORCE_FLOOR = 1e-4  # eV/Å, far below any tolerance; forces fall no farther on the logarithmic scale
LENGTH_FLOOR = 1e-5  # Å
N_STATE_SCALARS = N_DESCRIPTORS + 5
N_STATE_VECTORS = 3
N_MOVE_SCALARS = 1
N_MOVE_VECTORS = 1


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
