"""Does the critic know how far to go? The policy's move times a half, one and two, really made from the same states.

Across states short moves may go with high rewards while from each state a longer one is better, and a critic that has
learned the first drives the policy the wrong way (docs/results/learning.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from relaxion.structures import Outcome, State
from relaxion.train.diagnostics.diagnosis import critic_values
from relaxion.train.experience.environment import Environment

FACTORS = {"half": 0.5, "own": 1.0, "double": 2.0}


@torch.no_grad()
def lengths(agent: Any, environment: Environment, state: State) -> dict[str, float]:
    """What the critic says of each length, `value_of_…`, and what one step of it brought, `worth_of_…`.

    The latter is the reward and, discounted, the critic's value of going on. `…_error` is the standard error of the
    worth beside that of the own length. A force call per structure and length, which training does not count.
    """
    values, worths, usable = dict[str, Tensor](), dict[str, Tensor](), torch.ones(state.n_structures, dtype=torch.bool)
    own = agent.act(state).to(state.structures.dtype)
    for name, factor in FACTORS.items():
        move = own.scaled(torch.full((state.n_structures,), factor, dtype=torch.float64), state.structures)
        transition = environment.step(state, move)
        after = transition.next_state
        expected, later = critic_values(agent, state, move), critic_values(agent, after, agent.act(after))
        if expected is None or later is None:
            return {}
        values[name], worths[name] = expected, transition.reward + transition.discount * later
        usable &= transition.outcome != Outcome.NON_FINITE
    found = {f"value_of_{name}_move": value[usable].mean() for name, value in values.items()}
    found |= {f"worth_of_{name}_move": worth[usable].mean() for name, worth in worths.items()}
    for name in ("half", "double"):
        differences = (worths[name] - worths["own"])[usable]
        found[f"{name}_move_error"] = differences.std() / math.sqrt(max(len(differences), 1))
    return {name: float(number) for name, number in found.items()}
