"""The stiffness of a structure with molecules: valence terms in them, springs between everything else that is near."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from ase.data import covalent_radii
from numpy.typing import NDArray

from relaxion.errors import StructureError
from relaxion.optimizer.hessian.internal_coordinates import (
    FARTHEST,
    MOLECULE_FLOOR,
    STRETCH,
    changes_of,
    constants_of,
    difference,
    factors_of,
    near_factors,
    shares,
    values_at,
)
from relaxion.optimizer.hessian.internal_topology import (
    NON_METALS,
    Indices,
    Topology,
    bonds_in,
    still_fits,
    topology_of,
)
from relaxion.optimizer.hessian.springs import (
    FACTOR,
    LARGEST_CUTOFF,
    REACH,
    SOLVE,
    Bonds,
    SpringSettings,
    blocks_of,
)
from relaxion.optimizer.point import Array, Geometry, Point, longest, structures_of
from relaxion.structures.state import Pairs

if TYPE_CHECKING:
    from relaxion.optimizer.hessian.base import Hessian

LARGEST_DENSE = 250  # coordinates; above it a sparse factorisation is quicker, since molecules are mostly chains
INDEPENDENT = 1e-3  # of the largest eigenvalue of GᵀG; below it nothing deforms a molecule, as where it is fixed
CARTESIAN = 0.1  # c, 1/Å: weight of x among internal coordinates; it speaks where none of them does


class Factor:
    """A positive definite matrix, ready to be solved."""

    def __init__(self, matrix: Any) -> None:
        """`matrix`: sparse; a small one is factorised as a dense one."""
        self._dense: Array | None = None
        self._sparse: Any = None
        if matrix.shape[0] <= LARGEST_DENSE:
            self._dense, failed = FACTOR(matrix.toarray().T, overwrite_a=True)
            if failed:
                raise np.linalg.LinAlgError("the stiffness of internal coordinates is not positive definite")
        else:
            options = {"SymmetricMode": True, "DiagPivotThresh": 0.001}
            self._sparse = scipy.sparse.linalg.splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", options=options)

    def solve(self, right: Array) -> Array:
        """One right side, or one per column."""
        return SOLVE(self._dense, right)[0] if self._dense is not None else self._sparse.solve(right)


class Place:
    """Internal coordinates at one geometry, z = (q, c·x): their values, and how vectors translate there."""

    def __init__(self, topology: Topology, geometry: Geometry) -> None:
        self.topology = topology
        self.geometry = geometry
        self.values = values_at(topology, geometry)
        self.slopes = self.values.matrix(topology, geometry)  # G, (n_coordinates, 3·n_rows)

    @cached_property
    def _normal(self) -> Factor:
        """GᵀG + c²."""
        square = self.slopes.T @ self.slopes
        return Factor(square + CARTESIAN**2 * scipy.sparse.eye_array(square.shape[0]))

    def split(self, gradient: Array) -> tuple[Array, Array]:
        """The smallest gradients by q and by c·x that together are the gradient by x: g = Gᵀ·g_q + c·g_x."""
        even = self._normal.solve(gradient.ravel())
        return self.slopes @ even, CARTESIAN * even

    def joined(self, by_q: Array, by_x: Array) -> Array:
        """The gradient by x of such two; of many, one per column."""
        return self.slopes.T @ by_q + CARTESIAN * by_x

    def carried_out(self, change: Array, step: Array) -> Array:
        """The step here that changes q and c·x as asked, as nearly as one can; of many, one per column."""
        return self._normal.solve(self.slopes.T @ change + CARTESIAN**2 * step)


class InternalHessian(Place):
    """The Hessian of a structure with molecules at one geometry."""

    has_curvature = True

    def __init__(self, topology: Topology, geometry: Geometry, springs: SpringSettings, near: Bonds) -> None:
        """`near`: all pairs that may repel or attract each other."""
        super().__init__(topology, geometry)
        self._free = geometry.free.ravel()
        self.constants = constants_of(topology, geometry, self.values.vectors) * factors_of(topology)
        floors = _floors(topology, geometry, springs)
        terms = self.slopes.T @ (scipy.sparse.diags_array(self.constants) @ self.slopes)
        pairs = between(topology, geometry, springs, near)
        self.matrix: Any = terms + pairs + scipy.sparse.diags_array(floors)

    @cached_property
    def _factor(self) -> Factor:
        return Factor(self.matrix)

    def prepare(self) -> None:
        """Factorise now, so that failures come while there is another way."""
        if not np.isfinite(self.matrix.data).all():
            raise np.linalg.LinAlgError("the internal coordinates are not finite")
        _ = self._factor, self._normal

    def apply(self, step: Array) -> Array:
        """B·u without what may not move."""
        return (self.matrix @ np.where(self._free, step.ravel(), 0.0)).reshape(step.shape) * self.geometry.free

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """(B + shift·1)⁻¹·f on the free coordinates, zero elsewhere; the floor in eV/Å²."""
        right = np.where(self._free, forces.ravel(), 0.0)
        factor = self._factor
        if shift > 0:
            factor = Factor(self.matrix + shift * scipy.sparse.eye_array(len(right)))
        return factor.solve(right).reshape(forces.shape)


class JoinedHessian:
    """Internal coordinates for what deforms molecules, another model A for everything else, in one Hessian.

    With P the projector on the changes of internal coordinates, B = (1 - P)·A·(1 - P) + Gᵀ·diag(k)·G + floor·P. It is
    positive definite, as A is. Molecules move and turn as a whole, and bind to what is around them, as A says.
    """

    has_curvature = True

    def __init__(self, other: Hessian, internal: InternalHessian) -> None:
        """`other`: A, in the same coordinates."""
        self.other = other
        slopes: Any = internal.slopes
        touched = np.unique(slopes.indices)
        among = slopes[:, touched].toarray()
        sizes, directions = np.linalg.eigh(among.T @ among)
        directions = directions[:, sizes > INDEPENDENT * sizes.max(initial=1.0)]
        self._basis = np.zeros((slopes.shape[1], directions.shape[1]))  # P = basis·basisᵀ
        self._basis[touched] = directions
        changes = among @ directions
        self._stiffness = changes.T @ (internal.constants[:, None] * changes)
        self._stiffness += MOLECULE_FLOOR * np.eye(len(self._stiffness))
        self._answers: dict[float, Array] = {}  # of A to the basis, by shift

    def apply(self, step: Array) -> Array:
        """B·u."""
        basis = self._basis
        inside = basis.T @ step.ravel()
        rest = self.other.apply(step - (basis @ inside).reshape(step.shape)).ravel()
        return (rest + basis @ (self._stiffness @ inside - basis.T @ rest)).reshape(step.shape)

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """(B + shift·1)⁻¹·f: A's answer among the steps that deform no molecule, and that of the molecules."""
        basis = self._basis
        if shift not in self._answers:
            columns = [self.other.solve(column.reshape(forces.shape), shift).ravel() for column in basis.T]
            self._answers[shift] = np.array(columns).reshape(basis.T.shape).T
        answers = self._answers[shift]
        inside = basis.T @ forces.ravel()
        rest = self.other.solve(forces - (basis @ inside).reshape(forces.shape), shift).ravel()
        rest -= answers @ np.linalg.solve(basis.T @ answers, basis.T @ rest)
        own = np.linalg.solve(self._stiffness + shift * np.eye(len(inside)), inside)
        return (rest + basis @ own).reshape(forces.shape)


