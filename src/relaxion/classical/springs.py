"""A hand-made guess of how stiff a structure is: springs between neighbours, softer the longer they are.

It holds for any element because lengths are reduced by covalent radii: k(r) = k₀ exp(-a (r/(R_i+R_j) - 1)). Only the
shape matters; the overall stiffness is measured by the optimizer from the forces it sees. With a free cell a bond
changes by δr = u_j - u_i + ε·r, so the same springs give the elastic block and its coupling to the atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import vesin
from ase.data import covalent_radii
from numpy.typing import NDArray

from relaxion.structures.graph import LARGEST_EXTENT

Array = NDArray[np.float64]

LARGEST_DENSE = 900  # coordinates; above it conjugate gradients are quicker than a Cholesky factorisation
LARGEST_CUTOFF = 8.0  # Å
REACH = 1.8  # neighbours are drawn up to this many sums of covalent radii


@dataclass(frozen=True)
class SpringSettings:
    """Tuned on EMT alloys, clusters, slabs, GFN2 molecules and CHGNet crystals (docs/decisions.md)."""

    stiffness: float = 4.0
    """k₀, eV/Å², of a bond as long as the sum of covalent radii."""
    decay: float = 7.0
    """a: how fast stiffness falls with reduced length."""
    largest_exponent: float = 3.0
    """Bonds pressed together are not stiffer than k₀·exp of this."""
    across: float = 0.05
    """Stiffness across a bond as a share of that along it."""
    floor: float = 0.5
    """Stiffness of every atom against its place, eV/Å²: keeps soft modes from running away."""
    cell_floor: float = 0.1
    """Stiffness of the cell, eV/Å³, beside what the springs give."""


@dataclass(frozen=True)
class Geometry:
    """What the springs need to know, in the coordinates an ASE optimizer moves.

    `cell_factor` is the scale of the three extra rows of ASE's cell filters (coordinate = factor × deformation);
    0 means that the cell does not move. `free` marks the coordinates that may move.
    """

    positions: Array  # (n_atoms, 3) Å
    cell: Array  # (3, 3) Å
    periodic: NDArray[np.bool_]  # (3,)
    numbers: NDArray[np.int64]  # (n_atoms,)
    free: NDArray[np.bool_]  # (n_rows, 3)
    cell_factor: float = 0.0

    @property
    def n_atoms(self) -> int:
        return len(self.positions)

    @property
    def volume(self) -> float:
        return abs(float(np.linalg.det(self.cell)))

    @cached_property
    def bonds(self) -> Bonds:
        """All pairs up to `REACH` sums of covalent radii (at most 8 Å), self-images included."""
        radii = covalent_radii[self.numbers]
        cutoff = min(REACH * 2 * float(radii.max()), LARGEST_CUTOFF)
        if self._scattered(cutoff):
            nobody = np.zeros(0, dtype=np.int64)
            return Bonds(nobody, nobody, np.zeros((0, 3)), np.zeros(0))
        search = vesin.NeighborList(cutoff=cutoff, full_list=False, n_threads=1)
        first, second, vectors, lengths = search.compute(self.positions, self.cell, self.periodic, quantities="ijDd")
        natural = radii[first] + radii[second]
        near = (lengths < REACH * natural) & (lengths > 0)
        return Bonds(first[near].astype(np.int64), second[near].astype(np.int64), vectors[near], natural[near])

    def _scattered(self, cutoff: float) -> bool:
        """Whether atoms without periodicity lie so far apart that vesin 0.6 would end the process."""
        extent = float(np.ptp(self.positions, axis=0).max())
        return not self.periodic.all() and extent > LARGEST_EXTENT * cutoff


@dataclass(frozen=True)
class Bonds:
    """Neighbour pairs, each once."""

    first: NDArray[np.int64]  # (n_bonds,)
    second: NDArray[np.int64]  # (n_bonds,)
    vectors: Array  # (n_bonds, 3) Å
    natural_lengths: Array  # (n_bonds,) Å, sum of covalent radii

    def changes(self, step: Array, geometry: Geometry) -> Array:
        """How each bond vector changes to first order: u_j - u_i + ε·r."""
        change = step[self.second] - step[self.first]
        if geometry.cell_factor:
            change = change + self.vectors @ (step[geometry.n_atoms :] / geometry.cell_factor).T
        return change  # (n_bonds, 3) Å


class SpringMetric:
    """The stiffness matrix B of the springs at one geometry: `apply` gives B·u, `solve` gives B⁻¹·f."""

    def __init__(self, geometry: Geometry, settings: SpringSettings) -> None:
        self.geometry = geometry
        self.settings = settings
        self.bonds = geometry.bonds
        self._free = geometry.free.ravel()

    @cached_property
    def _blocks(self) -> Array:
        """k∥ r̂r̂ᵀ + k⊥ (1 - r̂r̂ᵀ) of each bond, eV/Å²."""
        setting, bonds = self.settings, self.bonds
        lengths = np.linalg.norm(bonds.vectors, axis=1)
        exponent = -setting.decay * (lengths / bonds.natural_lengths - 1)
        along = setting.stiffness * np.exp(np.minimum(exponent, setting.largest_exponent))
        unit = bonds.vectors / lengths[:, None]
        outer = unit[:, :, None] * unit[:, None, :]
        return along[:, None, None] * ((1 - setting.across) * outer + setting.across * np.eye(3))

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
        bonds, n_atoms = self.bonds, self.geometry.n_atoms
        pulls = np.einsum("nij,nj->ni", self._blocks, bonds.changes(step, self.geometry))
        result = self._floors * step
        np.add.at(result, bonds.second, pulls)
        np.add.at(result, bonds.first, -pulls)
        if self.geometry.cell_factor:
            result[n_atoms:] += pulls.T @ bonds.vectors / self.geometry.cell_factor
        return np.where(self.geometry.free, result, 0.0)

    def solve(self, forces: Array) -> Array:
        """B⁻¹·f on the free coordinates, zero elsewhere."""
        result = np.zeros(forces.size)
        right = forces.ravel()[self._free]
        if right.size <= LARGEST_DENSE:
            result[self._free] = scipy.linalg.cho_solve(self._factor, right)
        else:
            result[self._free] = self._conjugate_gradients(right)
        return result.reshape(forces.shape)

    @cached_property
    def _factor(self) -> tuple[Array, bool]:
        return scipy.linalg.cho_factor(self._matrix.toarray(), check_finite=False)

    @cached_property
    def _matrix(self) -> scipy.sparse.csr_array:
        full = (self._jacobian.T @ self._stiffness @ self._jacobian).tocsr()
        free = np.flatnonzero(self._free)
        return scipy.sparse.csr_array(full[free][:, free] + scipy.sparse.diags_array(self._floors.ravel()[free]))

    @cached_property
    def _stiffness(self) -> scipy.sparse.csr_array:
        n_bonds = len(self.bonds.first)
        block_rows = np.arange(n_bonds + 1)
        shape = (3 * n_bonds, 3 * n_bonds)
        return scipy.sparse.bsr_array((self._blocks, np.arange(n_bonds), block_rows), shape=shape).tocsr()

    @cached_property
    def _jacobian(self) -> scipy.sparse.csr_array:
        """∂(bond vectors)/∂(coordinates), (3·n_bonds, 3·n_rows)."""
        bonds, geometry = self.bonds, self.geometry
        n_bonds, axes = len(bonds.first), np.arange(3)
        rows = (3 * np.arange(n_bonds)[:, None] + axes).ravel()
        ones = np.ones(3 * n_bonds)
        columns = [(3 * bonds.second[:, None] + axes).ravel(), (3 * bonds.first[:, None] + axes).ravel()]
        entries = [(rows, columns[0], ones), (rows, columns[1], -ones)]
        if geometry.cell_factor:
            # δr_a += Σ_b ε_ab r_b, with ε_ab stored at row n_atoms + a, column b
            strain = 3 * geometry.n_atoms + (3 * axes[:, None] + axes)  # (a, b)
            value = np.broadcast_to(bonds.vectors[:, None, :] / geometry.cell_factor, (n_bonds, 3, 3))
            entries.append((np.repeat(rows, 3), np.tile(strain.ravel(), n_bonds), value.ravel()))
        row, column, data = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return scipy.sparse.csr_array((data, (row, column)), shape=(3 * n_bonds, geometry.free.size))

    def _conjugate_gradients(self, right: Array) -> Array:
        matrix = self._matrix
        scale = scipy.sparse.diags_array(1 / matrix.diagonal())
        result, _ = scipy.sparse.linalg.cg(matrix, right, rtol=1e-6, maxiter=500, M=scale)
        return result
