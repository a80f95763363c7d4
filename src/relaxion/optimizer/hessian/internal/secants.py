"""Secants in internal coordinates: what steps taught, carried to where the next one begins.

A secant is the change of z = (q, c·x) between two points and the change of the gradient by z. At another geometry it
means another step and another change of forces: ξ = G⁺·Δz and η = Gᵀ·Δg_z. With these the usual recursion is BFGS in
internal coordinates, on a model made afresh at each geometry, and Cartesian where no valence coordinate speaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relaxion.optimizer.hessian.internal.coordinates import difference
from relaxion.optimizer.hessian.internal.model import Place
from relaxion.optimizer.hessian.internal.topology import Topology, topology_of
from relaxion.optimizer.point import Array, Geometry, Point

MOST_NUMBERS = 60_000  # coordinates times secants remembered
FEWEST, MOST = 8, 60  # secants remembered, by that


@dataclass(frozen=True, eq=False)
class Visited:
    """A point in internal coordinates."""

    point: Point
    q: Array
    by_q: Array  # gradient
    by_x: Array


class ValenceMemory:
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
    def restored(cls, plain: dict[str, Any], base: Point) -> ValenceMemory:
        """The opposite; `base`: the last one, whose elements and constraints are those of all points."""
        if base.geometry is None:
            raise ValueError("valence coordinates without a geometry")
        memory = cls()
        bonds = {tuple(int(number) for number in bond) for bond in plain["bonds"]}
        memory.topology = topology_of(_geometry(plain["made_at"], base.geometry), bonds)
        points = [_point(saved, base) for saved in plain["points"]]
        memory.pairs = [(points[before], points[after]) for before, after in plain["pairs"]]
        return memory

    def secants(self, here: Place) -> list[tuple[Array, Array]]:
        """Steps and drops of the forces as they are at this place, in order."""
        if here.topology is not self.topology:
            self.topology, self._seen = here.topology, {}
        if not self.pairs:
            return []
        ends = [(self._visited(before, here), self._visited(after, here)) for before, after in self.pairs]
        self._seen = {id(one.point): one for pair in ends for one in pair}
        columns = [_change(here.topology, before, after) for before, after in ends]
        changes, steps, by_q, by_x = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
        shape = here.geometry.free.shape
        carried, drops = here.carried_out(changes, steps), here.joined(by_q, by_x)
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
    if _same(plain, like):  # the last base is one object here and there, as it was
        return like
    assert like.geometry is not None
    coordinates, forces = (np.asarray(plain[k], dtype=np.float64).reshape(-1, 3) for k in ("coordinates", "forces"))
    return Point(coordinates, forces, float(plain["energy"]), _geometry(plain, like.geometry))


def _same(plain: dict[str, Any], point: Point) -> bool:
    return np.array_equal(np.asarray(plain["coordinates"]), point.coordinates)


def _geometry(plain: dict[str, Any], like: Geometry) -> Geometry:
    positions = np.asarray(plain["positions"], dtype=np.float64).reshape(like.positions.shape)
    return replace(like, positions=positions, cell=np.asarray(plain["cell"], dtype=np.float64).reshape(3, 3))
