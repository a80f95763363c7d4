"""Many structures in one object, with an index saying which atom is whose. What comes from ASE is checked here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import chemical_symbols
from torch import Tensor

from relaxion.errors import MissingExtraError, SettingsError, StructureError

LARGEST_EXTENT = 1e8  # Å, a centimetre
SMALLEST_HEIGHT = 0.05  # Å between lattice planes; the smallest of real crystals have 1
SYMMETRY_TOLERANCE_ANGSTROM = 0.01  # where the space group is kept
SMALLEST_VOLUME = 1e-6  # Å³; below it a periodic cell counts as flat


def check_atoms(atoms: Atoms, name: str = "the structure") -> None:
    """Refuse what no potential can answer: no atoms, NaN, unknown elements, a flat periodic cell.

    Dummy atoms (X, number 0) pass: potentials that treat all elements alike can answer for them, the others refuse X.
    """
    if len(atoms) == 0:
        raise StructureError(f"{name} has no atoms; give one with at least one atom")
    bad = np.flatnonzero(~np.isfinite(atoms.positions).all(axis=1))
    if len(bad):
        raise StructureError(
            f"{name}: {len(bad)} of {len(atoms)} positions are not finite (first: atom {bad[0]}); repair the input"
        )
    strange = np.flatnonzero((atoms.numbers < 0) | (atoms.numbers >= len(chemical_symbols)))
    if len(strange):
        first = int(strange[0])
        raise StructureError(f"{name}: atom {first} has no chemical element (number {atoms.numbers[first]})")
    _check_cell(atoms, name)


def _check_cell(atoms: Atoms, name: str) -> None:
    cell = np.asarray(atoms.cell)
    if not np.isfinite(cell).all():
        raise StructureError(f"{name}: the cell is not finite; repair the input")
    axes = cell[atoms.pbc]
    if max(abs(atoms.positions).max(), abs(axes).max(initial=0.0)) > LARGEST_EXTENT:
        raise StructureError(f"{name} reaches beyond {LARGEST_EXTENT:g} Å; correct the positions, the cell or its unit")
    if len(axes) == 0:
        return
    # the volume spanned by the periodic lattice vectors alone: a slab may have no third vector
    extent = float(np.sqrt(abs(np.linalg.det(axes @ axes.T))))
    if extent < SMALLEST_VOLUME:
        raise StructureError(
            f"{name} is periodic along {len(axes)} axes but its cell spans only {extent:.3g} Å^{len(axes)}; "
            "set a cell with volume, or pbc=False"
        )
    # as many images as the cutoff has heights are looked for: the thinner, the more, without an end
    dual = np.linalg.inv(axes) if len(axes) == 3 else np.linalg.pinv(axes)
    height = 1.0 / np.linalg.norm(dual, axis=0).max()
    if height < SMALLEST_HEIGHT:
        raise StructureError(
            f"{name}: lattice planes are only {height:.3g} Å apart; correct the cell or its unit, or choose shorter "
            "lattice vectors for it"
        )


def movable(atoms: Atoms, number: int) -> np.ndarray:
    """Which atoms may move. `FixAtoms` is understood, other constraints are refused."""
    found = np.ones(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if not isinstance(constraint, FixAtoms):
            raise StructureError(
                f"structure {number} carries {type(constraint).__name__}; only FixAtoms can be converted "
                "(relaxion.Relaxer takes ASE atoms with any constraint)"
            )
        found[constraint.index] = False
    return found


def forget_symmetry(atoms: Atoms) -> None:
    """Remove what ASE's CIF reader adds and what is no longer true once the atoms have moved."""
    for key in ("spacegroup", "unit_cell", "occupancy"):
        atoms.info.pop(key, None)
    atoms.arrays.pop("spacegroup_kinds", None)


def symmetric(atoms: Atoms) -> Atoms:
    """The same, held to the space group that it has within the tolerance."""
    if find_spec("spglib") is None:
        raise MissingExtraError("keeping the symmetry needs the package spglib; try: pip install spglib")
    if not atoms.pbc.all():
        raise StructureError("the symmetry is kept only of structures that are periodic along all axes")
    from ase.constraints import FixSymmetry

    held = atoms.copy()
    held.set_constraint([*atoms.constraints, FixSymmetry(held, symprec=SYMMETRY_TOLERANCE_ANGSTROM)])
    return held


# ---- Many structures in one object, with an index saying which atom is whose.

DeviceLike: TypeAlias = str | torch.device | None
"""A word ("cpu", "cuda", "cuda:1", "mps"), a `torch.device`, or None for the CPU."""


