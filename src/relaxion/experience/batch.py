"""What an agent learns from in one update: transitions drawn from replay, whatever their states are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Sampled transitions, observations already normalised.

    Observations and actions are opaque here and in the agents: tensors for control tasks, states and moves for atoms.
    `discounts` is γⁿ, and 0 only where the episode truly ended; a time limit bootstraps.
    """

    observations: Any
    actions: Any
    rewards: Tensor  # (batch,), n-step sums where n > 1
    discounts: Tensor  # (batch,)
    next_observations: Any
    sources: Tensor | None = None  # (batch,) int64, `Source`: who proposed the actions; None where nobody asks
