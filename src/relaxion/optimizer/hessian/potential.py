"""The surface of a cheaper potential, corrected by the answers of the expensive one at a point and at those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relaxion.optimizer.hessian.internal.coordinates import difference
from relaxion.optimizer.hessian.internal.model import CARTESIAN, Place
from relaxion.optimizer.hessian.internal.topology import Topology
from relaxion.optimizer.point import Array, Point, dot


class SurfaceCorrection:
    """What the expensive forces are above the cheap ones around a point: constant, plus a symmetric matrix.

    Both in the coordinates z of the structure: Cartesian ones, or (q, c·x) where there are molecules.
    """

    def __init__(
        self, base: Point, offset: Array, seen: Sequence[tuple[Point, Array]], topology: Topology | None = None
    ) -> None:
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

    def _place(self, point: Point) -> Place | None:
        if self.topology is None or point.geometry is None:
            return None
        return Place(self.topology, point.geometry)

    def _split(self, place: Place | None, forces: Array) -> Array:
        """Forces by z."""
        return forces.ravel() if place is None else np.concatenate(place.split(forces))

    def _joined(self, place: Place | None, by_z: Array) -> Array:
        """Forces by Cartesian coordinates."""
        if place is None:
            return by_z.reshape(self.base.forces.shape)
        n_internal = len(place.values.q)
        joined = place.joined(by_z[:n_internal], by_z[n_internal:])
        return joined.reshape(self.base.forces.shape)

    def _step(self, point: Point, place: Place | None) -> Array:
        """The change of z from the base."""
        straight = (point.coordinates - self.base.coordinates).ravel()
        if place is None or self._here is None:
            return straight
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
