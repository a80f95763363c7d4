"""What is learned from: one step of many structures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from relaxion.structures import Move, Outcome, State


class Source(IntEnum):
    """Who proposed a move."""

    POLICY = 0
    RANDOM = 1
    EXPERT = 2


@dataclass(frozen=True, eq=False)
class Transition:
    """State, move and what came of it. `discount` is γ, and 0 only where the relaxation converged."""

    state: State
    proposed: Move  # what was asked for
    executed: Move  # what was done, measured without wrapping
    reward: Tensor  # (n_structures,)
    discount: Tensor  # (n_structures,)
    next_state: State
    source: Tensor  # (n_structures,) int64, `Source`
    outcome: Tensor  # (n_structures,) int64, `Outcome`
    back_off: Tensor  # (n_structures,) 0 free … 1 blocked

    @property
    def n_structures(self) -> int:
        return self.state.n_structures

    @property
    def finished(self) -> Tensor:
        """Which relaxations are over, for whatever reason."""
        return self.outcome != Outcome.RUNNING  # (n_structures,) bool

    def select(self, which: Tensor) -> Self:
        """The transitions numbered or masked by `which`, in that order."""
        which = which.nonzero().flatten() if which.dtype == torch.bool else which
        counts = self.state.structures.counts
        return replace(
            self,
            state=self.state.select(which),
            proposed=self.proposed.select(counts, which),
            executed=self.executed.select(counts, which),
            reward=self.reward[which],
            discount=self.discount[which],
            next_state=self.next_state.select(which),
            source=self.source[which],
            outcome=self.outcome[which],
            back_off=self.back_off[which],
        )
