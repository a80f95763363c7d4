"""A place an optimizer has been to, what the calculator said there, and where to look next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray

from relaxion.structures import Structures

Array: TypeAlias = NDArray[np.float64]

SHORTEST_BOND = 1.0  # Å; of elements without a radius (X), or smaller than any


@dataclass(frozen=True)
class Geometry:
    """A structure in the coordinates an ASE optimizer moves.

    With a free cell three rows follow those of the atoms: `cell_factor` (Å) × deformation; 0 means that the cell does
    not move. ASE's filters have a factor of their own (`ase_cell_factor`), which decides when forces are small enough
    and nothing else. `free` marks the coordinates that may move.
    """

    positions: Array  # (n_atoms, 3) Å
    cell: Array  # (3, 3) Å
    periodic: NDArray[np.bool_]  # (3,)
    numbers: NDArray[np.int64]  # (n_atoms,)
    free: NDArray[np.bool_]  # (n_rows, 3)
    cell_factor: float = 0.0
    ase_cell_factor: float = 0.0
    drawn: bool = True  # False: springs would change the cell in ways the filter forbids

    @property
    def n_atoms(self) -> int:
        return len(self.positions)

    @property
    def volume(self) -> float:
        return abs(float(np.linalg.det(self.cell)))


@dataclass(frozen=True)
class Point:
    """Coordinates as ASE moves them (atoms, then three rows for a free cell), forces and energy there."""

    coordinates: Array  # (n_rows, 3) Å
    forces: Array  # (n_rows, 3) eV/Å
    energy: float  # eV
    geometry: Geometry | None  # None: not a plain structure, springs cannot be drawn

    @classmethod
    def restored(cls, plain: Mapping[str, Any]) -> Point:
        """From a restart file, where `asdict` of it was written."""
        saved = plain["geometry"]
        geometry = saved and Geometry(
            positions=rows_of_three(saved["positions"]),
            cell=rows_of_three(saved["cell"]),
            periodic=np.asarray(saved["periodic"], dtype=bool),
            numbers=np.asarray(saved["numbers"], dtype=np.int64),
            free=np.asarray(saved["free"], dtype=bool),
            cell_factor=float(saved["cell_factor"]),
            ase_cell_factor=float(saved["ase_cell_factor"]),
            drawn=bool(saved["drawn"]),
        )
        coordinates = rows_of_three(plain["coordinates"])
        return cls(coordinates, rows_of_three(plain["forces"]), float(plain["energy"]), geometry)

    @property
    def largest_force(self) -> float:
        """As ASE measures it, eV/Å; the pull on a cell depends on the factor of the filter."""
        if self.geometry is None or not self.geometry.cell_factor:
            return longest(self.forces)
        n_atoms = self.geometry.n_atoms
        pulls = self.forces[n_atoms:] * (self.geometry.cell_factor / self.geometry.ase_cell_factor)
        return max(longest(self.forces[:n_atoms]), longest(pulls))

    def reach(self, step: Array) -> float:
        """How far a step goes as atoms feel it, Å: the longest displacement, or what the strain changes a bond by."""
        if self.geometry is None or not self.geometry.cell_factor:
            return longest(step)
        n_atoms = self.geometry.n_atoms
        stretch = float(np.linalg.norm(step[n_atoms:], ord=2)) / np.sqrt(n_atoms) if np.isfinite(step).all() else np.nan
        return max(longest(step[:n_atoms]), stretch)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.energy) and np.isfinite(self.forces).all())

    @property
    def not_finite(self) -> str:
        """Which of the calculator's answers are not, in words."""
        n_atoms = len(self.forces) if self.geometry is None else self.geometry.n_atoms
        bad = np.flatnonzero(~np.isfinite(self.forces).all(axis=1))
        atoms = bad[bad < n_atoms]
        words = [] if np.isfinite(self.energy) else [f"the energy ({self.energy})"]
        if len(atoms):
            words.append(f"the forces on {len(atoms)} of {n_atoms} atoms (the first is atom {atoms[0]})")
        if len(bad) > len(atoms):
            words.append("the stress")
        return " and ".join(words)


@dataclass(frozen=True)
class Proposal:
    """Where to look next: `step` away from `base`, and what a quadratic model expects there."""

    base: Point
    step: Array  # (n_rows, 3) Å
    expected_change: float  # eV, below 0
    method: str  # "policy", "valence", "springs", "plain" or "fire"
    reason: str = ""  # why this method, where the guard chose it, or FIRE came to help
    wanted: Array | None = None  # the step before trust radius and screen; None: as it is
    trust: float = 0.0  # Å, the trust radius it had to keep to
    control: Mapping[str, float] = field(default_factory=dict)  # the step rule of a policy; empty without one
    uphill: bool = False  # the secants led uphill and were left out


def cell_factor_of(numbers: NDArray[np.int64]) -> float:
    """√n_atoms × a typical bond length, Å.

    With this scale a strain is as stiff as the displacements beside it, and steps are the same for any number of copies
    of a cell. A row divided by √n_atoms is what the strain changes a bond by.
    """
    bond = max(2 * float(covalent_radii[numbers].mean()), SHORTEST_BOND)
    return float(np.sqrt(len(numbers))) * bond


def rows_of_three(values: Any) -> Array:
    """Coordinates, forces or vectors from a file. ValueError where they are none."""
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError(f"expected rows of three numbers, found shape {rows.shape}")
    return rows


def longest(rows: Array) -> float:
    """Length of the longest row."""
    return float(np.sqrt((rows**2).sum(axis=1).max()))


def dot(first: Array, second: Array) -> float:
    """Scalar product over all coordinates."""
    return float(np.vdot(first, second))


def cosine(first: Array, second: Array) -> float:
    """Of the angle between two vectors of all coordinates; 0 where one of them has no length."""
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return dot(first, second) / lengths if lengths > 0 else 0.0


def structures_of(geometries: Sequence[Geometry]) -> Structures:
    """Many geometries as networks and neighbour searches see them."""
    counts = torch.tensor([geometry.n_atoms for geometry in geometries])
    movable = [geometry.free[: geometry.n_atoms].any(axis=1) for geometry in geometries]
    return Structures(
        positions=torch.from_numpy(np.concatenate([geometry.positions for geometry in geometries])),
        cells=torch.from_numpy(np.stack([geometry.cell for geometry in geometries])),
        periodic=torch.from_numpy(np.stack([geometry.periodic for geometry in geometries])),
        atomic_numbers=torch.from_numpy(np.concatenate([geometry.numbers for geometry in geometries])),
        structure_index=torch.repeat_interleave(torch.arange(len(geometries)), counts),
        movable=torch.from_numpy(np.concatenate(movable)),
        cell_free=torch.tensor([geometry.cell_factor > 0 for geometry in geometries]),
    )