def _floors(topology: Topology, geometry: Geometry, springs: SpringSettings) -> Array:
    floors = np.full(geometry.free.shape, springs.floor)
    floors[: geometry.n_atoms][topology.members] = MOLECULE_FLOOR
    if geometry.cell_factor:
        floors[geometry.n_atoms :] = springs.cell_floor * geometry.volume / geometry.cell_factor**2
    return floors.ravel()


def between(topology: Topology, geometry: Geometry, springs: SpringSettings, near: Bonds) -> Any:
    """The springs between pairs that are not bonded: Lindh's stretches around molecules, the usual ones elsewhere."""
    units = near.vectors / near.lengths[:, None]
    blocks = blocks_of(near, springs)
    around = topology.members[near.first] | topology.members[near.second]
    around &= NON_METALS[geometry.numbers[near.first]] & NON_METALS[geometry.numbers[near.second]]
    stretches = STRETCH * np.minimum(shares(geometry, near.first, near.second, near.lengths), 1.0)
    stretches *= near_factors(geometry, near)
    blocks[around] = (stretches[:, None, None] * units[:, :, None] * units[:, None, :])[around]
    count = len(near.first)
    places = np.arange(count)
    weights = scipy.sparse.bsr_array((blocks, places, np.arange(count + 1)), shape=(3 * count, 3 * count))
    changes = changes_of(near.first, near.second, near.vectors, geometry)
    return changes.T @ (weights.tocsr() @ changes)


