"""A relaxation that ends although the metric is wrong: where the last step met more stiffness than expected, step less.

A metric that is too soft along some mode jumps to and fro over the minimum for ever, and relaxations that never end
teach nothing, least of all that. So lessons are gathered with the move shortened by (s·Bs) / (s·y), s the last move
and y the drop of the forces on it, wherever that is below 1: a pure function of the state, as the policy is.
"""

from __future__ import annotations

import torch

from relaxion.networks.metric import Frame
from relaxion.networks.metric_policies import MetricPolicy
from relaxion.networks.metric_solve import solve
from relaxion.networks.metric_stiffness import Unknowns
from relaxion.networks.strains import strain_matrices, strain_vectors
from relaxion.structures import Move, State

SMALLEST_FACTOR = 0.1
SMALLEST_CURVATURE = 1e-9  # eV: of a last move that is none


@torch.no_grad()
def damped_move(policy: MetricPolicy, state: State) -> Move:
    """B⁻¹F within the policy's bounds, shortened where B was too soft along the last move."""
    structures = state.structures
    frame = Frame.of(state, policy.settings, policy.network.dtype)
    stiffness = policy.network.stiffness(frame)
    answer = solve(stiffness, frame.pulls)
    last = Unknowns(state.last_move.displacements.double(), strain_vectors(state.last_move.strains).double())
    # the stress before the last move is no part of a state: what a free cell met is left out on both sides
    last = Unknowns(last.atoms, torch.zeros_like(last.cells))
    drop = Unknowns(state.last_forces.double() * structures.movable[:, None] - frame.pulls.atoms, last.cells)
    met = last.dot(drop, structures)
    expected = last.dot(stiffness.to(torch.float64).apply(last), structures)
    factors = torch.where(met > expected, expected / met.clamp_min(SMALLEST_CURVATURE), torch.ones_like(met))
    factors = torch.where(structures.cell_free, torch.ones_like(factors), factors).clamp_min(SMALLEST_FACTOR)
    move = Move(answer.atoms, strain_matrices(answer.cells)).allowed(structures)
    bounded = move.bounded(structures, float(policy.bounds[0]), float(policy.bounds[1]))
    return bounded.scaled(factors.to(bounded.displacements.dtype), structures)
