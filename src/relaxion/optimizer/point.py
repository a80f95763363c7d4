"""A place an optimizer has been to, what the calculator said there, and where to look next."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian
from ase.data import covalent_radii
from ase.filters import ExpCellFilter, Filter, FrechetCellFilter, OptimizableFilter, UnitCellFilter
from ase.io import iread
from ase.optimize.optimize import OptimizableAtoms
from ase.utils.abc import Optimizable
from numpy.typing import NDArray

from relaxion.errors import SettingsError, StructureError
from relaxion.structures import Structures
from relaxion.structures.structures import check_atoms

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

    @cached_property
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

    @cached_property
    def finite(self) -> bool:
        return math.isfinite(self.energy) and bool(np.isfinite(self.forces).all())

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
    method: str  # "policy", "internal", "springs", "plain" or "fire"
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
    return math.sqrt(np.einsum("ni,ni->n", rows, rows).max())


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


def missing_point(target: Atoms | Filter, coordinates: Array) -> Point:
    """Where the calculator has no answer."""
    return Point(coordinates, np.full_like(coordinates, np.nan), np.nan, read_geometry(target))


def images_in(trajectory: str | Path | Iterable[Atoms]) -> list[Atoms]:
    """Those of an open trajectory, or of a file."""
    return [*iread(trajectory, ":")] if isinstance(trajectory, str | Path) else [*trajectory]


def points_at(target: Atoms | Filter, images: Iterable[Atoms]) -> Iterator[Point]:
    """What was found at images of a trajectory, as the target has it; afterwards its atoms are where they were."""
    atoms = bare_atoms(target)
    before = atoms.positions.copy(), atoms.cell.copy(), atoms.calc
    try:
        for image in images:
            atoms.positions = image.positions
            atoms.cell = image.cell
            atoms.calc = image.calc
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


LARGEST_BYTES = 64_000_000  # then every second frame goes: a film must never be what fills the memory
FARTHEST = 1e6  # Å; of an arrow
SAME_PLACE = 5e-4  # Å; a proposal that ended so near was executed as it was


@dataclass(frozen=True, eq=False)
class Frame:
    """One force call."""

    call: int  # from 1
    positions: NDArray[np.float32]  # (n_atoms, 3) Å
    cell: NDArray[np.float64]  # (3, 3) Å, rows are lattice vectors
    base_call: int | None = None  # where the move that led here began; None: at the start, or not known
    proposed: NDArray[np.float32] | None = None  # (n_atoms, 3) Å, from the base; None: as executed, or not known

    @property
    def size(self) -> int:
        return self.positions.nbytes + (0 if self.proposed is None else self.proposed.nbytes)


@dataclass
class Film:
    """Frames in order; thinned out by halves where they would need too much memory."""

    largest_bytes: int = LARGEST_BYTES
    frames: list[Frame] = field(default_factory=list)
    _every: int = 1  # only these calls are kept, and the newest
    _bytes: int = 0

    def add(self, frame: Frame) -> None:
        """Keep the newest in any case."""
        if self.frames and (self.frames[-1].call - 1) % self._every:
            self._bytes -= self.frames.pop().size
        self.frames.append(frame)
        self._bytes += frame.size
        while self._bytes > self.largest_bytes and len(self.frames) > 2:
            self._every *= 2
            *earlier, newest = self.frames
            self.frames = [*(kept for kept in earlier if (kept.call - 1) % self._every == 0), newest]
            self._bytes = sum(kept.size for kept in self.frames)


def frame_of(
    atoms: Atoms, call: int, base_call: int | None = None, proposed: tuple[Array, Array] | None = None
) -> Frame:
    """The atoms as they are now; `proposed`: from where to where they would have gone, Å."""
    positions = np.array(atoms.positions, dtype=np.float32)
    differs = proposed is not None and float(np.abs(proposed[1] - positions).max()) > SAME_PLACE
    wanted = None
    if proposed is not None and differs:  # a wild proposal is cut, not infinite: arrows of a film are drawn from it
        wanted = np.clip(proposed[1] - proposed[0], -FARTHEST, FARTHEST).astype(np.float32)
    return Frame(call, positions, np.array(atoms.cell), base_call, wanted)


def proposal_in_space(target: Atoms | Filter, proposal: Proposal) -> tuple[Array, Array] | None:
    """From where to where the atoms would go, Å, before limits and constraints; None where we cannot tell."""
    base = proposal.base.coordinates.copy()
    wanted = base + (proposal.step if proposal.wanted is None else proposal.wanted)
    for rows in (base, wanted):
        rows[-3:] /= cell_ratio(target)
    if isinstance(target, Atoms):
        return base, wanted
    geometry = proposal.base.geometry
    if geometry is None or not isinstance(target, UnitCellFilter):
        return None
    # ASE's two cell filters differ in a constant factor from release to release: the known cell of the base tells it
    known = np.linalg.solve(np.asarray(target.orig_cell), geometry.cell).T
    factor = np.cbrt(np.linalg.det(known) / np.linalg.det(_deformation(target, base)))
    return geometry.positions, wanted[:-3] @ (factor * _deformation(target, wanted)).T


def _deformation(target: UnitCellFilter, coordinates: Array) -> Array:
    """Of the cell at these coordinates of the filter, up to a factor."""
    if not isinstance(target, FrechetCellFilter):
        return coordinates[-3:]
    from scipy.linalg import expm

    return np.asarray(expm(coordinates[-3:] / target.exp_cell_factor), dtype=np.float64)


logger = logging.getLogger(__name__)

# BFGS, LBFGS, FIRE, FIRE2, MDMin, BFGSLineSearch, CellAwareBFGS; `maxstep` we have ourselves
OPTIONS = frozenset(
    {
        "alpha",
        "memory",
        "damping",
        "use_line_search",
        "bulk_modulus",
        "poisson_ratio",
        "long_output",
        "c1",
        "c2",
        "stpmax",
    }
    | {"dt", "dtmax", "dtmin", "maxmove", "Nmin", "finc", "fdec", "astart", "fa", "a", "downhill_check", "use_abc"}
    | {"position_reset_callback", "force_consistent"}
)
# options of Relaxer in version 0.2
REMOVED = {
    "adapt": "keep the relaxations with database=FOLDER and let 'relaxion learn FOLDER' fine-tune the policy",
    "fallback": "FIRE takes over after many rejected steps, always",
}


def without_foreign(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that only other optimizers know; a warning names what was left out.

    Misspelt options stay in: ASE refuses them by name. SettingsError for options that were removed.
    """
    for name, instead in REMOVED.items():
        if name in options:
            raise SettingsError(f"the option {name} of Relaxer was removed: {instead}; leave it out")
    if not isinstance(options.get("memory", 0), int):  # a number is LBFGS's
        raise SettingsError("the option memory of Relaxer is now called database; nothing else changed")
    foreign = sorted(OPTIONS & options.keys())
    if foreign:
        logger.warning(
            "%s: options of other optimizers, which Relaxer ignores; "
            "its own are policy, maxstep, allow_unseen and database (a folder)",
            ", ".join(foreign),
        )
    return {name: value for name, value in options.items() if name not in OPTIONS}
