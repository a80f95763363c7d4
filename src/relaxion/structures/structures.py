"""Many structures in one object, with an index saying which atom is whose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.structures.conversion import check_atoms, movable

if TYPE_CHECKING:
    from relaxion.structures.structures import Move

# fields of `Structures`, and the shape of what belongs to one atom or structure
PER_ATOM = {"positions": (3,), "atomic_numbers": (), "structure_index": (), "movable": ()}
PER_STRUCTURE = {"cells": (3, 3), "periodic": (3,), "cell_free": ()}


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
        for number, shapes in ((self.n_atoms, PER_ATOM), (self.n_structures, PER_STRUCTURE)):
            for name, shape in shapes.items():
                found = tuple(getattr(self, name).shape)
                if found != (number, *shape):
                    raise StructureError(f"{name} has shape {found}, expected {(number, *shape)}")

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
        images = [images] if isinstance(images, Atoms) else list(images)
        if not images:
            raise StructureError("the list of structures is empty; give at least one")
        free = [cell_free] * len(images) if isinstance(cell_free, bool) else list(cell_free)
        if len(free) != len(images):
            raise StructureError(f"cell_free has {len(free)} entries for {len(images)} structures")
        for number, (atoms, is_free) in enumerate(zip(images, free, strict=True)):
            check_atoms(atoms, f"structure {number}")
            if is_free and not atoms.pbc.all():
                raise StructureError(
                    f"structure {number} cannot relax its cell: it is periodic along {int(atoms.pbc.sum())} of 3 axes"
                )
        counts = torch.tensor([len(atoms) for atoms in images])
        return cls(
            positions=torch.from_numpy(np.concatenate([atoms.positions for atoms in images]).astype(np.float64)),
            cells=torch.from_numpy(np.stack([np.asarray(atoms.cell) for atoms in images]).astype(np.float64)),
            periodic=torch.from_numpy(np.stack([atoms.pbc for atoms in images])),
            atomic_numbers=torch.from_numpy(np.concatenate([atoms.numbers for atoms in images]).astype(np.int64)),
            structure_index=torch.repeat_interleave(torch.arange(len(images)), counts),
            movable=torch.from_numpy(np.concatenate([movable(atoms, n) for n, atoms in enumerate(images)])),
            cell_free=torch.tensor(free),
        )

    def to_ase(self) -> list[Atoms]:
        """A list of `ase.Atoms`, float64, one per structure; atoms that may not move carry `FixAtoms`."""
        images, start = [], 0
        for number, end in enumerate(self.counts.cumsum(0).tolist()):
            atoms = Atoms(
                numbers=self.atomic_numbers[start:end].numpy(),
                positions=self.positions[start:end].detach().to(torch.float64).numpy(),
                cell=self.cells[number].detach().to(torch.float64).numpy(),
                pbc=self.periodic[number].numpy(),
            )
            fixed = (~self.movable[start:end]).numpy()
            if fixed.any():
                atoms.set_constraint(FixAtoms(mask=fixed))
            images.append(atoms)
            start = end
        return images

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
        which = numbers_of(which)
        rows, index = atom_rows(self.counts, which)
        chosen = {**rows_of(self, PER_ATOM, rows), **rows_of(self, PER_STRUCTURE, which)}
        return replace(self, **{**chosen, "structure_index": index})

    @classmethod
    def concatenate(cls, parts: Sequence[Structures]) -> Structures:
        """One object from several, in order."""
        if not parts:
            raise StructureError("nothing to concatenate: the list of structures is empty")
        starts = torch.tensor([0, *[part.n_structures for part in parts[:-1]]]).cumsum(0)
        index = [part.structure_index + start for part, start in zip(parts, starts, strict=True)]
        return cls(**{**concatenated(parts, (*PER_ATOM, *PER_STRUCTURE)), "structure_index": torch.cat(index)})


def numbers_of(which: Tensor) -> Tensor:
    """Of the structures that are numbered or masked."""
    return which.nonzero().flatten() if which.dtype == torch.bool else which


def rows_of(thing: object, names: Iterable[str], rows: Tensor) -> dict[str, Tensor]:
    """These rows of fields that have one row per atom, or one per structure."""
    return {name: getattr(thing, name)[rows] for name in names}


def concatenated(parts: Sequence[object], names: Iterable[str]) -> dict[str, Tensor]:
    """Fields of several, in order."""
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in names}


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
