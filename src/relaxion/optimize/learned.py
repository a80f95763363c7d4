"""A metric network behind the guard's door: a point in, the stiffness there out, in the coordinates of the point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from relaxion.networks.metric.dense import Layout, dense
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.solve import LARGEST_DENSE, inverse_of
from relaxion.networks.metric.stiffness import Stiffness, Unknowns
from relaxion.networks.strains import strain_matrices, strain_vectors
from relaxion.optimize.guard import Past
from relaxion.optimize.point import Array, Point
from relaxion.optimize.springs import Geometry
from relaxion.structures import Evaluation, Move, State, Structures

Linear: TypeAlias = Callable[[Unknowns], Unknowns]

TRUST = 0.3  # Å; part of every state, the same throughout a training


class LearnedMetrics:
    """`metrics(point)`: the network's stiffness, or None where an element is not covered."""

    def __init__(self, network: MetricNetwork, elements: Collection[int] | None = None) -> None:
        """`elements`: atomic numbers the network may speak about; None: all."""
        self.network, self.elements = network, None if elements is None else frozenset(elements)
        self._last: tuple[Point, LearnedMetric] | None = None

    def __call__(self, point: Point, past: Past | None = None) -> LearnedMetric | None:
        """`past` says nothing to a metric that was trained without history."""
        del past
        geometry = point.geometry
        if geometry is None or not point.finite or not self.covers(geometry):
            return None
        if self._last is None or self._last[0] is not point:  # after a rejected point the same base is asked again
            with torch.no_grad():
                stiffness = self.network(state_at(point, geometry)).to(torch.float64)
            self._last = point, LearnedMetric(stiffness.restricted(*_free(geometry)), geometry)
        return self._last[1]

    def covers(self, geometry: Geometry) -> bool:
        return self.elements is None or self.elements.issuperset(geometry.numbers.tolist())


class LearnedMetric:
    """The stiffness at one geometry; rows of a free cell are `cell_factor` times its strain, as in ASE's filters."""

    def __init__(self, stiffness: Stiffness, geometry: Geometry) -> None:
        self.stiffness, self.geometry = stiffness, geometry
        self._inverses: dict[float, Linear] = {}

    def apply(self, step: Array) -> Array:
        n_atoms, factor = self.geometry.n_atoms, self.geometry.cell_factor
        cells = step[n_atoms:] / factor if factor else None
        answer = self._product(_unknowns(step[:n_atoms], cells))
        return _rows(answer, 1 / factor if factor else 0.0)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        n_atoms, factor = self.geometry.n_atoms, self.geometry.cell_factor
        pulls = _unknowns(forces[:n_atoms], forces[n_atoms:] * factor if factor else None)
        try:
            return _rows(self._inverse(extra_floor)(pulls), factor)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]  # weights that are no numbers
            return np.full_like(forces, np.nan)

    @cached_property
    def _dense(self) -> tuple[Tensor, Layout] | None:
        """B as a matrix, for products and inverses alike; None where that would be too large."""
        return dense(self.stiffness) if self.geometry.n_atoms <= LARGEST_DENSE else None

    @cached_property
    def _product(self) -> Linear:
        if self._dense is None:
            return self.stiffness.apply
        matrix, layout = self._dense
        return _packed(lambda right: torch.bmm(matrix, right), layout, self.stiffness)

    def _inverse(self, extra_floor: float) -> Linear:
        if extra_floor not in self._inverses:
            self._inverses[extra_floor] = self._new_inverse(extra_floor)
        return self._inverses[extra_floor]

    def _new_inverse(self, extra_floor: float) -> Linear:
        if self._dense is None:
            return inverse_of(replace(self.stiffness, floors=self.stiffness.floors + extra_floor))
        matrix, layout = self._dense
        if extra_floor:
            matrix = matrix.clone()
            matrix.diagonal(dim1=1, dim2=2)[:, : 3 * self.geometry.n_atoms].add_(extra_floor)
        factor = torch.linalg.cholesky(matrix)
        return _packed(lambda right: torch.cholesky_solve(right, factor), layout, self.stiffness)


def _packed(of_columns: Callable[[Tensor], Tensor], layout: Layout, stiffness: Stiffness) -> Linear:
    """A linear map of padded columns as one of unknowns; what is not free neither asks nor answers."""

    def linear(unknowns: Unknowns) -> Unknowns:
        columns = layout.packed(unknowns.masked(stiffness.free), stiffness.structures)[:, :, None]
        return layout.unpacked(of_columns(columns)[:, :, 0], stiffness.structures).masked(stiffness.free)

    return linear


def state_at(point: Point, geometry: Geometry, calls: int = 1, trust: float = TRUST) -> State:
    """The point as networks see it. Stress is that which the filter's forces on the cell amount to."""
    n_atoms, factor = geometry.n_atoms, geometry.cell_factor
    structures = Structures(
        positions=torch.from_numpy(geometry.positions),
        cells=torch.from_numpy(geometry.cell)[None],
        periodic=torch.from_numpy(geometry.periodic)[None],
        atomic_numbers=torch.from_numpy(geometry.numbers),
        structure_index=torch.zeros(n_atoms, dtype=torch.int64),
        movable=torch.from_numpy(geometry.free[:n_atoms].any(axis=1)),
        cell_free=torch.tensor([factor > 0]),
    )
    forces = torch.from_numpy(point.forces[:n_atoms])
    stresses = torch.zeros((1, 3, 3), dtype=torch.float64)
    if factor:
        stresses[0] = torch.from_numpy(-point.forces[n_atoms:] * factor / max(geometry.volume, 1e-12))
    return State(
        structures=structures,
        evaluation=Evaluation(torch.tensor([point.energy], dtype=torch.float64), forces, stresses),
        graph=None,
        last_move=Move.zero(structures),
        last_forces=forces,
        trust_radii=torch.tensor([trust], dtype=torch.float64),
        calls=torch.tensor([calls], dtype=torch.int64),
    )


def states_at(points: Sequence[Point]) -> State:
    """Many points as networks see them."""
    return State.concatenate([state_at(point, point.geometry) for point in points if point.geometry is not None])


def _free(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Coordinates of atoms and components of the strain that constraints and filter leave free."""
    atoms = torch.from_numpy(geometry.free[: geometry.n_atoms])
    if not geometry.cell_factor:
        return atoms, torch.zeros((1, 6), dtype=torch.bool)
    mask = torch.from_numpy(geometry.free[geometry.n_atoms :].astype(np.float64))[None]
    return atoms, strain_vectors(mask * mask.mT) > 0


def _unknowns(atoms: Array, cells: Array | None) -> Unknowns:
    of_atoms = torch.from_numpy(np.ascontiguousarray(atoms))
    if cells is None:
        return Unknowns(of_atoms, torch.zeros((1, 6), dtype=torch.float64))
    strain = torch.from_numpy(np.ascontiguousarray(cells))[None]
    return Unknowns(of_atoms, strain_vectors((strain + strain.mT) / 2))


def _rows(answer: Unknowns, factor: float) -> Array:
    """Atoms, then the rows of a free cell."""
    atoms = answer.atoms.numpy()
    return np.concatenate([atoms, factor * strain_matrices(answer.cells)[0].numpy()]) if factor else atoms
