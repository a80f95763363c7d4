"""From and to ASE. Input is checked here, once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import chemical_symbols

from relaxion.errors import StructureError
from relaxion.structures.structures import Structures

LARGEST_EXTENT = 1e8  # Å, a centimetre
SMALLEST_HEIGHT = 0.05  # Å between lattice planes; the smallest of real crystals have 1
SMALLEST_VOLUME = 1e-6  # Å³; below it a periodic cell counts as flat


def check_atoms(atoms: Atoms, name: str = "the structure") -> None:
    """Refuse what no potential can answer: no atoms, NaN, unknown elements, a flat periodic cell."""
    if len(atoms) == 0:
        raise StructureError(f"{name} has no atoms; give one with at least one atom")
    bad = np.flatnonzero(~np.isfinite(atoms.positions).all(axis=1))
    if len(bad):
        raise StructureError(
            f"{name}: {len(bad)} of {len(atoms)} positions are not finite (first: atom {bad[0]}); repair the input"
        )
    strange = np.flatnonzero((atoms.numbers < 1) | (atoms.numbers >= len(chemical_symbols)))
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
    height = 1.0 / np.linalg.norm(np.linalg.pinv(axes), axis=0).max()
    if height < SMALLEST_HEIGHT:
        raise StructureError(
            f"{name}: lattice planes are only {height:.3g} Å apart; correct the cell or its unit, or choose shorter "
            "lattice vectors for it"
        )


def from_ase(images: Atoms | Sequence[Atoms], *, cell_free: bool | Sequence[bool] = False) -> Structures:
    """One `Structures` from one `ase.Atoms` or several. `FixAtoms` is kept, other constraints are refused."""
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
    return Structures(
        positions=torch.from_numpy(np.concatenate([atoms.positions for atoms in images]).astype(np.float64)),
        cells=torch.from_numpy(np.stack([np.asarray(atoms.cell) for atoms in images]).astype(np.float64)),
        periodic=torch.from_numpy(np.stack([atoms.pbc for atoms in images])),
        atomic_numbers=torch.from_numpy(np.concatenate([atoms.numbers for atoms in images]).astype(np.int64)),
        structure_index=torch.repeat_interleave(torch.arange(len(images)), counts),
        movable=torch.from_numpy(np.concatenate([_movable(atoms, n) for n, atoms in enumerate(images)])),
        cell_free=torch.tensor(free),
    )


def _movable(atoms: Atoms, number: int) -> np.ndarray:
    movable = np.ones(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if not isinstance(constraint, FixAtoms):
            raise StructureError(
                f"structure {number} carries {type(constraint).__name__}; only FixAtoms can be converted "
                "(relaxion.Relaxer takes ASE atoms with any constraint)"
            )
        movable[constraint.index] = False
    return movable


def to_ase(structures: Structures) -> list[Atoms]:
    """A list of `ase.Atoms`, float64."""
    images, start = [], 0
    for number, end in enumerate(structures.counts.cumsum(0).tolist()):
        atoms = Atoms(
            numbers=structures.atomic_numbers[start:end].numpy(),
            positions=structures.positions[start:end].detach().to(torch.float64).numpy(),
            cell=structures.cells[number].detach().to(torch.float64).numpy(),
            pbc=structures.periodic[number].numpy(),
        )
        fixed = (~structures.movable[start:end]).numpy()
        if fixed.any():
            atoms.set_constraint(FixAtoms(mask=fixed))
        images.append(atoms)
        start = end
    return images


def forget_symmetry(atoms: Atoms) -> None:
    """Remove what ASE's CIF reader adds and what is no longer true once the atoms have moved."""
    for key in ("spacegroup", "unit_cell", "occupancy"):
        atoms.info.pop(key, None)
    atoms.arrays.pop("spacegroup_kinds", None)
