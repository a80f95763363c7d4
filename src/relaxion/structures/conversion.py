"""What comes from ASE is checked here, once."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.data import chemical_symbols

from relaxion.errors import MissingExtraError, StructureError

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
    height = 1.0 / np.linalg.norm(np.linalg.pinv(axes), axis=0).max()
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
