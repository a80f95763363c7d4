"""A cheaper potential as a model: its Hessian, and its surface corrected by the answers of the expensive one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relaxion.optimizer.hessian.base import Hessian
from relaxion.optimizer.hessian.internal import CARTESIAN, Place
from relaxion.optimizer.hessian.internal_coordinates import difference
from relaxion.optimizer.hessian.internal_topology import Topology
from relaxion.optimizer.point import Array, Point, dot

DIFFERENCE = 0.015  # Å, either way: machine-learned forces are float32
SHARE = 0.5  # of the cheap potential's Hessian, the rest is the policy's
SOFTEST = 1.0  # eV/Å², of any mode; softer ones the secants of the expensive potential will find


def differences(point: Point, forces_at: Callable[[Array], Array]) -> Array:
    """The Hessian by the coordinates that are free, eV/Å²: two calls of `forces_at` for each."""
    assert point.geometry is not None
    free = point.geometry.free
    rows = []
    for row, axis in np.argwhere(free):
        drops = []
        for way in (DIFFERENCE, -DIFFERENCE):
            there = point.coordinates.copy()
            there[row, axis] += way
            drops.append(forces_at(there)[free])
        rows.append((drops[1] - drops[0]) / (2 * DIFFERENCE))
    matrix = np.array(rows)
    return (matrix + matrix.T) / 2


def matrix_of(hessian: Hessian, free: NDArray[np.bool_]) -> Array:
    """Any Hessian by the coordinates that are free, eV/Å²."""
    places = np.argwhere(free)
    matrix = np.empty((len(places), len(places)))
    for column, (row, axis) in enumerate(places):
        step = np.zeros(free.shape)
        step[row, axis] = 1.0
        matrix[:, column] = hessian.apply(step)[free]
    return (matrix + matrix.T) / 2


class PotentialHessian:
    """The Hessian of a cheaper potential, made positive definite; what is fixed stays."""

    has_curvature = True

    def __init__(self, matrix: Array, free: NDArray[np.bool_], other: Hessian | None = None) -> None:
        """`matrix`: symmetric, by the coordinates that are free, eV/Å²; `free`: (n_rows, 3) bool.

        `other`: of another model; both err, and their mean errs less.
        """
        self.free = free
        values, self._modes = np.linalg.eigh(matrix)
        self._stiffness = np.maximum(np.abs(values), SOFTEST)
        if other is not None:
            own = (self._modes * self._stiffness) @ self._modes.T
            self._stiffness, self._modes = np.linalg.eigh(SHARE * own + (1 - SHARE) * matrix_of(other, free))

    def apply(self, step: Array) -> Array:
        return self._scaled(step, self._stiffness)

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        return self._scaled(forces, 1 / (self._stiffness + shift))

    def _scaled(self, rows: Array, factors: Array) -> Array:
        """Each mode by its factor."""
        result = np.zeros_like(rows)
        result[self.free] = self._modes @ (factors * (self._modes.T @ rows[self.free]))
        return result


class SurfaceCorrection:
    """What the expensive forces are above the cheap ones around a point: constant, plus a symmetric matrix.

    Both in the coordinates (q, c·x) of a structure with molecules: forces held in space would turn them.
    """

    def __init__(self, base: Point, offset: Array, seen: Sequence[tuple[Point, Array]], topology: Topology) -> None:
        """`offset`: expensive minus cheap forces at the base, eV/Å; `seen`: the same at points before."""
        self.base = base
        self.topology = topology
        self._here = self._place(base)
        self._offset = self._split(self._here, offset)
        self._updates: list[tuple[Array, Array]] = []
        for point, offset_there in seen:
            there = self._place(point)
            step = self._step(point, there)
            if dot(step, step) > 1e-8:
                self._updates.append((self._split(there, offset_there) - self._offset - self._product(step), step))

    def _place(self, point: Point) -> Place:
        assert point.geometry is not None
        return Place(self.topology, point.geometry)

    def _split(self, place: Place, forces: Array) -> Array:
        """Forces by (q, c·x)."""
        return np.concatenate(place.split(forces))

    def _joined(self, place: Place, by_z: Array) -> Array:
        """Forces by Cartesian coordinates."""
        n_internal = len(place.values.q)
        joined = place.joined(by_z[:n_internal], by_z[n_internal:])
        return joined.reshape(self.base.forces.shape)

    def _step(self, point: Point, place: Place) -> Array:
        """The change of (q, c·x) from the base."""
        straight = (point.coordinates - self.base.coordinates).ravel()
        change = difference(place.topology, place.values.q, self._here.values.q)
        return np.concatenate([change, CARTESIAN * straight])

    def _product(self, step: Array) -> Array:
        result = np.zeros_like(step)
        for missing, way in self._updates:
            square = dot(way, way)
            along = dot(way, step) / square
            result += missing * along + way * (dot(missing, step) / square - dot(missing, way) * along / square)
        return result

    def of(self, point: Point) -> Point:
        """The cheap point, corrected."""
        there = self._place(point)
        step = self._step(point, there)
        change = self._product(step)
        return replace(
            point,
            forces=point.forces + self._joined(there, self._offset + change),
            energy=point.energy - dot(self._offset, step) - dot(step, change) / 2,
        )
