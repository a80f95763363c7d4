"""Secants in internal coordinates: what steps taught, carried to where the next one begins.

A secant is the change of z = (q, c·x) between two points and the change of the gradient by z. At another geometry it
means another step and another change of forces: ξ = G⁺·Δz and η = Gᵀ·Δg_z. With these the usual recursion is BFGS in
internal coordinates, on a model made afresh at each geometry, and Cartesian where no valence coordinate speaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relaxion.optimize.point import Array, Point
from relaxion.optimize.valence.coordinates import difference
from relaxion.optimize.valence.model import Place
from relaxion.optimize.valence.topology import Topology

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

    def secants(self, here: Place) -> list[tuple[Array, Array]]:
        """Steps and drops of the forces as they are at this place, in order."""
        if here.topology is not self.topology:
            self.topology, self._seen = here.topology, {}
        if not self.pairs:
            return []
        ends = [(self._visited(before), self._visited(after)) for before, after in self.pairs]
        self._seen = {id(one.point): one for pair in ends for one in pair}
        columns = [_change(here.topology, before, after) for before, after in ends]
        changes, steps, by_q, by_x = (np.stack(parts, axis=1) for parts in zip(*columns, strict=True))
        shape = here.geometry.free.shape
        carried, drops = here.carried_out(changes, steps), here.joined(by_q, by_x)
        return [(step.reshape(shape), drop.reshape(shape)) for step, drop in zip(carried.T, drops.T, strict=True)]

    def _visited(self, point: Point) -> Visited:
        known = self._seen.get(id(point))
        if known is not None:
            return known
        assert point.geometry is not None and self.topology is not None
        place = Place(self.topology, point.geometry)
        return Visited(point, place.values.q, *place.split(-point.forces))


def _change(topology: Topology, before: Visited, after: Visited) -> tuple[Array, Array, Array, Array]:
    step = (after.point.coordinates - before.point.coordinates).ravel()
    return difference(topology, after.q, before.q), step, after.by_q - before.by_q, after.by_x - before.by_x
