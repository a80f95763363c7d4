"""Many structures in one object, with an index saying which atom is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from relaxion.errors import StructureError

if TYPE_CHECKING:
    from ase import Atoms

    from relaxion.structures.move import Move


@dataclass(frozen=True, eq=False)
class Structures:
    """Atoms of `n_structures` structures, one after the other.

    Units and conventions: docs/conventions.md. Rows of a cell are its lattice vectors. Positions are never
    wrapped into the cell, so that a displacement is the plain difference of positions.
    """

    positions: Tensor  # (n_atoms, 3) Å
    cells: Tensor  # (n_structures, 3, 3) Å, rows are lattice vectors
    periodic: Tensor  # (n_structures, 3) bool
    atomic_numbers: Tensor  # (n_atoms,) int64
    structure_index: Tensor  # (n_atoms,) int64, never decreasing
    movable: Tensor  # (n_atoms,) bool, False: the atom keeps its (strained) place
    cell_free: Tensor  # (n_structures,) bool, True: the cell relaxes too

    def __post_init__(self) -> None:
        n_atoms, n_structures = self.positions.shape[0], self.cells.shape[0]
        expected = {
            "positions": (n_atoms, 3),
            "cells": (n_structures, 3, 3),
            "periodic": (n_structures, 3),
            "atomic_numbers": (n_atoms,),
            "structure_index": (n_atoms,),
            "movable": (n_atoms,),
            "cell_free": (n_structures,),
        }
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise StructureError(f"{name} has shape {found}, expected {shape}")

    def __repr__(self) -> str:
        return f"Structures({self.n_structures} structures, {self.n_atoms} atoms, {self.dtype})"

    def __len__(self) -> int:
        return self.n_structures

    @property
    def n_atoms(self) -> int:
        return self.positions.shape[0]

    @property
    def n_structures(self) -> int:
        return self.cells.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.positions.dtype

    @property
    def counts(self) -> Tensor:
        """Number of atoms of each structure."""
        return torch.bincount(self.structure_index, minlength=self.n_structures)  # (n_structures,)

    @property
    def volumes(self) -> Tensor:
        """Cell volumes; 0 where a structure has no cell."""
        return torch.linalg.det(self.cells).abs()  # (n_structures,) Å³

    @classmethod
    def from_ase(cls, images: Atoms | Sequence[Atoms], *, cell_free: bool | Sequence[bool] = False) -> Structures:
        """Structures from one `ase.Atoms` or a list of them; `FixAtoms` becomes `movable`."""
        from relaxion.structures.conversion import from_ase

        return from_ase(images, cell_free=cell_free)

    def to_ase(self) -> list[Atoms]:
        """A list of `ase.Atoms`, one per structure; atoms that may not move carry `FixAtoms`."""
        from relaxion.structures.conversion import to_ase

        return to_ase(self)

    def to(self, dtype: torch.dtype) -> Self:
        """The same structures with positions and cells in another precision."""
        return replace(self, positions=self.positions.to(dtype), cells=self.cells.to(dtype))

    def moved(self, move: Move) -> Self:
        """After the move: x' = x·(1 + ε) + u for atoms, h' = h·(1 + ε) for cells. Nothing is wrapped."""
        deform = torch.eye(3, dtype=self.dtype) + move.strains  # (n_structures, 3, 3)
        positions = torch.einsum("ni,nij->nj", self.positions, deform[self.structure_index]) + move.displacements
        return replace(self, positions=positions, cells=self.cells @ deform)

    def select(self, which: Tensor) -> Self:
        """The structures numbered or masked by `which`, in that order; repeats are allowed."""
        which = which.nonzero().flatten() if which.dtype == torch.bool else which
        rows, index = atom_rows(self.counts, which)
        return replace(
            self,
            positions=self.positions[rows],
            cells=self.cells[which],
            periodic=self.periodic[which],
            atomic_numbers=self.atomic_numbers[rows],
            structure_index=index,
            movable=self.movable[rows],
            cell_free=self.cell_free[which],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Structures]) -> Structures:
        """One object from several, in order."""
        if not parts:
            raise StructureError("nothing to concatenate: the list of structures is empty")
        starts = torch.tensor([0, *[part.n_structures for part in parts[:-1]]]).cumsum(0)
        index = [part.structure_index + start for part, start in zip(parts, starts, strict=True)]
        return cls(
            positions=torch.cat([part.positions for part in parts]),
            cells=torch.cat([part.cells for part in parts]),
            periodic=torch.cat([part.periodic for part in parts]),
            atomic_numbers=torch.cat([part.atomic_numbers for part in parts]),
            structure_index=torch.cat(index),
            movable=torch.cat([part.movable for part in parts]),
            cell_free=torch.cat([part.cell_free for part in parts]),
        )


def atom_rows(counts: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the atoms of the chosen structures, and the new structure index of each row."""
    starts = counts.cumsum(0) - counts
    chosen = counts[which]
    index = torch.repeat_interleave(torch.arange(len(which)), chosen)
    first_row = chosen.cumsum(0) - chosen
    within = torch.arange(int(chosen.sum())) - first_row[index]
    return starts[which][index] + within, index


def per_structure_sum(values: Tensor, structure_index: Tensor, n_structures: int) -> Tensor:
    """Sum of per-atom (or per-pair) values over each structure."""
    return values.new_zeros((n_structures, *values.shape[1:])).index_add_(0, structure_index, values)


def per_structure_max(values: Tensor, structure_index: Tensor, n_structures: int, empty: float = 0.0) -> Tensor:
    """Largest per-atom (or per-pair) value of each structure; `empty` where there is none."""
    start = values.new_full((n_structures,), empty)
    return start.scatter_reduce(0, structure_index, values, "amax", include_self=False)
