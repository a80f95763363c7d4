"""What is read from ASE: coordinates, forces, energy, and a geometry the springs understand.

Only the public methods of atoms and filters are used; ASE's `optimizable` changed sign between releases. Where there
are no atoms behind an `Optimizable`, its sign is found out once (`gradient_sign`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian
from ase.filters import ExpCellFilter, Filter, FrechetCellFilter, OptimizableFilter, UnitCellFilter
from ase.io import iread
from ase.optimize.optimize import OptimizableAtoms
from ase.utils.abc import Optimizable

from relaxion.errors import StructureError
from relaxion.optimizer.point import Array, Geometry, Point, cell_factor_of
from relaxion.structures.conversion import check_atoms

STEPS_WITHOUT_MOTION = 3  # so many executed moves of length zero in a row: constraints leave no way
SHORTEST_MOTION = 1e-10  # Å


class Coordinates(Filter):
    """An `Optimizable` without atoms behind it, such as a test function, as rows of three coordinates.

    The last row is filled up with zeros. `atoms` are dummy atoms at the rows, for those who look at the way.
    """

    def __init__(self, optimizable: Optimizable) -> None:
        self._optimizable = optimizable

    @property
    def atoms(self) -> Atoms:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Atoms(f"X{len(self)}", self.get_positions())

    def get_positions(self) -> Array:
        return self._rows(self._optimizable.get_x())

    def set_positions(self, positions: Array, **_: Any) -> None:
        self._optimizable.set_x(positions.ravel()[: self._optimizable.ndofs()])

    def get_forces(self) -> Array:
        gradient = np.asarray(self._optimizable.get_gradient(), dtype=np.float64)
        return -gradient_sign() * self._rows(gradient)

    def get_potential_energy(self, **_: Any) -> float:
        return float(self._optimizable.get_value())

    def __len__(self) -> int:
        return -(-self._optimizable.ndofs() // 3)

    def __ase_optimizable__(self) -> Optimizable:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._optimizable

    def _rows(self, values: Array) -> Array:
        rows = np.zeros(3 * len(self))
        rows[: len(values)] = values
        return rows.reshape(-1, 3)


@cache
def gradient_sign() -> float:
    """-1 where `Optimizable.get_gradient` of the installed ASE gives forces, as up to 3.26; else 1."""
    probe = Atoms("H")
    probe.calc = SinglePointCalculator(probe, forces=np.ones((1, 3)))
    return -float(OptimizableAtoms(probe).get_gradient()[0])


def unwrapped(target: Atoms | Filter | Optimizable) -> Atoms | Filter:
    """The atoms or the filter inside an `Optimizable` of ASE; any other `Optimizable` as `Coordinates`."""
    if isinstance(target, OptimizableAtoms):
        return target.atoms
    if isinstance(target, OptimizableFilter):
        return target.filterobj
    return Coordinates(target) if isinstance(target, Optimizable) else target


def check_door(target: Atoms | Filter | Optimizable) -> None:
    """Refuse what cannot be relaxed as one structure."""
    band = getattr(target, "neb", target)
    if hasattr(band, "nimages") or hasattr(band, "neb_method"):
        raise StructureError(
            "Relaxer cannot relax a band of images (NEB), whose forces are not the gradient of an energy; relax the "
            "two ends with Relaxer, and the band with ase.optimize.FIRE or ase.mep.neb.NEBOptimizer"
        )
    if isinstance(target, Atoms | Filter):
        check_atoms(bare_atoms(target))


@contextmanager
def quiet_filters() -> Iterator[None]:
    """Without the warning, at every step, that the logarithm in ASE's FrechetCellFilter is inexact: by 1e-13."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "logm result may be inaccurate", RuntimeWarning)
        yield


def bare_atoms(target: Atoms | Filter) -> Atoms:
    """The atoms behind any filter."""
    return target if isinstance(target, Atoms) else bare_atoms(target.atoms)


def read_point(target: Atoms | Filter, coordinates: Array | None = None) -> Point:
    """What the calculator says where the atoms are now. Forces first: most calculators then know the energy.

    `coordinates`: those of now, where somebody has read them already; cell filters take milliseconds for them.
    """
    forces = np.array(target.get_forces(), dtype=np.float64).reshape(-1, 3)
    forces[-3:] /= cell_ratio(target)
    here = read_coordinates(target) if coordinates is None else coordinates
    return Point(here, forces, read_energy(target), read_geometry(target))


