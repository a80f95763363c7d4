"""What the optimizers of many structures need at their new points, made for all of them at once.

Nothing is decided here: springs and learned metrics are put where each chain would have made them by itself, and
whatever cannot be made together is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase.data import covalent_radii
from scipy.linalg import get_lapack_funcs
from torch import Tensor

from relaxion.errors import StructureError
from relaxion.networks.metric.dense import dense
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.strains import strain_vectors
from relaxion.optimize.guard import Guard
from relaxion.optimize.learned import TRUST, LearnedMetrics
from relaxion.optimize.point import Array, Point
from relaxion.optimize.springs import LARGEST_CUTOFF, REACH, Bonds, Geometry, SpringMetric, SpringSettings
from relaxion.optimize.stepper import Stepper
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.structures.graph import Pairs

LARGEST_TOGETHER = 64  # atoms; larger structures keep a core busy by themselves
MOST_TOGETHER = 64  # structures of about the same size: matrices are padded to the largest
ROOT_HALF = math.sqrt(0.5)
SOLVE: Any = get_lapack_funcs("potrs", dtype=np.float64)  # from a Cholesky factor; scipy's own door checks too much


@dataclass(frozen=True, eq=False)
class Work:
    """A chain and the point it is about to judge."""

    chain: Stepper
    point: Point
    place: int  # of the structure among those just evaluated

    @property
    def geometry(self) -> Geometry:
        assert self.point.geometry is not None
        return self.point.geometry

    @property
    def is_small(self) -> bool:
        """Whether it is quicker together with others, and asks for springs at all."""
        known = self.point.geometry is not None and self.point.finite and self.chain.fire_steps_left <= 0
        return known and self.geometry.n_atoms <= LARGEST_TOGETHER


class KeptMetrics(LearnedMetrics):
    """Learned metrics that may be handed in before they are asked for."""

    def take(self, point: Point, metric: Any) -> None:
        self._last = point, metric


def prepared_chain(chain: Stepper) -> Stepper:
    """The same chain, ready to be handed what `prepare` makes."""
    guard = chain.quasi_newton
    if isinstance(guard, Guard) and isinstance(guard.metrics, LearnedMetrics):
        guard.metrics = KeptMetrics(guard.metrics.network, guard.metrics.elements)
    return chain


@dataclass(frozen=True, eq=False)
class NearPairs:
    """The pairs of structures just evaluated: springs and networks reach less far than most potentials."""

    structures: Structures
    cutoff: float  # Å
    pairs: Pairs

    @classmethod
    def of(cls, structures: Structures, cutoff: float) -> NearPairs:
        """Searched now, and kept for whoever asks about the same structures."""
        pairs = Pairs.of(structures, cutoff)
        pairs.keep(structures, cutoff)
        return cls(structures, cutoff, pairs)

    def keep_for(self, structures: Structures, which: Tensor) -> None:
        """`structures` are those numbered by `which`, of the ones evaluated."""
        whole = len(which) == len(self.structures)
        pairs = self.pairs if whole else self.pairs.of_structures(self.structures, which)
        pairs.keep(structures, self.cutoff)


def prepare(work: Sequence[Work], near: NearPairs | None = None) -> None:
    """Make springs and metrics at the points that these chains are about to judge, in groups of about the same size.

    `work` is sorted by size; `near`: pairs known already, of structures among which these are, in the same order.
    """
    for start in range(0, len(work), MOST_TOGETHER):
        small = [one for one in work[start : start + MOST_TOGETHER] if one.is_small]
        for cell_free in (False, True):  # a free cell has rows of its own
            group = [one for one in small if bool(one.geometry.cell_factor) == cell_free]
            if len(group) > 1:
                _prepare_group(group, near)


def _prepare_group(group: Sequence[Work], near: NearPairs | None) -> None:
    structures = _structures(group, near)
    settings = group[0].chain.quasi_newton.settings
    alike = all(one.chain.quasi_newton.settings == settings for one in group)
    if alike and settings.use_springs and not group[0].geometry.cell_factor:
        _make_springs([one.geometry for one in group], structures, settings.springs)
    learned: dict[int, list[tuple[KeptMetrics, Work]]] = {}
    for one in group:
        source = getattr(one.chain.quasi_newton, "metrics", None)
        if isinstance(source, KeptMetrics) and source.covers(one.geometry):
            learned.setdefault(id(source.network), []).append((source, one))
    for asked in learned.values():
        sources, those = [source for source, _ in asked], [one for _, one in asked]
        chosen = structures if len(those) == len(group) else _structures(those, near)
        _make_metrics(sources, [one.point for one in those], chosen)


def _structures(group: Sequence[Work], near: NearPairs | None) -> Structures:
    structures = structures_of([one.geometry for one in group])
    if near is not None:
        near.keep_for(structures, torch.tensor([one.place for one in group]))
    return structures


def structures_of(geometries: Sequence[Geometry]) -> Structures:
    """Many geometries as networks see them."""
    counts = torch.tensor([geometry.n_atoms for geometry in geometries])
    movable = [geometry.free[: geometry.n_atoms].any(axis=1) for geometry in geometries]
    return Structures(
        positions=torch.from_numpy(np.concatenate([geometry.positions for geometry in geometries])),
        cells=torch.from_numpy(np.stack([geometry.cell for geometry in geometries])),
        periodic=torch.from_numpy(np.stack([geometry.periodic for geometry in geometries])),
        atomic_numbers=torch.from_numpy(np.concatenate([geometry.numbers for geometry in geometries])),
        structure_index=torch.repeat_interleave(torch.arange(len(geometries)), counts),
        movable=torch.from_numpy(np.concatenate(movable)),
        cell_free=torch.tensor([geometry.cell_factor > 0 for geometry in geometries]),
    )


# Springs


class FactoredSprings(SpringMetric):
    """Springs whose Cholesky factor was made with those of others."""

    def __init__(self, geometry: Geometry, settings: SpringSettings, factor: Array) -> None:
        super().__init__(geometry, settings)
        self._upper = factor  # U of B = UᵀU, columns first, over all coordinates; 1 where one is not free

    def solve(self, forces: Array) -> Array:
        free = self.geometry.free
        right = np.where(free, forces, 0.0).ravel()
        return SOLVE(self._upper, right)[0].reshape(forces.shape) * free


def _make_springs(geometries: Sequence[Geometry], structures: Structures, settings: SpringSettings) -> None:
    try:
        bonds = _Bonds(geometries, structures)
        factors = _factors(bonds, structures, settings, _padded_free(geometries))
    except (StructureError, ArithmeticError, RuntimeError):  # of one of them; each makes its own, or fails alone
        return
    for number, geometry in enumerate(geometries):
        vars(geometry).setdefault("bonds", bonds.of(number))
        factor = _upper(factors[number], geometry.n_atoms)
        geometry._springs.setdefault(settings, FactoredSprings(geometry, settings, factor))


class _Bonds:
    """The bonds of all geometries, one after the other."""

    def __init__(self, geometries: Sequence[Geometry], structures: Structures) -> None:
        radii = torch.from_numpy(covalent_radii)[structures.atomic_numbers]
        cutoff = min(REACH * 2 * float(radii.max()), LARGEST_CUTOFF)
        pairs = Pairs.of(structures, cutoff)
        first, second = pairs.ends
        natural = radii[first] + radii[second]
        lengths = torch.linalg.vector_norm(pairs.vectors, dim=1)
        near = ((lengths < REACH * natural) & (lengths > 0)).nonzero().flatten()
        self.first, self.second = first[near], second[near]
        self.vectors, self.lengths, self.natural = pairs.vectors[near], lengths[near], natural[near]
        self.owners = structures.structure_index[self.first]
        counts = structures.counts
        self.starts = counts.cumsum(0) - counts
        ends = torch.bincount(self.owners, minlength=len(geometries)).cumsum(0).tolist()
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))

    def of(self, number: int) -> Bonds:
        start, end = self._bounds[number]
        offset = int(self.starts[number])
        return Bonds(
            self.first[start:end].numpy() - offset,
            self.second[start:end].numpy() - offset,
            self.vectors[start:end].numpy(),
            self.natural[start:end].numpy(),
        )


def _padded_free(geometries: Sequence[Geometry]) -> Tensor | None:
    """(n_structures, 3 · n_largest), 1 where a coordinate is free, and in the padding; None: all are."""
    if all(geometry.free.all() for geometry in geometries):
        return None
    free = np.ones((len(geometries), max(geometry.n_atoms for geometry in geometries), 3))
    for row, geometry in zip(free, geometries, strict=True):
        row[: geometry.n_atoms] = geometry.free[: geometry.n_atoms]
    return torch.from_numpy(free.reshape(len(geometries), -1))


def _factors(bonds: _Bonds, structures: Structures, settings: SpringSettings, free: Tensor | None) -> Array:
    """Cholesky factors L of all stiffness matrices, padded, as in `SpringMetric`."""
    n, n_structures = int(structures.counts.max()), structures.n_structures
    exponent = (-settings.decay * (bonds.lengths / bonds.natural - 1)).clamp_max(settings.largest_exponent)
    along = settings.stiffness * torch.exp(exponent)
    unit = bonds.vectors / bonds.lengths[:, None]
    blocks = ((1 - settings.across) * along)[:, None, None] * (unit[:, :, None] * unit[:, None, :])
    blocks.diagonal(dim1=1, dim2=2).add_((settings.across * along)[:, None])
    start = bonds.starts[bonds.owners]
    places = (bonds.owners * n + bonds.first - start) * n + bonds.second - start
    joined = blocks.new_zeros((n_structures * n * n, 9)).index_add_(0, places, blocks.view(-1, 9))
    joined = joined.view(n_structures, n, n, 9)
    joined = joined + joined.transpose(1, 2)  # blocks are symmetric
    sums = joined.sum(dim=2)
    matrix = joined.neg_()
    matrix.diagonal(dim1=1, dim2=2).add_(sums.transpose(1, 2))
    matrix = matrix.view(n_structures, n, n, 3, 3).transpose(2, 3).reshape(n_structures, 3 * n, 3 * n)
    matrix.diagonal(dim1=1, dim2=2).add_(settings.floor)
    if free is not None:
        matrix.mul_(free[:, :, None]).mul_(free[:, None, :]).diagonal(dim1=1, dim2=2).add_(1 - free)
    return torch.linalg.cholesky(matrix).numpy()


def _upper(factor: Array, n_atoms: int) -> Array:
    """U = Lᵀ of one structure, columns first, as LAPACK likes it."""
    return np.array(factor[: 3 * n_atoms, : 3 * n_atoms]).T


# Learned metrics


class DenseMetric:
    """A learned stiffness as a matrix of its own: `LearnedMetric` in the same coordinates, without the network's types.

    Rows: three per atom, then six for a free cell.
    """

    def __init__(self, matrix: Array, factor: Array, free: Array, geometry: Geometry) -> None:
        self.matrix, self.free, self.geometry = matrix, free, geometry
        self._uppers: dict[float, Any] = {0.0: np.ascontiguousarray(factor).T}

    def apply(self, step: Array) -> Array:
        factor = self.geometry.cell_factor
        return self._rows(self.matrix @ self._flat(step, 1 / factor if factor else 0.0), 1 / factor if factor else 0.0)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        factor = self.geometry.cell_factor
        if extra_floor not in self._uppers:
            stiffened = self.matrix.copy()
            atoms = np.arange(3 * self.geometry.n_atoms)
            stiffened[atoms, atoms] += extra_floor
            self._uppers[extra_floor] = np.linalg.cholesky(stiffened).T
        return self._rows(SOLVE(self._uppers[extra_floor], self._flat(forces, factor))[0], factor)

    def _flat(self, rows: Array, cell_scale: float) -> Array:
        n_atoms = self.geometry.n_atoms
        if not self.geometry.cell_factor:
            return rows.ravel() * self.free
        cell = cell_scale * rows[n_atoms:]
        return np.concatenate([rows[:n_atoms].ravel(), _strain_vector((cell + cell.T) / 2)]) * self.free

    def _rows(self, flat: Array, cell_scale: float) -> Array:
        n_atoms, flat = self.geometry.n_atoms, flat * self.free
        if not self.geometry.cell_factor:
            return flat.reshape(-1, 3)
        return np.concatenate([flat[: 3 * n_atoms].reshape(-1, 3), cell_scale * _strain_matrix(flat[3 * n_atoms :])])


def _strain_vector(strain: Array) -> Array:
    """As `networks.strains.strain_vectors`, of one."""
    return strain.flat[[0, 4, 8, 5, 2, 1]] * [1, 1, 1, *[math.sqrt(2)] * 3]


def _strain_matrix(vector: Array) -> Array:
    """The opposite."""
    return (vector * [1, 1, 1, *[ROOT_HALF] * 3])[[0, 5, 4, 5, 1, 3, 4, 3, 2]].reshape(3, 3)


def _make_metrics(sources: Sequence[KeptMetrics], points: Sequence[Point], structures: Structures) -> None:
    try:
        metrics = _dense_metrics(sources[0].network, points, structures)
    except (StructureError, ArithmeticError, RuntimeError):  # of one of them; each asks the network by itself
        return
    for source, point, metric in zip(sources, points, metrics, strict=True):
        source.take(point, metric)


def _geometry(point: Point) -> Geometry:
    assert point.geometry is not None
    return point.geometry


def _dense_metrics(network: MetricNetwork, points: Sequence[Point], structures: Structures) -> list[DenseMetric]:
    geometries = [_geometry(point) for point in points]
    with torch.inference_mode():
        stiffness = network(_state(points, structures)).to(torch.float64)
        atoms = torch.from_numpy(np.concatenate([geometry.free[: geometry.n_atoms] for geometry in geometries]))
        stiffness = stiffness.restricted(atoms, torch.cat([_free_strains(geometry) for geometry in geometries]))
        matrices, layout = dense(stiffness)
        factors = torch.linalg.cholesky(matrices).numpy()
    matrices, free_cells = matrices.numpy(), stiffness.free.cells.numpy()
    result = []
    for number, geometry in enumerate(geometries):
        n, free = 3 * geometry.n_atoms, geometry.free[: geometry.n_atoms].ravel()
        matrix, factor = (each[number] for each in (matrices, factors))
        if layout.has_cell:
            rows = np.concatenate([np.arange(n), 3 * layout.n_largest + np.arange(6)])
            matrix, factor = (each[rows[:, None], rows] for each in (matrix, factor))
            free = np.concatenate([free, free_cells[number]])
        else:
            matrix, factor = matrix[:n, :n], factor[:n, :n]
        result.append(DenseMetric(matrix, factor, free.astype(np.float64), geometry))
    return result


def _state(points: Sequence[Point], structures: Structures) -> State:
    """As `learned_metric.state_at`, of many points."""
    stresses = torch.zeros((len(points), 3, 3), dtype=torch.float64)
    for number, point in enumerate(points):
        geometry = _geometry(point)
        if factor := geometry.cell_factor:
            pulls = -point.forces[geometry.n_atoms :] * factor / max(geometry.volume, 1e-12)
            stresses[number] = torch.from_numpy(pulls)
    forces = torch.from_numpy(np.concatenate([point.forces[: _geometry(point).n_atoms] for point in points]))
    energies = torch.tensor([point.energy for point in points], dtype=torch.float64)
    return State(
        structures=structures,
        evaluation=Evaluation(energies, forces, stresses),
        graph=None,
        last_move=Move.zero(structures),
        last_forces=forces,
        trust_radii=torch.full((len(points),), TRUST, dtype=torch.float64),
        calls=torch.ones(len(points), dtype=torch.int64),
    )


def _free_strains(geometry: Geometry) -> Tensor:
    """Components of the strain that the filter leaves free, (1, 6) bool."""
    if not geometry.cell_factor:
        return torch.zeros((1, 6), dtype=torch.bool)
    mask = torch.from_numpy(geometry.free[geometry.n_atoms :].astype(np.float64))[None]
    return strain_vectors(mask * mask.mT) > 0
