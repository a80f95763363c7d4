"""Where the last move met more stiffness than the metric says, step less: one secant, part of the state.

A metric that is too soft along some mode jumps to and fro over the minimum for ever, and far from minima the curvature
of no single place holds for a whole step. So the move is shortened by (s·Bs) / (s·y), s the last move and y the drop of
the forces on it, wherever that is below 1. One factor per structure: the direction stays, and with it the descent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relaxion.networks.metric.network import Frame
from relaxion.networks.metric.stiffness import Stiffness, Unknowns
from relaxion.structures import State

SMALLEST_FACTOR = 0.1
SMALLEST_CURVATURE = 1e-9  # eV: of a last move that is none


def damping(stiffness: Stiffness, frame: Frame) -> Tensor:
    """The factor of each structure's move, differentiable, float64; 1 at a start and for free cells. (n_structures,)

    The stress before the last move is not part of a state, so a free cell has no whole secant.
    """
    structures = frame.state.structures
    last, drop = _secant(frame.state, frame.pulls)
    met = last.dot(drop, structures)
    expected = last.dot(stiffness.to(torch.float64).apply(last), structures)
    stiffer = (met > expected) & (met > SMALLEST_CURVATURE) & ~structures.cell_free
    factors = expected / torch.where(stiffer, met, torch.ones_like(met))
    return torch.where(stiffer, factors.clamp_min(SMALLEST_FACTOR), torch.ones_like(met))


def _secant(state: State, pulls: Unknowns) -> tuple[Unknowns, Unknowns]:
    """Last move and drop of the forces on it, atoms only."""
    cells = torch.zeros_like(pulls.cells)
    before = (state.last_forces * state.structures.movable[:, None]).double()
    return Unknowns(state.last_move.displacements.double(), cells), Unknowns(before - pulls.atoms, cells)
