"""What a step is worth, and the one measure of how far from relaxed a structure is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.model.solve import solve
from relaxion.model.stiffness_network import SolveInputs, StiffnessSettings
from relaxion.settings import by_name, nearest
from relaxion.structures import Evaluation, State, Structures
from relaxion.structures.structures import per_structure_max

LOWEST_FORCE = 1e-3  # eV/Å: forces below count as this much, so that no reward runs to infinity on the last step
HIGHEST_FORCE = 1e3  # eV/Å: forces above count as this much, so that a bad start does not drown all others
LARGEST_ENERGY_CHANGE = 10.0  # eV per atom: larger changes count as this much, for the same reason
SMALLEST_GAP = 1e-6  # eV per atom above the minimum: smaller gaps count as this much, so for the last step again
LARGEST_GAP_RATIO = 30.0  # of the gaps before and after a step


def largest_force(structures: Structures, evaluation: Evaluation) -> Tensor:
    """Largest force on a movable atom; where the cell is free, also on the cell.

    The force on a cell is a row of -V·stress / n_atoms, as ASE's FrechetCellFilter shows it at zero strain,
    so that convergence means here what it means there.
    """
    lengths = evaluation.forces.norm(dim=1) * structures.movable
    largest = per_structure_max(lengths, structures.structure_index, structures.n_structures)
    if not structures.cell_free.any():
        return largest  # (n_structures,) eV/Å
    if evaluation.stresses is None:
        raise SettingsError("a cell is free but the evaluation holds no stress; evaluate with stresses=True")
    per_atom = structures.volumes / structures.counts
    cell_forces = evaluation.stresses.norm(dim=2).amax(dim=1) * per_atom
    return torch.where(structures.cell_free, torch.maximum(largest, cell_forces), largest)


@dataclass(frozen=True, eq=False)
class StepProgress:
    """One step of many structures, as rewards see it: all (n_structures,), already cut to their ranges."""

    force_before: Tensor  # eV/Å
    force_after: Tensor  # eV/Å
    energy_decrease: Tensor  # eV per atom
    end: Structures
    after: Evaluation

    @cached_property
    def log_gap_decrease(self) -> Tensor:
        """Decades that the energy came nearer to the minimum.

        How far above it the end still is, springs B guess: ½ F·B⁻¹F. The start was higher by what the step brought.
        """
        inputs = SolveInputs.of(State.without_past(self.end, self.after, 0.0), StiffnessSettings(), torch.float64)
        gap = inputs.pulls.dot(solve(inputs.prior(), inputs.pulls), self.end) / (2 * self.end.counts)
        gap = gap.clamp_min(SMALLEST_GAP)  # (n_structures,) eV per atom
        return torch.log10((1 + self.energy_decrease / gap).clamp(1 / LARGEST_GAP_RATIO, LARGEST_GAP_RATIO))


REWARDS: dict[str, Callable[[StepProgress], Tensor]] = {
    "force": lambda progress: -progress.force_after,
    "log_force": lambda progress: -torch.log10(progress.force_after),
    "step": lambda progress: -torch.ones_like(progress.force_after),
    "energy": lambda progress: progress.energy_decrease,
    "log_force_decrease": lambda progress: torch.log10(progress.force_before / progress.force_after),
    "log_gap_decrease": lambda progress: progress.log_gap_decrease,
}


def reward_named(name: str) -> Callable[[StepProgress], Tensor]:
    """One of ours, or `module:function` of the user."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise SettingsError(f"unknown reward '{name}': {nearest(name, REWARDS)}, or module:function for your own")
    found = by_name(name, "reward")
    if not callable(found):
        raise SettingsError(f"the reward '{name}' is a {type(found).__name__}; give a function of a StepProgress")
    return cast(Callable[[StepProgress], Tensor], found)


class Reward:
    """A weighted sum of rewards, minus the penalty for back-off."""

    def __init__(self, weights: Mapping[str, float] | None = None, back_off_penalty: float = 0.5) -> None:
        """Rewards and what back-off costs.

        weights: of each reward in the sum; None: the decrease of the log force, which is stable from any start.
        back_off_penalty: taken off for a move wholly undone, in proportion for a part. Half a decade of force.
        """
        self.weights = dict(weights or {"log_force_decrease": 1.0})
        self.back_off_penalty = back_off_penalty
        self.terms = [(weight, reward_named(name)) for name, weight in self.weights.items()]

    def __call__(
        self, start: Structures, before: Evaluation, end: Structures, after: Evaluation, back_off: Tensor
    ) -> Tensor:
        """The reward of the step from `start` to `end`."""
        decrease = (before.energies - after.energies) / start.counts
        progress = StepProgress(
            force_before=largest_force(start, before).clamp(LOWEST_FORCE, HIGHEST_FORCE),
            force_after=largest_force(end, after).clamp(LOWEST_FORCE, HIGHEST_FORCE),
            energy_decrease=decrease.clamp(-LARGEST_ENERGY_CHANGE, LARGEST_ENERGY_CHANGE),
            end=end,
            after=after,
        )
        terms = [weight * term(progress) for weight, term in self.terms]
        return torch.stack(terms).sum(dim=0) - self.back_off_penalty * back_off  # (n_structures,)