def near_pairs(geometry: Geometry, topology: Topology) -> Bonds:
    """Pairs that are not bonded, as far as springs reach, or stretches between non-metals."""
    radii = covalent_radii[geometry.numbers]
    cutoff = max(min(REACH * 2 * float(radii.max()), LARGEST_CUTOFF), FARTHEST)
    try:
        pairs = Pairs.of(structures_of([geometry]), cutoff)
    except StructureError:
        nobody = np.zeros(0, dtype=np.int64)
        return Bonds(nobody, nobody, np.zeros((0, 3)), np.zeros(0))
    (first, second) = pairs.ends.numpy()
    vectors = pairs.vectors.numpy()
    shifts = pairs.shifts.numpy()
    natural = radii[first] + radii[second]
    lengths = np.linalg.norm(vectors, axis=1)
    non_metals = NON_METALS[geometry.numbers[first]] & NON_METALS[geometry.numbers[second]]
    chosen = (lengths < REACH * natural) | (non_metals & (lengths < FARTHEST))
    chosen &= (lengths > 1e-3) & ~_bonded(topology, first, second, shifts)
    return Bonds(first[chosen], second[chosen], vectors[chosen], natural[chosen])


def _bonded(topology: Topology, first: Indices, second: Indices, shifts: Indices) -> NDArray[np.bool_]:
    """Which pairs are bonds of the topology."""
    number = topology.n_bonds
    links = topology.links
    both = np.column_stack([links.first, links.second, links.shifts])[: 2 * number]
    return np.isin(_codes(np.column_stack([first, second, shifts])), _codes(both))


def _codes(rows: Indices) -> Indices:
    """One number for atom, atom and shifts."""
    code = rows[:, 0] << 34 | rows[:, 1] << 15
    return code + ((rows[:, 2] + 16) << 10) + ((rows[:, 3] + 16) << 5) + rows[:, 4] + 16


def internal_at(
    geometry: Geometry,
    pairs: Bonds,
    known: Topology | None,
    springs: SpringSettings,
) -> InternalHessian | None:
    """The model there; None where nothing is a molecule. `known`: the topology so far, kept while bonds stay."""
    bonds = bonds_in(geometry, pairs, known)
    if not bonds:
        return None
    topology = known
    if known is None or known.made_of != bonds or not still_fits(known, geometry):
        topology = topology_of(geometry, bonds)
    if topology is None:
        return None
    try:
        model = InternalHessian(topology, geometry, springs, near_pairs(geometry, topology))
        model.prepare()
    except (np.linalg.LinAlgError, RuntimeError):  # SuperLU's singular matrix
        return None
    return model


WEIGHTS = (40.0, 4.0, 4.0, 0.5, 0.5)  # of bonds, bends, straight bends, torsions and wags
CARTESIAN_WEIGHT = 0.01  # of the straight step: where molecules turn or move as a whole
ITERATIONS = 5
GOOD = 1e-4  # Å, the last correction
LONGEST = 1.5  # times the straight step


def moved(geometry: Geometry, step: Array) -> Geometry:
    """The geometry after a step, cell included."""
    number = geometry.n_atoms
    if not geometry.cell_factor:
        return replace(geometry, positions=geometry.positions + step)
    growth = np.eye(3) + step[number:] / geometry.cell_factor
    positions = (geometry.positions + step[:number]) @ growth.T
    return replace(geometry, positions=positions, cell=geometry.cell @ growth.T)


def along_internals(place: Place, step: Array, largest: float, reach: Callable[[Array], float] = longest) -> Array:
    """The curved step whose internal coordinates change as the straight one says to first order.

    A few Gauss-Newton iterations on Σ w (q₀ + G·d - q(x))² + w_x |d - (x - x₀)|²; the straight step where that fails.
    `largest`: no atom goes farther, Å, measured by `reach`.
    """
    found = step
    for _ in range(ITERATIONS):
        correction = _correction(place, step, found)
        if correction is None:
            return step
        found = found + correction
        if not reach(found) < LONGEST * reach(step):  # not a number is not smaller
            return step
        if reach(correction) < GOOD:
            break
    return found * min(1.0, largest / max(reach(found), 1e-12))


def _correction(place: Place, step: Array, found: Array) -> Array | None:
    """One iteration; None where there is no answer."""
    topology = place.topology
    geometry = place.geometry
    here = Place(topology, moved(geometry, found))
    missing = place.slopes @ step.ravel() - difference(topology, here.values.q, place.values.q)
    counts = (topology.n_bonds, len(topology.bends), 2 * len(topology.straight), len(topology.torsions))
    weights = np.repeat(WEIGHTS, (*counts, len(topology.wags)))
    weighted = here.slopes.T @ scipy.sparse.diags_array(weights)
    matrix = weighted @ here.slopes
    floor = CARTESIAN_WEIGHT * scipy.sparse.eye_array(matrix.shape[0])
    right = weighted @ missing + CARTESIAN_WEIGHT * (step - found).ravel()
    try:
        return Factor(matrix + floor).solve(right).reshape(step.shape) * geometry.free
    except (np.linalg.LinAlgError, RuntimeError):  # SuperLU's singular matrix
        return None


