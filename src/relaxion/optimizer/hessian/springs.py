"""A hand-made guess of how stiff a structure is: springs between neighbours, softer the longer they are.

It holds for any element because lengths are reduced by covalent radii: k(r) = k₀ exp(-a (r/(R_i+R_j) - 1)), and for
any unit of length because radii that do not fit the structure are scaled to its nearest neighbours. Only the shape
matters; the overall stiffness is measured by the optimizer from the forces it sees. With a free cell a bond
changes by δr = u_j - u_i + ε·r, so the same springs give the elastic block and its coupling to the atoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from ase.data import covalent_radii
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs

from relaxion.errors import StructureError
from relaxion.model.stiffness import LARGEST_EXPONENT, SpringSettings
from relaxion.optimizer.point import Array, Geometry, structures_of
from relaxion.structures import Structures
from relaxion.structures.state import Pairs

LARGEST_DENSE = 900  # coordinates; above it conjugate gradients are quicker than a Cholesky factorisation
LARGEST_CUTOFF = 8.0  # Å
REACH = 1.8  # neighbours are drawn up to this many sums of covalent radii
LOOSE, TIGHT = 1.4, 0.6  # reduced distances of nearest neighbours beyond which covalent radii do not fit a structure
SQUEEZED_STEPS = 8  # in which atoms that begin pressed together part; those that stay so near belong so near
LARGEST_SCALE = 16  # of radii, tried for a structure without neighbours
FACTOR: Any = get_lapack_funcs("potrf", dtype=np.float64)  # scipy's cho_factor and cho_solve take longer to check
SOLVE: Any = get_lapack_funcs("potrs", dtype=np.float64)  # small matrices than LAPACK takes for them


@dataclass(frozen=True)
class Bonds:
    """Neighbour pairs, each once."""

    first: NDArray[np.int64]  # (n_bonds,)
    second: NDArray[np.int64]  # (n_bonds,)
    vectors: Array  # (n_bonds, 3) Å
    natural_lengths: Array  # (n_bonds,) Å, sum of covalent radii

    @cached_property
    def lengths(self) -> Array:
        return np.sqrt(np.einsum("ni,ni->n", self.vectors, self.vectors))  # (n_bonds,) Å

    def changes(self, step: Array, geometry: Geometry) -> Array:
        """How each bond vector changes to first order: u_j - u_i + ε·r."""
        change = step[self.second] - step[self.first]
        if geometry.cell_factor:
            change = change + self.vectors @ (step[geometry.n_atoms :] / geometry.cell_factor).T
        return change  # (n_bonds, 3) Å


def bonds_of(geometries: Sequence[Geometry], structures: Structures | None = None, scale: float = 1.0) -> list[Bonds]:
    """Of each geometry all pairs up to `REACH` sums of covalent radii (at most 8 Å), self-images included.

    `structures`: the same geometries, where somebody has made them already. `scale`: of radii and longest length.
    """
    structures = structures_of(geometries) if structures is None else structures
    radii = scale * covalent_radii[structures.atomic_numbers.numpy()]
    try:
        pairs = Pairs.of(structures, min(REACH * 2 * float(radii.max()), scale * LARGEST_CUTOFF))
    except StructureError:  # atoms scattered far apart, a cell without volume: of one of them
        return _bonds_one_by_one(geometries, scale)
    (first, second) = pairs.ends.numpy()
    vectors = pairs.vectors.numpy()
    natural = radii[first] + radii[second]
    lengths = np.sqrt(np.einsum("ni,ni->n", vectors, vectors))
    near = np.flatnonzero((lengths < REACH * natural) & (lengths > 0))
    first = first[near]
    second = second[near]
    vectors = vectors[near]
    natural = natural[near]
    starts = np.cumsum([0, *(geometry.n_atoms for geometry in geometries)])
    bounds = np.searchsorted(near, np.cumsum([0, *pairs.counts]))
    return [
        Bonds(first[a:b] - start, second[a:b] - start, vectors[a:b], natural[a:b])
        for (a, b), start in zip(pairwise(bounds.tolist()), starts.tolist(), strict=False)
    ]


def _bonds_one_by_one(geometries: Sequence[Geometry], scale: float) -> list[Bonds]:
    if len(geometries) > 1:
        return [bonds_of([geometry], scale=scale)[0] for geometry in geometries]
    nobody = np.zeros(0, dtype=np.int64)
    return [Bonds(nobody, nobody, np.zeros((0, 3)), np.zeros(0))]


def radii_scale(geometry: Geometry, bonds: Bonds, steps: int = SQUEEZED_STEPS) -> float:
    """What makes covalent radii fit the structure after so many steps; 1 where they do.

    They do not fit noble gases and Lennard-Jones atoms, nor lengths in other units.
    """
    scale = 1.0
    typical = _typical_length(bonds, geometry.n_atoms)
    while np.isinf(typical) and scale < LARGEST_SCALE:  # too far apart to have neighbours
        scale *= 2
        typical = scale * _typical_length(bonds_of([geometry], scale=scale)[0], geometry.n_atoms)
    misfit = LOOSE < typical < np.inf or (typical < TIGHT and steps >= SQUEEZED_STEPS)
    return typical if misfit else 1.0


def _typical_length(bonds: Bonds, n_atoms: int) -> float:
    """The median over atoms of the reduced distance to the nearest neighbour; infinite where most have none."""
    nearest = np.full(n_atoms, np.inf)
    reduced = bonds.lengths / bonds.natural_lengths
    for ends in (bonds.first, bonds.second):
        np.minimum.at(nearest, ends, reduced)
    return float(np.partition(nearest, n_atoms // 2)[n_atoms // 2])


def springs_at(
    geometries: Sequence[Geometry], settings: SpringSettings, bonds: Sequence[Bonds] | None = None
) -> list[SpringHessian]:
    """The springs of each geometry; what can be done for all of them at once is."""
    bonds = bonds_of(geometries) if bonds is None else bonds
    ends = np.cumsum([len(each.first) for each in bonds])[:-1]
    whole = Bonds(*(np.concatenate([getattr(each, name) for each in bonds]) for name in Bonds.__annotations__))
    blocks = np.split(blocks_of(whole, settings), ends)
    small = [number for number, geometry in enumerate(geometries) if geometry.free.sum() <= LARGEST_DENSE]
    counts = [geometries[number].n_atoms for number in small]
    dense = dict(zip(small, _between_atoms([bonds[n] for n in small], [blocks[n] for n in small], counts), strict=True))
    return [
        SpringHessian(geometry, settings, bonds[number], blocks[number], dense.get(number))
        for number, geometry in enumerate(geometries)
    ]


def blocks_of(bonds: Bonds, settings: SpringSettings) -> Array:
    """k∥ r̂r̂ᵀ + k⊥ (1 - r̂r̂ᵀ) of each bond, (n_bonds, 3, 3) eV/Å²."""
    lengths = np.linalg.norm(bonds.vectors, axis=1)
    exponent = -settings.decay * (lengths / bonds.natural_lengths - 1)
    along = settings.stiffness * np.exp(np.minimum(exponent, LARGEST_EXPONENT))
    unit = bonds.vectors / lengths[:, None]
    outer = unit[:, :, None] * unit[:, None, :]
    return along[:, None, None] * ((1 - settings.across) * outer + settings.across * np.eye(3))


def _between_atoms(bonds: Sequence[Bonds], blocks: Sequence[Array], counts: Sequence[int]) -> list[Array]:
    """Of each structure (3, 3, n_atoms, n_atoms): a bond adds its block to both ends and takes it away between them."""
    if not counts:
        return []
    largest = max(counts)
    number = len(counts)
    owners = np.repeat(np.arange(number), [len(each.first) for each in bonds])
    rows = np.concatenate([each.first for each in bonds]) + owners * largest
    places = rows * largest + np.concatenate([each.second for each in bonds])
    weights = np.concatenate(blocks)
    result = np.empty((3, 3, number, largest, largest))
    everybody = np.arange(largest)
    for a, b in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)):  # blocks are symmetric
        joined = np.bincount(places, weights[:, a, b], number * largest**2).reshape(number, largest, largest)
        joined = joined + joined.transpose(0, 2, 1)
        sums = joined.sum(axis=2)
        part = np.negative(joined, out=result[a, b])
        part[:, everybody, everybody] += sums
        if a != b:
            result[b, a] = part
    return [result[:, :, place, :count, :count] for place, count in enumerate(counts)]


class SpringHessian:
    """The Hessian of the springs at one geometry."""

    has_curvature = True

    def __init__(
        self, geometry: Geometry, settings: SpringSettings, bonds: Bonds, blocks: Array, between_atoms: Array | None
    ) -> None:
        """As `springs_at` makes it; without `between_atoms` conjugate gradients solve."""
        self.geometry = geometry
        self.settings = settings
        self.bonds = bonds
        self._blocks = blocks
        self._between_atoms = between_atoms
        self._free = geometry.free.ravel()
        self._factors: dict[float, Array] = {}  # by shift

    @cached_property
    def _floors(self) -> Array:
        """The diagonal of the floor, for atoms and for the rows of the cell."""
        geometry = self.geometry
        floors = np.full(geometry.free.shape, self.settings.floor)
        if geometry.cell_factor:
            floors[geometry.n_atoms :] = self.settings.cell_floor * geometry.volume / geometry.cell_factor**2
        return floors

    def apply(self, step: Array) -> Array:
        """B·u without building B."""
        step = np.where(self.geometry.free, step, 0.0)
        bonds = self.bonds
        n_atoms = self.geometry.n_atoms
        pulls = np.einsum("nij,nj->ni", self._blocks, bonds.changes(step, self.geometry))
        result = self._floors * step
        np.add.at(result, bonds.second, pulls)
        np.add.at(result, bonds.first, -pulls)
        if self.geometry.cell_factor:
            result[n_atoms:] += pulls.T @ bonds.vectors / self.geometry.cell_factor
        return np.where(self.geometry.free, result, 0.0)

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """(B + shift·1)⁻¹·f on the free coordinates, zero elsewhere; the shift in eV/Å²."""
        result = np.zeros(forces.size)
        right = forces.ravel()[self._free]
        if self._between_atoms is None:
            result[self._free] = self._conjugate_gradients(right, shift)
        else:
            if shift not in self._factors:
                self._factors[shift] = self._factor(shift)
            result[self._free] = SOLVE(self._factors[shift], right)[0]
        return result.reshape(forces.shape)

    def _factor(self, shift: float) -> Array:
        """The Cholesky factor of the free rows and columns, dense."""
        assert self._between_atoms is not None
        n = 3 * self.geometry.n_atoms
        full = np.empty((self._free.size, self._free.size))
        full[:n, :n] = self._between_atoms.transpose(2, 0, 3, 1).reshape(n, n)
        if self.geometry.cell_factor:
            full[:n, n:] = self._with_cell
            full[n:, n:] = self._of_cell
            full[n:, :n] = self._with_cell.T
        full[np.diag_indices_from(full)] += self._floors.ravel() + shift
        if not self._free.all():
            full = full[np.ix_(self._free, self._free)]
        factor, failed = FACTOR(full.T, overwrite_a=True)
        if failed:
            raise np.linalg.LinAlgError("the springs are not positive definite")
        return factor

    @cached_property
    def _matrix(self) -> scipy.sparse.csr_array | scipy.sparse.bsr_array:
        """Of the free rows and columns, sparse."""
        full: Any = self._of_atoms_sparse()
        if self.geometry.cell_factor:
            corner = self._of_cell + np.diag(self._floors[self.geometry.n_atoms :].ravel())
            full = scipy.sparse.block_array([[full, self._with_cell], [self._with_cell.T, corner]], format="csr")
        if self._free.all():
            return full
        free = np.flatnonzero(self._free)
        return scipy.sparse.csr_array(full.tocsr()[free][:, free])

    def _of_atoms_sparse(self) -> scipy.sparse.bsr_array:
        """The same as `_between_atoms`, block by block, with the floors."""
        first = self.bonds.first
        second = self.bonds.second
        n_atoms = self.geometry.n_atoms
        everybody = np.arange(n_atoms)
        floors = self._floors[:n_atoms, :, None] * np.eye(3)
        row = np.concatenate([first, second, first, second, everybody])
        column = np.concatenate([first, second, second, first, everybody])
        data = np.concatenate([self._blocks, self._blocks, -self._blocks, -self._blocks, floors])
        places, which = np.unique(row * n_atoms + column, return_inverse=True)
        summing = scipy.sparse.csr_array((np.ones(len(which)), (which, np.arange(len(which)))))
        blocks = np.asarray(summing @ data.reshape(-1, 9)).reshape(-1, 3, 3)
        ends = np.searchsorted(places, n_atoms * np.arange(n_atoms + 1))
        shape = (3 * n_atoms, 3 * n_atoms)
        return scipy.sparse.bsr_array((blocks, places % n_atoms, ends), shape=shape)

    @cached_property
    def _with_cell(self) -> Array:
        """(3·n_atoms, 9): δr_a += Σ_b ε_ab r_b, with ε_ab in column 3a + b."""
        bonds = self.bonds
        geometry = self.geometry
        felt = self._blocks[:, :, :, None] * (bonds.vectors / geometry.cell_factor)[:, None, None, :]
        flat = felt.reshape(len(felt), 27)
        n_bonds = np.arange(len(felt))
        shape = (geometry.n_atoms, len(felt))
        ends = scipy.sparse.csr_array((np.ones(len(felt)), (bonds.second, n_bonds)), shape=shape)
        ends = ends - scipy.sparse.csr_array((np.ones(len(felt)), (bonds.first, n_bonds)), shape=shape)
        return np.asarray(ends @ flat).reshape(3 * geometry.n_atoms, 9)

    @cached_property
    def _of_cell(self) -> Array:
        """(9, 9): what strains cost by themselves."""
        vectors = self.bonds.vectors / self.geometry.cell_factor
        outer = (vectors[:, :, None] * vectors[:, None, :]).reshape(-1, 9)
        corner = (self._blocks.reshape(-1, 9).T @ outer).reshape(3, 3, 3, 3)  # a, c, b, d
        return corner.transpose(0, 2, 1, 3).reshape(9, 9)

    def _conjugate_gradients(self, right: Array, shift: float) -> Array:
        matrix: Any = self._matrix
        if shift > 0:
            matrix = matrix + shift * scipy.sparse.eye_array(matrix.shape[0], format="csr")
        scale = scipy.sparse.diags_array(1 / matrix.diagonal())
        result, _ = scipy.sparse.linalg.cg(matrix, right, rtol=1e-6, maxiter=500, M=scale)
        return result
