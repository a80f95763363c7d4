"""States as rows of numbers: one row per atom, one per structure. Packing and unpacking lose nothing but precision."""

from __future__ import annotations

import torch
from torch import Tensor

from relaxion.structures import Evaluation, Move, State, Structures

ATOM_WIDTHS = [
    3,
    3,
    3,
    3,
    1,
    1,
    3,
]  # position, force, last displacement, last force, element, movable; proposed displacement
STRUCTURE_WIDTHS = [
    9,
    9,
    9,
    3,
    1,
    1,
    1,
    1,
    9,
]  # cell, stress, last strain, periodic, energy, trust, calls, free; its strain
ATOM_COLUMNS = sum(ATOM_WIDTHS[:-1])  # of the state; the columns of the proposed move follow
STRUCTURE_COLUMNS = sum(STRUCTURE_WIDTHS[:-1])


def pack_atoms(state: State, dtype: torch.dtype) -> Tensor:
    """(n_atoms, ATOM_COLUMNS)"""
    structures = state.structures
    columns = [
        structures.positions,
        state.evaluation.forces,
        state.last_move.displacements,
        state.last_forces,
        structures.atomic_numbers[:, None],
        structures.movable[:, None],
    ]
    return torch.cat([column.to(dtype) for column in columns], dim=1)


def pack_structures(state: State, dtype: torch.dtype) -> Tensor:
    """(n_structures, STRUCTURE_COLUMNS); stresses nobody asked for are zero."""
    structures, stresses = state.structures, state.evaluation.stresses
    columns = [
        structures.cells.flatten(1),
        (torch.zeros_like(structures.cells) if stresses is None else stresses).flatten(1),
        state.last_move.strains.flatten(1),
        structures.periodic,
        state.evaluation.energies[:, None],
        state.trust_radii[:, None],
        state.calls[:, None],
        structures.cell_free[:, None],
    ]
    return torch.cat([column.to(dtype) for column in columns], dim=1)


def unpack(atoms: Tensor, structures: Tensor, structure_index: Tensor) -> tuple[State, Move]:
    """The states again, without a graph (edges cost more to store than to find), and the moves proposed from them.

    One `split` per kind of row: a draw of a hundred structures is bound by the number of calls, not by their size.
    """
    positions, forces, displacements, last_forces, numbers, movable, proposed = atoms.split(ATOM_WIDTHS, dim=1)
    cells, stresses, strains, periodic, energies, trust, calls, free, proposed_strains = structures.split(
        STRUCTURE_WIDTHS, dim=1
    )
    square = (len(structures), 3, 3)
    state = State(
        structures=Structures(
            positions=positions,
            cells=cells.view(square),
            periodic=periodic.bool(),
            atomic_numbers=numbers.squeeze(1).long(),
            structure_index=structure_index,
            movable=movable.squeeze(1).bool(),
            cell_free=free.squeeze(1).bool(),
        ),
        evaluation=Evaluation(energies.squeeze(1), forces, stresses.view(square)),
        graph=None,
        last_move=Move(displacements, strains.view(square)),
        last_forces=last_forces,
        trust_radii=trust.squeeze(1),
        calls=calls.squeeze(1).long(),
    )
    return state, Move(proposed, proposed_strains.view(square))
