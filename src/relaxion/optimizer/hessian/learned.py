"""Policies as the safeguard asks them: points in, the stiffness at each of them out, in the coordinates of the points.

A stiffness policy answers with what its network sees. A direct policy has a move only: that is the answer to the
forces at its point, and springs stand in for everything else.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from relaxion.model.roles import Policy
from relaxion.model.solve import COARSE_TOLERANCE, LARGEST_DENSE, Inverse, gradients_of, sparse_product
from relaxion.model.stiffness import Stiffness, Unknowns, strain_vectors
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.hessian.base import POLICY, Base, Hessian
from relaxion.optimizer.hessian.springs import FACTOR, SOLVE, SpringHessian
from relaxion.optimizer.point import Array, Geometry, Point, structures_of
from relaxion.structures import Evaluation, Move, State, Structures

TRUST = 0.3  # Å; part of every state, the same throughout a training
STRAIN_PLACES = [0, 4, 8, 5, 2, 1]  # xx yy zz yz xz xy in a flat 3 × 3 matrix


class _Source:
    elements: frozenset[int] | None
    method = POLICY

    def covers(self, geometry: Geometry) -> bool:
        return self.elements is None or self.elements.issuperset(geometry.numbers.tolist())


class LearnedHessians(_Source):
    """A stiffness network."""

    def __init__(self, network: StiffnessNetwork, elements: Collection[int] | None = None) -> None:
        """`elements`: atomic numbers the network may speak about; None: all."""
        self.network = network
        self.elements = None if elements is None else frozenset(elements)

    def at(self, bases: Sequence[Base], structures: Structures) -> list[Hessian]:
        geometries = [one.geometry for one in bases]
        with torch.no_grad():
            stiffness = self.network(states_at([one.point for one in bases], structures)).to(torch.float64)
            atoms = torch.from_numpy(np.concatenate([geometry.free[: geometry.n_atoms] for geometry in geometries]))
            stiffness = stiffness.restricted(atoms, torch.cat([_free_strains(geometry) for geometry in geometries]))
            frees = [free for alike in stiffness.layout.packed(stiffness.free) for free in alike.double().numpy()]
            if len(bases) == 1 and geometries[0].n_atoms > LARGEST_DENSE:
                return [SparseHessian(geometries[0], frees[0], stiffness)]
            matrices = [matrix for alike in stiffness.matrices for matrix in alike.numpy()]
        result = dict[int, Hessian]()
        for number, free, matrix in zip(stiffness.layout.order.tolist(), frees, matrices, strict=True):
            geometry = geometries[number]
            n_rows = 3 * geometry.n_atoms + 6 * (geometry.cell_factor > 0)
            result[number] = DenseHessian(geometry, free[:n_rows], matrix[:n_rows, :n_rows])
        return [result[number] for number in range(len(bases))]


class _InStrains:
    """B in coordinates of the network, three per atom and six for a free cell; ASE has nine for the cell."""

    has_curvature = True

    def __init__(self, geometry: Geometry, free: Array) -> None:
        self.geometry, self.free = geometry, free  # free: (n_coordinates,) 1 where it may change, else 0

    def apply(self, step: Array) -> Array:
        scale = 1 / self.geometry.cell_factor if self.geometry.cell_factor else 0.0
        return self._rows(self._product(self._flat(step, scale)), scale)

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        scale = self.geometry.cell_factor
        answer = self._solution(self._flat(forces, scale), shift)
        return np.full_like(forces, np.nan) if answer is None else self._rows(answer, scale)

    def _flat(self, rows: Array, cell_scale: float) -> Array:
        n_atoms = self.geometry.n_atoms
        if not self.geometry.cell_factor:
            return rows.ravel() * self.free
        cell = cell_scale * rows[n_atoms:]
        strain = ((cell + cell.T) / 2).flat[STRAIN_PLACES] * [1, 1, 1, *[math.sqrt(2)] * 3]
        return np.concatenate([rows[:n_atoms].ravel(), strain]) * self.free

    def _rows(self, flat: Array, cell_scale: float) -> Array:
        n_atoms = self.geometry.n_atoms
        flat = flat * self.free
        if not self.geometry.cell_factor:
            return flat.reshape(-1, 3)
        strain = (flat[3 * n_atoms :] * [1, 1, 1, *[math.sqrt(0.5)] * 3])[[0, 5, 4, 5, 1, 3, 4, 3, 2]]
        return np.concatenate([flat[: 3 * n_atoms].reshape(-1, 3), cell_scale * strain.reshape(3, 3)])

    @abstractmethod
    def _product(self, flat: Array) -> Array: ...

    @abstractmethod
    def _solution(self, flat: Array, shift: float) -> Array | None:
        """None: the weights are no numbers."""


class DenseHessian(_InStrains):
    """A learned stiffness as a matrix."""

    def __init__(self, geometry: Geometry, free: Array, matrix: Array) -> None:
        super().__init__(geometry, free)
        self.matrix = matrix
        self._factors: dict[float, Array | None] = {}

    def _product(self, flat: Array) -> Array:
        return self.matrix @ flat

    def _solution(self, flat: Array, shift: float) -> Array | None:
        if shift not in self._factors:
            stiffened = self.matrix.copy()
            atoms = np.arange(3 * self.geometry.n_atoms)
            stiffened[atoms, atoms] += shift
            factor, failed = FACTOR(stiffened.T, overwrite_a=True)
            self._factors[shift] = None if failed else factor
        factor = self._factors[shift]
        return None if factor is None else SOLVE(factor, flat)[0]


class SparseHessian(_InStrains):
    """The same for a structure too large for a matrix: conjugate gradients solve."""

    def __init__(self, geometry: Geometry, free: Array, stiffness: Stiffness) -> None:
        super().__init__(geometry, free)
        self.stiffness = stiffness
        self._inverses: dict[float, Inverse] = {}  # by extra floor

    @cached_property
    def _apply(self) -> Inverse:
        return sparse_product(self.stiffness, coarse=True)

    def _product(self, flat: Array) -> Array:
        return self._numbers(self._apply(self._unknowns(flat)))

    def _solution(self, flat: Array, shift: float) -> Array | None:
        try:
            if shift not in self._inverses:
                floored = replace(self.stiffness, floors=self.stiffness.floors + shift)
                apply = self._apply if shift == 0 else sparse_product(floored, coarse=True)
                self._inverses[shift] = gradients_of(floored, apply, COARSE_TOLERANCE)
            return self._numbers(self._inverses[shift](self._unknowns(flat)))
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return None

    def _unknowns(self, flat: Array) -> Unknowns:
        n = 3 * self.geometry.n_atoms
        cell = flat[n:] if self.geometry.cell_factor else np.zeros(6)
        return Unknowns(torch.from_numpy(flat[:n].reshape(-1, 3)), torch.from_numpy(cell)[None])

    def _numbers(self, answer: Unknowns) -> Array:
        parts = [answer.atoms.numpy().ravel(), *([answer.cells.numpy()[0]] if self.geometry.cell_factor else [])]
        return np.concatenate(parts)


def _free_strains(geometry: Geometry) -> Tensor:
    """Components of the strain that the filter leaves free, (1, 6) bool."""
    if not geometry.cell_factor:
        return torch.zeros((1, 6), dtype=torch.bool)
    mask = torch.from_numpy(geometry.free[geometry.n_atoms :].astype(np.float64))[None]
    return strain_vectors(mask * mask.mT) > 0


class DirectMoves(_Source):
    """A policy whose moves are the steps. It may see how the relaxer came to a point."""

    def __init__(self, policy: Policy, elements: Collection[int] | None = None, trust: float = TRUST) -> None:
        """`trust`: the trust radius that states had in training, Å."""
        self.policy = policy
        self.elements = None if elements is None else frozenset(elements)
        self.trust = trust

    def at(self, bases: Sequence[Base], structures: Structures) -> list[Hessian]:
        with torch.no_grad():
            move = self.policy(self._states(bases, structures))
        displacements = np.split(move.displacements.double().numpy(), structures.counts.cumsum(0)[:-1].tolist())
        strains = move.strains.double().numpy()
        result = list[Hessian]()
        for one, rows, strain in zip(bases, displacements, strains, strict=True):
            geometry = one.geometry
            step = np.concatenate([rows, geometry.cell_factor * strain]) if geometry.cell_factor else rows
            assert one.springs is not None  # drawn before policies are asked
            result.append(DirectMove(one.point.forces, np.asarray(step * geometry.free), one.springs))
        return result

    def _states(self, bases: Sequence[Base], structures: Structures) -> State:
        state = states_at([one.point for one in bases], structures)
        moves, forces = zip(*(_history(one) for one in bases), strict=True)
        return replace(
            state,
            last_move=Move.concatenate(moves),
            last_forces=torch.from_numpy(np.concatenate(forces)),
            trust_radii=torch.full((len(bases),), self.trust, dtype=torch.float64),
            calls=torch.tensor([one.past.calls for one in bases]),
        )


def _history(base: Base) -> tuple[Move, Array]:
    """The last move, and the forces before it; at the start none, and the forces of now."""
    geometry = base.geometry
    past = base.past
    n_atoms = base.geometry.n_atoms
    step = np.zeros_like(base.point.coordinates)
    forces = base.point.forces
    if past.coordinates is not None and past.forces is not None and past.coordinates.shape == step.shape:
        step = base.point.coordinates - past.coordinates
        forces = past.forces
    strain = step[n_atoms:] / geometry.cell_factor if geometry.cell_factor else np.zeros((3, 3))
    return Move(torch.from_numpy(step[:n_atoms]), torch.from_numpy((strain + strain.T) / 2)[None]), forces[:n_atoms]


class DirectMove:
    """Answers the forces of its point with the policy's move, everything else as springs do."""

    has_curvature = False

    def __init__(self, forces: Array, step: Array, springs: SpringHessian) -> None:
        self.forces = forces
        self.step = step
        self.springs = springs

    def apply(self, step: Array) -> Array:
        return self.springs.apply(step)

    def solve(self, forces: Array, shift: float = 0.0) -> Array:
        """The floor has no meaning for a move that comes from no stiffness; the rule's scale has."""
        del shift
        return self.step if forces is self.forces else self.springs.solve(forces)


def states_at(points: Sequence[Point], structures: Structures | None = None) -> State:
    """Points as networks see them, without a past. Stresses are those that the filter's forces on the cell amount to.

    `structures`: those of the points, where somebody has made them already.
    """
    geometries = [point.geometry for point in points]
    known = [geometry for geometry in geometries if geometry is not None]
    assert len(known) == len(points), "a point without geometry is no structure"
    structures = structures_of(known) if structures is None else structures
    stresses = torch.zeros((len(points), 3, 3), dtype=torch.float64)
    for number, (point, geometry) in enumerate(zip(points, known, strict=True)):
        if factor := geometry.cell_factor:
            pulls = -point.forces[geometry.n_atoms :] * factor / max(geometry.volume, 1e-12)
            stresses[number] = torch.from_numpy(pulls)
    rows = [point.forces[: geometry.n_atoms] for point, geometry in zip(points, known, strict=True)]
    forces = torch.from_numpy(np.concatenate(rows))
    energies = torch.tensor([point.energy for point in points], dtype=torch.float64)
    return State.without_past(structures, Evaluation(energies, forces, stresses), TRUST)
