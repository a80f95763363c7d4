"""Extra terms of the policy's loss on atoms: what the corrector would undo, and distance to the expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from relaxion.experience.batch import Batch
from relaxion.experience.environment import EnvironmentSettings
from relaxion.experience.expert import imitation_distance
from relaxion.experience.transition import Source
from relaxion.potentials.corrector import correct
from relaxion.structures import Move, State

Anchor: TypeAlias = Callable[[], Tensor]
"""What draws a policy back to its lessons, whatever the batch is: () -> (), differentiable."""

LENGTH_FLOOR = 1e-3  # Å: shorter demonstrations count as this long, so that none is worth more than others


class PolicyPenalties:
    """λ‖π(s) - executed‖² (R7.3) plus the fading imitation loss (R8.3), from geometry alone: no potential (R1.4)."""

    def __init__(self, deviation_weight: float, settings: EnvironmentSettings) -> None:
        self.deviation_weight, self.settings = deviation_weight, settings
        self.imitation_weight = 0.0  # set by its schedule before every round of updates
        self.anchor: Anchor | None = None
        self.anchor_weight = 0.0  # likewise

    def __call__(self, batch: Batch, actions: Move) -> Tensor:
        """(batch,)"""
        total = batch.rewards.new_zeros(len(batch.rewards))
        if self.deviation_weight > 0:
            total = total + self.deviation_weight * deviation(batch.observations, actions, self.settings)
        if self.imitation_weight > 0:
            total = total + self.imitation_weight * imitation(batch, actions)
        if self.anchor is not None and self.anchor_weight > 0:
            total = total + self.anchor_weight * self.anchor().to(total.dtype)
        return total


def deviation(state: State, proposed: Move, settings: EnvironmentSettings) -> Tensor:
    """Mean squared distance between the proposed move and what bounds and corrector leave of it, (n_structures,).

    The executed move stands still: its gradient would say how the wall moves, not where it is.
    """
    asked = proposed.to(state.structures.dtype)
    with torch.no_grad():
        bounded = asked.bounded(state.structures, settings.max_displacement_angstrom, settings.max_strain)
        executed = correct(state.structures, bounded, settings.minimum_distance_angstrom).executed
    return imitation_distance(state, asked, executed)


def imitation(batch: Batch, actions: Move) -> Tensor:
    """Squared distance to what the expert did, relative to the length of that; 0 where it was not the expert."""
    if batch.sources is None:
        return torch.zeros_like(batch.rewards)
    state: State = batch.observations
    demonstrated: Move = batch.actions
    distance = imitation_distance(state, actions, demonstrated)
    nothing = Move(torch.zeros_like(demonstrated.displacements), torch.zeros_like(demonstrated.strains))
    length = imitation_distance(state, nothing, demonstrated) + LENGTH_FLOOR**2
    return distance / length * (batch.sources == Source.EXPERT)
