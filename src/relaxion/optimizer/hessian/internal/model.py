"""The stiffness of a structure with molecules: valence terms in them, springs between everything else that is near."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from ase.data import covalent_radii
from numpy.typing import NDArray

from relaxion.errors import StructureError
from relaxion.optimizer.hessian.internal.constants import (
    FARTHEST,
    ValenceSettings,
    constants_of,
    factors_of,
    near_factors,
    shares,
)
from relaxion.optimizer.hessian.internal.coordinates import changes_of, values_at
from relaxion.optimizer.hessian.internal.topology import (
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
from relaxion.optimizer.point import Array, Geometry, structures_of
from relaxion.structures.state import Pairs

LARGEST_DENSE = 250  # coordinates; above it a sparse factorisation is quicker, since molecules are mostly chains
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
                raise np.linalg.LinAlgError("the valence terms are not positive definite")
        else:
            options = {"SymmetricMode": True, "DiagPivotThresh": 0.001}
            self._sparse = scipy.sparse.linalg.splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", options=options)

    def solve(self, right: Array) -> Array:
        """One right side, or one per column."""
        return SOLVE(self._dense, right)[0] if self._dense is not None else self._sparse.solve(right)


class Place:
    """Internal coordinates at one geometry, z = (q, c·x): their values, and how vectors translate there."""

    def __init__(self, topology: Topology, geometry: Geometry) -> None:
        self.topology, self.geometry = topology, geometry
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


class ValenceModel(Place):
    """The stiffness matrix B at one geometry: `apply` gives B·u, `solve` gives B⁻¹·f."""

    def __init__(
        self, topology: Topology, geometry: Geometry, springs: SpringSettings, valence: ValenceSettings, near: Bonds
    ) -> None:
        """`near`: all pairs that may repel or attract each other."""
        super().__init__(topology, geometry)
        self._free = geometry.free.ravel()
        self.constants = constants_of(topology, geometry, self.values.vectors, valence) * factors_of(topology)
        floors = _floors(topology, geometry, springs, valence)
        terms = self.slopes.T @ (scipy.sparse.diags_array(self.constants) @ self.slopes)
        pairs = between(topology, geometry, springs, valence, near)
        self.matrix: Any = terms + pairs + scipy.sparse.diags_array(floors)

    @cached_property
    def _factor(self) -> Factor:
        return Factor(self.matrix)

    def prepare(self) -> None:
        """Factorise now, so that failures come while there is another way."""
        if not np.isfinite(self.matrix.data).all():
            raise np.linalg.LinAlgError("the valence terms are not finite")
        _ = self._factor, self._normal

    def apply(self, step: Array) -> Array:
        """B·u without what may not move."""
        return (self.matrix @ np.where(self._free, step.ravel(), 0.0)).reshape(step.shape) * self.geometry.free

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        """(B + extra_floor·1)⁻¹·f on the free coordinates, zero elsewhere; the floor in eV/Å²."""
        right = np.where(self._free, forces.ravel(), 0.0)
        factor = self._factor
        if extra_floor > 0:
            factor = Factor(self.matrix + extra_floor * scipy.sparse.eye_array(len(right)))
        return factor.solve(right).reshape(forces.shape)


def _floors(topology: Topology, geometry: Geometry, springs: SpringSettings, valence: ValenceSettings) -> Array:
    floors = np.full(geometry.free.shape, springs.floor)
    floors[: geometry.n_atoms][topology.members] = valence.floor
    if geometry.cell_factor:
        floors[geometry.n_atoms :] = springs.cell_floor * geometry.volume / geometry.cell_factor**2
    return floors.ravel()


def between(
    topology: Topology, geometry: Geometry, springs: SpringSettings, valence: ValenceSettings, near: Bonds
) -> Any:
    """The springs between pairs that are not bonded: Lindh's stretches around molecules, the usual ones elsewhere."""
    units = near.vectors / near.lengths[:, None]
    blocks = blocks_of(near, springs)
    around = topology.members[near.first] | topology.members[near.second]
    around &= NON_METALS[geometry.numbers[near.first]] & NON_METALS[geometry.numbers[near.second]]
    stretches = valence.stretch * np.minimum(shares(geometry, near.first, near.second, near.lengths), 1.0)
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
    (first, second), vectors, shifts = pairs.ends.numpy(), pairs.vectors.numpy(), pairs.shifts.numpy()
    natural, lengths = radii[first] + radii[second], np.linalg.norm(vectors, axis=1)
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


def valence_at(
    geometry: Geometry,
    pairs: Bonds,
    known: Topology | None,
    springs: SpringSettings,
    settings: ValenceSettings,
) -> ValenceModel | None:
    """The model there; None where nothing is a molecule. `known`: the topology so far, kept while bonds stay."""
    bonds = bonds_in(geometry, pairs, known)
    if not bonds:
        return None
    topology = known
    if known is None or not known.has(bonds) or not still_fits(known, geometry):
        topology = topology_of(geometry, bonds)
    if topology is None:
        return None
    try:
        model = ValenceModel(topology, geometry, springs, settings, near_pairs(geometry, topology))
        model.prepare()
    except (np.linalg.LinAlgError, RuntimeError):  # SuperLU's singular matrix
        return None
    return model