def device_of(word: DeviceLike) -> torch.device:
    """The device meant by `word`; a sentence where torch does not know it, or does not see it on this machine."""
    try:
        device = torch.device(word or "cpu")
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"unknown device '{word}'; try 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda" and (device.index or 0) >= (number := torch.cuda.device_count()):
        found = "no CUDA device" if number == 0 else f"{number} CUDA device{'s' if number > 1 else ''}"
        raise SettingsError(f"the device '{device}' does not exist: torch found {found}; try 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingsError("the device 'mps' is not there; try 'cpu'")
    return device


Thing = TypeVar("Thing")


def moved_to(device: torch.device, thing: Thing) -> Thing:
    """A tensor, or a dataclass with all tensors in it, on that device; itself where it is there already."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)  # pyright: ignore[reportReturnType] - it is a Tensor too
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    parts: dict[str, Any] = {part.name: getattr(thing, part.name) for part in fields(thing)}
    moved = {name: moved_to(device, value) for name, value in parts.items()}
    changed = {name: value for name, value in moved.items() if value is not parts[name]}
    return replace(thing, **changed) if changed else thing  # pyright: ignore[reportReturnType]


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
        images = []
        start = 0
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


@dataclass(frozen=True, eq=False)
class Move:
    """Displacements and strains; the strain is zero where the cell is fixed."""

    displacements: Tensor  # (n_atoms, 3) Å
    strains: Tensor  # (n_structures, 3, 3), symmetric, no unit

    @classmethod
    def zero(cls, structures: Structures) -> Move:
        """The move that changes nothing."""
        return cls(torch.zeros_like(structures.positions), torch.zeros_like(structures.cells))

    @classmethod
    def between(cls, before: Structures, after: Structures) -> Move:
        """The move that takes `before` to `after`, measured without wrapping through the cell.

        The strain is read from the cells (zero for a structure without volume); displacements are the rest.
        """
        strains = torch.zeros_like(before.cells)
        solid = before.volumes > 0
        identity = torch.eye(3, dtype=before.dtype)
        strains[solid] = torch.linalg.solve(before.cells[solid], after.cells[solid]) - identity
        strained = before.moved(cls(torch.zeros_like(before.positions), strains)).positions
        return cls(after.positions - strained, strains)

    def to(self, dtype: torch.dtype) -> Self:
        """The same move in another precision."""
        return replace(self, displacements=self.displacements.to(dtype), strains=self.strains.to(dtype))

    def scaled(self, factors: Tensor, structures: Structures) -> Self:
        """Each structure's part of the move times its own factor."""
        return replace(
            self,
            displacements=self.displacements * factors[structures.structure_index, None],
            strains=self.strains * factors[:, None, None],
        )

    def allowed(self, structures: Structures) -> Self:
        """Nothing for atoms that may not move, no strain for fixed cells."""
        return replace(
            self,
            displacements=self.displacements * structures.movable[:, None],
            strains=self.strains * structures.cell_free[:, None, None],
        )

    def select(self, counts: Tensor, which: Tensor) -> Self:
        """The part that belongs to the chosen structures (`counts`: atoms of each structure)."""
        which = numbers_of(which)
        rows, _ = atom_rows(counts, which)
        return replace(self, displacements=self.displacements[rows], strains=self.strains[which])

    @classmethod
    def concatenate(cls, parts: Sequence[Move]) -> Move:
        """One move from several, in order."""
        return cls(**concatenated(parts, ("displacements", "strains")))

    def largest_displacements(self, structures: Structures) -> Tensor:
        """How far the atom that moves most moves, for each structure."""
        lengths = self.displacements.norm(dim=1)  # (n_atoms,) Å
        return per_structure_max(lengths, structures.structure_index, structures.n_structures)

    def strain_sizes(self) -> Tensor:
        """Frobenius norms of the strains: the same in every frame, never below the largest stretch."""
        return self.strains.flatten(1).norm(dim=1)  # (n_structures,)

    def bounded(self, structures: Structures, max_displacement: float, max_strain: float) -> Self:
        """Shortened as a whole until no atom moves farther (Å) and no strain is larger than the bounds.

        One factor per structure, taken from lengths: the direction survives, and with it equivariance (R6.5).
        """
        factors = torch.minimum(
            max_displacement / self.largest_displacements(structures).clamp_min(max_displacement),
            max_strain / self.strain_sizes().clamp_min(max_strain),
        )
        return self.scaled(factors, structures)
