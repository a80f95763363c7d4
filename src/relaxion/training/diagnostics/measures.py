"""What is measured: pure functions of states, moves and the agent's own networks. No generator, no force call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from relaxion.errors import StructureError
from relaxion.networks.roles import CategoricalCritic, Critics
from relaxion.structures import Move, State, Structures
from relaxion.structures.graph import Pairs

PAIR_SEARCH_ANGSTROM = 4.0  # beyond any bond; a structure without a nearer pair counts as this much


def closest_pairs(structures: Structures) -> Tensor:
    """Distance of the nearest two atoms, own images included, (n_structures,) Å; at most the search's reach."""
    closest = torch.full((structures.n_structures,), PAIR_SEARCH_ANGSTROM, dtype=torch.float64)
    try:
        pairs = Pairs.of(structures, PAIR_SEARCH_ANGSTROM)
    except StructureError:
        return closest  # an atom has flown away: the potential's business, not a reason to end a run here
    owners = structures.structure_index[pairs.ends[0]]
    return closest.scatter_reduce(0, owners, pairs.vectors.norm(dim=1), "amin")


@torch.no_grad()
def critic_values(agent: Any, state: State, move: Move) -> Tensor | None:
    """What the critic expects of these moves, (n_structures,): the smallest of several, the mean of a distribution."""
    critic = getattr(agent, "critics", getattr(agent, "critic", None))
    if isinstance(critic, CategoricalCritic):
        return (softmax(critic(state, move), dim=1) @ agent.support).double()
    if isinstance(critic, Critics):
        return critic(state, move).amin(dim=1).double()
    return None


@torch.no_grad()
def gate_factors(agent: Any, state: State) -> Tensor:
    """The gate's factor of each structure, exactly 1 where there is no gate (R6.4), (n_structures,)."""
    factors = getattr(getattr(agent, "policy", None), "gate_factors", None)
    return torch.ones(state.n_structures, dtype=torch.float64) if factors is None else factors(state).double()


def lowest_gate_factor(agent: Any) -> float | None:
    """How far the gate can close; None where there is none."""
    policy: Any = getattr(agent, "policy", None)
    return None if getattr(policy, "gate", None) is None else 1 / float(policy.settings.largest_gate_factor)
