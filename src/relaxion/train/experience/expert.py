"""The expert: a classical optimizer that proposes single steps, each from nothing but the state it is asked about.

It is pure, as the environment is: the one secant it needs (last move, change of forces) is part of the state. So an
expert transition joins the very states it came from, also where the step before was the policy's own (R8.2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import Base, Models, Secant, hessians_at
from relaxion.optimizer.point import Array, Geometry, Point, cell_factor_of
from relaxion.optimizer.step import Stepper
from relaxion.optimizer.trust_region import TrustRegionSettings
from relaxion.structures import Move, State
from relaxion.train.experience.environment import Source

LONGEST_STEP = 0.3  # Å; no atom goes farther in one step: the relaxer's first trust radius


class Expert:
    """`expert(state)` answers with one step for every structure."""

    def __init__(self) -> None:
        trust = TrustRegionSettings(first=LONGEST_STEP, largest=LONGEST_STEP)
        self._method = ClassicalSettings(trust)

    def __call__(self, state: State) -> Move:
        """Single steps (never a jump to the minimum), zero for atoms that may not move."""
        displacements, strains = [], []
        ends = state.structures.counts.cumsum(0).tolist()
        for number, end in enumerate(ends):
            rows = slice(end - int(state.structures.counts[number]), end)
            step = self._step(state, number, rows)
            n_atoms = rows.stop - rows.start
            displacements.append(step[:n_atoms])
            strain = step[n_atoms:] / cell_factor_of(state.structures.atomic_numbers[rows].numpy())
            strains.append((strain + strain.T) / 2 if len(strain) else np.zeros((3, 3)))
        move = Move(torch.from_numpy(np.concatenate(displacements)), torch.from_numpy(np.stack(strains)))
        return move.to(state.structures.dtype).allowed(state.structures)

    def _step(self, state: State, number: int, rows: slice) -> Array:
        """One step in the coordinates of the optimizer: atoms, then a factor × strain where the cell is free."""
        stepper = Stepper(self._method)
        geometry = _geometry(state, number, rows)
        forces = _numpy(state.evaluation.forces[rows]) * geometry.free[: geometry.n_atoms]
        if not geometry.cell_factor:
            stepper.secants.recent = _secants(state, rows, forces)
        else:
            # the stress before the last move is not part of a state, so a free cell has no whole secant
            assert state.evaluation.stresses is not None
            pull = -geometry.volume * _numpy(state.evaluation.stresses[number]) / geometry.cell_factor
            forces = np.concatenate([forces, pull])
        start = np.zeros_like(forces)
        point = Point(start, forces, float(state.evaluation.energies[number]), geometry)
        (hessians,) = hessians_at([Base(point)], [Models(self._method.springs)])
        return stepper.step_from(point, hessians).step


def _geometry(state: State, number: int, rows: slice) -> Geometry:
    structures = state.structures
    movable = np.repeat(_numpy(structures.movable[rows])[:, None], 3, axis=1).astype(bool)
    is_free, numbers = bool(structures.cell_free[number]), structures.atomic_numbers[rows].numpy()
    free = np.concatenate([movable, np.ones((3, 3), dtype=bool)]) if is_free else movable
    return Geometry(
        positions=_numpy(structures.positions[rows]),
        cell=_numpy(structures.cells[number]),
        periodic=structures.periodic[number].numpy(),
        numbers=numbers,
        free=free,
        cell_factor=cell_factor_of(numbers) if is_free else 0.0,
        ase_cell_factor=float(len(movable)) if is_free else 0.0,
    )


def _secants(state: State, rows: slice, forces: Array) -> list[Secant]:
    """The secant of the last move, if there was one and it met positive curvature."""
    step = _numpy(state.last_move.displacements[rows])
    drop = (_numpy(state.last_forces[rows]) - forces) * _numpy(state.structures.movable[rows])[:, None]
    secant = Secant(step, drop)
    return [secant] if secant.curvature > 1e-5 * float(np.vdot(step, step)) else []


def _numpy(values: Tensor) -> Array:
    return values.detach().to(torch.float64).numpy()


def guided(
    state: State, own: Move, who: Source, expert: Callable[[State], Move], share: float, generator: Generator
) -> tuple[Move, Tensor]:
    """Each structure moves as the expert says with probability `share`, else as `own` says; and who it was (R8.3).

    The expert is asked only about the structures it is to move: it looks at one after the other.
    """
    by_expert = torch.rand(state.n_structures, generator=generator) < share
    sources = torch.where(by_expert, int(Source.EXPERT), int(who))
    if not bool(by_expert.any()):
        return own, sources
    demonstrated = expert(state.select(by_expert))
    displacements, strains = own.displacements.clone(), own.strains.clone()
    displacements[by_expert[state.structures.structure_index]] = demonstrated.displacements.to(displacements.dtype)
    strains[by_expert] = demonstrated.strains.to(strains.dtype)
    return Move(displacements, strains), sources
