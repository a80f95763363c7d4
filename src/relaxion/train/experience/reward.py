"""What a step is worth, and the one measure of how far from relaxed a structure is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.settings import Settings
from relaxion.structures import Evaluation, Structures
from relaxion.structures.structures import per_structure_max

RewardName = Literal["force", "log_force", "step", "energy", "log_force_decrease"]


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


class RewardSettings(Settings):
    """Which rewards, how much of each, and what back-off costs."""

    weights: dict[RewardName, float] = Field(default={"log_force_decrease": 1.0}, min_length=1)
    """Weight of each reward in the sum. The decrease of log force is stable from any start."""

    back_off_penalty: float = Field(default=0.5, ge=0)
    """Taken off for a move wholly undone, in proportion for a part. Half a decade of force: felt, no more."""

    lowest_force_ev_per_angstrom: float = Field(default=1e-3, gt=0)
    """Forces below count as this much, so that no reward runs to infinity on the last step."""

    highest_force_ev_per_angstrom: float = Field(default=1e3, gt=0)
    """Forces above count as this much, so that a bad start does not drown all others."""

    largest_energy_change_ev_per_atom: float = Field(default=10.0, gt=0)
    """Energy changes per atom are cut here, for the same reason."""


@dataclass(frozen=True, eq=False)
class Progress:
    """One step of many structures, as rewards see it: all (n_structures,), already cut to their ranges."""

    force_before: Tensor  # eV/Å
    force_after: Tensor  # eV/Å
    energy_decrease: Tensor  # eV per atom


REWARDS: dict[RewardName, Callable[[Progress], Tensor]] = {
    "force": lambda progress: -progress.force_after,
    "log_force": lambda progress: -torch.log10(progress.force_after),
    "step": lambda progress: -torch.ones_like(progress.force_after),
    "energy": lambda progress: progress.energy_decrease,
    "log_force_decrease": lambda progress: torch.log10(progress.force_before / progress.force_after),
}


class Reward:
    """A weighted sum of rewards, minus the penalty for back-off."""

    def __init__(self, settings: RewardSettings | None = None) -> None:
        self.settings = settings or RewardSettings()

    def __call__(
        self, start: Structures, before: Evaluation, end: Structures, after: Evaluation, back_off: Tensor
    ) -> Tensor:
        """The reward of the step from `start` to `end`."""
        progress = self._progress(start, before, end, after)
        terms = [weight * REWARDS[name](progress) for name, weight in self.settings.weights.items()]
        return torch.stack(terms).sum(dim=0) - self.settings.back_off_penalty * back_off  # (n_structures,)

    def _progress(self, start: Structures, before: Evaluation, end: Structures, after: Evaluation) -> Progress:
        settings = self.settings
        lowest, highest = settings.lowest_force_ev_per_angstrom, settings.highest_force_ev_per_angstrom
        limit = settings.largest_energy_change_ev_per_atom
        decrease = (before.energies - after.energies) / start.counts
        return Progress(
            force_before=largest_force(start, before).clamp(lowest, highest),
            force_after=largest_force(end, after).clamp(lowest, highest),
            energy_decrease=decrease.clamp(-limit, limit),
        )