MOST_NUMBERS = 60_000  # coordinates times secants remembered
FEWEST, MOST = 8, 60  # secants remembered, by that


@dataclass(frozen=True, eq=False)
class Visited:
    """A point in internal coordinates."""

    point: Point
    q: Array
    by_q: Array  # gradient
    by_x: Array


class InternalSecants:
    """Pairs of points between which steps were taken, and the topology in which they are seen."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        self.pairs: list[tuple[Point, Point]] = []
        self._seen: dict[int, Visited] = {}  # by the identity of the point, in the present topology

    def learn(self, before: Point, after: Point) -> None:
        """Keep what this step taught."""
        most = int(np.clip(MOST_NUMBERS // after.coordinates.size, FEWEST, MOST))
        self.pairs = [*self.pairs, (before, after)][-most:]

    def points(self) -> list[Point]:
        """All that are remembered, each once, in order."""
        return list({id(point): point for pair in self.pairs for point in pair}.values())

    def plain(self) -> dict[str, Any]:
        """For the restart file: topology and points by where they are, pairs by the numbers of their points."""
        assert self.topology is not None
        points = self.points()
        numbers = {id(point): number for number, point in enumerate(points)}
        made_at = self.topology.made_at
        return {
            "bonds": sorted(self.topology.made_of),
            "made_at": {"positions": made_at.positions, "cell": made_at.cell},
            "points": [_point_to_plain(point) for point in points],
            "pairs": [[numbers[id(before)], numbers[id(after)]] for before, after in self.pairs],
        }

    @classmethod
    def restored(cls, plain: dict[str, Any], base: Point) -> InternalSecants:
        """The opposite; `base`: the last one, whose elements and constraints are those of all points."""
        if base.geometry is None:
            raise ValueError("internal coordinates without a geometry")
        memory = cls()
        bonds = {tuple(int(number) for number in bond) for bond in plain["bonds"]}
        memory.topology = topology_of(_geometry(plain["made_at"], base.geometry), bonds)
        points = [_point(saved, base) for saved in plain["points"]]
        memory.pairs = [(points[before], points[after]) for before, after in plain["pairs"]]
        return memory

    def secants(self, here: Place) -> list[tuple[Array, Array]]:
        """Steps and drops of the forces as they are at this place, in order."""
        if here.topology is not self.topology:
            self.topology = here.topology
            self._seen = {}
        if not self.pairs:
            return []
        ends = [(self._visited(before, here), self._visited(after, here)) for before, after in self.pairs]
        self._seen = {id(one.point): one for pair in ends for one in pair}
        columns = [_change(here.topology, before, after) for before, after in ends]
        changes, steps, by_q, by_x = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
        shape = here.geometry.free.shape
        carried = here.carried_out(changes, steps)
        drops = here.joined(by_q, by_x)
        return [(step.reshape(shape), drop.reshape(shape)) for step, drop in zip(carried.T, drops.T, strict=True)]

    def _visited(self, point: Point, here: Place) -> Visited:
        known = self._seen.get(id(point))
        if known is not None:
            return known
        assert point.geometry is not None
        place = here if point.geometry is here.geometry else Place(here.topology, point.geometry)
        return Visited(point, place.values.q, *place.split(-point.forces))


def _change(topology: Topology, before: Visited, after: Visited) -> tuple[Array, Array, Array, Array]:
    step = (after.point.coordinates - before.point.coordinates).ravel()
    return difference(topology, after.q, before.q), step, after.by_q - before.by_q, after.by_x - before.by_x


def _point_to_plain(point: Point) -> dict[str, Any]:
    assert point.geometry is not None
    where = {"positions": point.geometry.positions, "cell": point.geometry.cell}
    return {"coordinates": point.coordinates, "forces": point.forces, "energy": point.energy, **where}


def _point(plain: dict[str, Any], like: Point) -> Point:
    assert like.geometry is not None
    coordinates, forces = (np.asarray(plain[k], dtype=np.float64).reshape(-1, 3) for k in ("coordinates", "forces"))
    if np.array_equal(coordinates, like.coordinates):  # the last base is one object here and there, as it was
        return like
    return Point(coordinates, forces, float(plain["energy"]), _geometry(plain, like.geometry))


def _geometry(plain: dict[str, Any], like: Geometry) -> Geometry:
    positions = np.asarray(plain["positions"], dtype=np.float64).reshape(like.positions.shape)
    return replace(like, positions=positions, cell=np.asarray(plain["cell"], dtype=np.float64).reshape(3, 3))
