"""A direct policy behind the guard's door: its move is the step, springs stand in for a stiffness."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from relaxion.networks.roles import Policy
from relaxion.optimize.guard import Past
from relaxion.optimize.learned import TRUST, state_at
from relaxion.optimize.point import Array, Point
from relaxion.optimize.springs import Geometry, SpringMetric, SpringSettings
from relaxion.structures import Move, State


class DirectMetrics:
    """`metrics(point, past)`: the policy's move at the point. Policies may see how the relaxer came there."""

    def __init__(self, policy: Policy, elements: Collection[int] | None = None, trust: float = TRUST) -> None:
        """`trust`: the trust radius that states had in training, Å."""
        self.policy, self.elements = policy, None if elements is None else frozenset(elements)
        self.trust = trust
        self._last: tuple[Point, DirectMetric] | None = None

    def __call__(self, point: Point, past: Past | None = None) -> DirectMetric | None:
        geometry = point.geometry
        if geometry is None or not point.finite:
            return None
        if self.elements is not None and not self.elements.issuperset(geometry.numbers.tolist()):
            return None
        if self._last is None or self._last[0] is not point:  # after a rejected point the same base is asked again
            with torch.no_grad():
                move = self.policy(self._state(point, geometry, past or Past()))
            metric = DirectMetric(point.forces, _rows(move, geometry), geometry.springs(SpringSettings()))
            self._last = point, metric
        return self._last[1]

    def _state(self, point: Point, geometry: Geometry, past: Past) -> State:
        state = state_at(point, geometry, past.calls, self.trust)
        if past.coordinates is None or past.forces is None or past.coordinates.shape != point.coordinates.shape:
            return state
        n_atoms, factor = geometry.n_atoms, geometry.cell_factor
        step = point.coordinates - past.coordinates
        strain = step[n_atoms:] / factor if factor else np.zeros((3, 3))
        last = Move(torch.from_numpy(step[:n_atoms].copy()), torch.from_numpy((strain + strain.T) / 2)[None])
        return replace(state, last_move=last, last_forces=torch.from_numpy(past.forces[:n_atoms].copy()))


class DirectMetric:
    """Answers the forces of its point with the policy's move, everything else as springs do."""

    def __init__(self, forces: Array, step: Array, springs: SpringMetric) -> None:
        self.forces, self.step, self.springs = forces, step, springs

    def apply(self, step: Array) -> Array:
        return self.springs.apply(step)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        """The floor has no meaning for a move that comes from no stiffness; the gate's scale has."""
        del extra_floor
        return self.step if forces is self.forces else self.springs.solve(forces)


def _rows(move: Move, geometry: Geometry) -> Array:
    """Atoms, then the rows of a free cell; nothing where a coordinate is not free."""
    rows = move.displacements.double().numpy()
    if geometry.cell_factor:
        rows = np.concatenate([rows, geometry.cell_factor * move.strains[0].double().numpy()])
    return np.asarray(rows * geometry.free, dtype=np.float64)