def images_in(trajectory: str | Path | Iterable[Atoms]) -> list[Atoms]:
    """Those of an open trajectory, or of a file."""
    return [*iread(trajectory, ":")] if isinstance(trajectory, str | Path) else [*trajectory]


def points_at(target: Atoms | Filter, images: Iterable[Atoms]) -> Iterator[Point]:
    """What was found at images of a trajectory, as the target has it; afterwards its atoms are where they were."""
    atoms = bare_atoms(target)
    before = atoms.positions.copy(), atoms.cell.copy(), atoms.calc
    try:
        for image in images:
            atoms.positions, atoms.cell, atoms.calc = image.positions, image.cell, image.calc
            yield read_point(target)
    finally:
        atoms.positions, atoms.cell, atoms.calc = before


def read_coordinates(target: Atoms | Filter) -> Array:
    """The coordinates as they are, after whatever constraints made of the last move."""
    coordinates = np.array(target.get_positions(), dtype=np.float64).reshape(-1, 3)
    coordinates[-3:] *= cell_ratio(target)
    return coordinates


def place(target: Atoms | Filter, coordinates: Array) -> None:
    """Put the atoms, and the cell where it is free, there."""
    rows = coordinates.copy()
    rows[-3:] /= cell_ratio(target)
    target.set_positions(rows)


def cell_ratio(target: Atoms | Filter) -> float:
    """Our factor of the rows of a cell over that of the filter; 1 without such rows."""
    if not isinstance(target, UnitCellFilter):
        return 1.0
    return cell_factor_of(bare_atoms(target).numbers) / _ase_cell_factor(target)


def _ase_cell_factor(target: UnitCellFilter) -> float:
    return float(target.exp_cell_factor if isinstance(target, FrechetCellFilter) else target.cell_factor)


def read_energy(target: Atoms | Filter) -> float:
    """The energy that belongs to the forces, where the calculator tells it apart."""
    try:
        return float(target.get_potential_energy(force_consistent=True))
    except PropertyNotImplementedError:
        return float(target.get_potential_energy(force_consistent=False))


def has_geometry(target: Atoms | Filter) -> bool:
    """Whether springs and policies understand its coordinates; else every step is one of plain L-BFGS.

    With hydrostatic strain or a constant volume they would change the shape of the cell, which the user forbids.
    """
    if isinstance(target, UnitCellFilter) and type(target) in (UnitCellFilter, FrechetCellFilter, ExpCellFilter):
        return not (target.hydrostatic_strain or target.constant_volume)
    return isinstance(target, Atoms)


def read_geometry(target: Atoms | Filter) -> Geometry | None:
    """The geometry behind the coordinates, or None where they are not those of atoms and a cell."""
    if isinstance(target, UnitCellFilter):
        return _geometry_of_cell_filter(target)
    if not has_geometry(target):
        return None
    return geometry_of(bare_atoms(target), _free_coordinates(bare_atoms(target)), 0.0)


def _geometry_of_cell_filter(target: UnitCellFilter) -> Geometry:
    atoms = target.atoms
    allowed = np.asarray(target.mask, dtype=bool)
    geometry = geometry_of(atoms, np.concatenate([_free_coordinates(atoms), allowed]), cell_factor_of(atoms.numbers))
    return replace(geometry, ase_cell_factor=_ase_cell_factor(target), drawn=has_geometry(target))


def geometry_of(atoms: Atoms, free: np.ndarray, cell_factor: float) -> Geometry:
    return Geometry(
        positions=np.array(atoms.positions),
        cell=np.array(atoms.cell),
        periodic=np.array(atoms.pbc),
        numbers=np.array(atoms.numbers, dtype=np.int64),
        free=free,
        cell_factor=cell_factor,
    )


def _free_coordinates(atoms: Atoms) -> np.ndarray:
    """Which coordinates may move. Constraints other than these two act when ASE sets the positions."""
    free = np.ones((len(atoms), 3), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms):
            free[constraint.index] = False
        elif isinstance(constraint, FixCartesian):
            free[constraint.index] &= ~np.asarray(constraint.mask, dtype=bool)
    return free
