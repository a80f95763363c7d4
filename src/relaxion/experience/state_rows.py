"""States as rows of numbers: one row per atom, one per structure. Packing and unpacking lose nothing but precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from relaxion.structures import Evaluation, Move, State, Structures

# position, force, last displacement, last force, element, movable; proposed displacement
ATOM_WIDTHS = [3, 3, 3, 3, 1, 1, 3]
# cell, stress, last strain, periodic, energy, trust, calls, free; its strain
STRUCTURE_WIDTHS = [9, 9, 9, 3, 1, 1, 1, 1, 9]
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


def state_tensors(state: State) -> dict[str, Tensor]:
    """A whole state, without its graph, for a checkpoint; float64 loses nothing."""
    return {
        "atoms": pack_atoms(state, torch.float64),
        "structures": pack_structures(state, torch.float64),
        "counts": state.structures.counts,
    }


def state_from_tensors(tensors: Mapping[str, Tensor]) -> State:
    """The opposite of `state_tensors`; a KeyError or ValueError when the tensors are no state's."""
    counts = tensors["counts"]
    expected = [(int(counts.sum()), ATOM_COLUMNS), (len(counts), STRUCTURE_COLUMNS)]
    rows = [tensors["atoms"], tensors["structures"]]
    if [tuple(row.shape) for row in rows] != expected:
        raise ValueError(f"a state of {[tuple(row.shape) for row in rows]} numbers, expected {expected}")
    padded = [
        torch.cat([row, row.new_zeros(len(row), widths[-1])], dim=1)
        for row, widths in zip(rows, (ATOM_WIDTHS, STRUCTURE_WIDTHS), strict=True)
    ]
    state = unpack(padded[0], padded[1], torch.repeat_interleave(counts))[0]
    return _own_memory(state)


def _own_memory(thing: Any) -> Any:
    """The same with every tensor lying by itself, as a step leaves it: sums over strides may round otherwise."""
    if isinstance(thing, Tensor):
        return thing.clone(memory_format=torch.contiguous_format)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _own_memory(getattr(thing, f.name)) for f in fields(thing)})
    return thing


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
