"""The policy that is kept: of all assessed ones the one that needed the fewest force calls from validation starts.

Learning may lose a good policy again. Validation starts are neither trained on nor used for results, so the results of
the policy that was chosen on them stay honest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relaxion.train.judge.assessment import Assessed

PART = "kept"  # names in checkpoints and files of agents
POLICY = "policy."
NUMBERS = ("step", "validation_force_calls_mean", "force_calls_mean", "force_calls_median", "success_rate")


@dataclass(frozen=True, eq=False)
class Kept:
    """Numbers and weights of one policy."""

    step: int
    validation_force_calls_mean: float  # what it was chosen by
    force_calls_mean: float  # this and the others: from the starts that results are made of
    force_calls_median: float
    success_rate: float
    weights: Mapping[str, Tensor] = field(repr=False)

    def result(self) -> dict[str, float]:
        """For result.json."""
        return {f"kept_{name}": getattr(self, name) for name in NUMBERS}


class KeptPolicy:
    """Ties go to the earlier one."""

    def __init__(self) -> None:
        self.best: Kept | None = None

    def offer(self, step: int, validated: Assessed, assessed: Assessed, weights: Mapping[str, Tensor]) -> None:
        """The policy of this step, as validation starts and the starts of the results found it."""
        calls = float(validated.force_calls.mean())
        if self.best is None or calls < self.best.validation_force_calls_mean:
            median = float(np.median(assessed.force_calls))
            copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
            mean = float(assessed.force_calls.mean())
            self.best = Kept(step, calls, mean, median, assessed.success_rate, copies)

    def beside_best(self, validated: Assessed) -> float:
        """Force calls in units of the fewest there were."""
        return 1.0 if self.best is None else float(validated.force_calls.mean()) / self.best.validation_force_calls_mean

    def scalars(self) -> dict[str, float]:
        """For the line of an assessment."""
        if self.best is None:
            return {}
        return {
            "eval/kept_step": float(self.best.step),
            "eval/kept_validation_force_calls_mean": self.best.validation_force_calls_mean,
        }

    def snapshot(self) -> dict[str, Tensor]:
        if self.best is None:
            return {}
        numbers = torch.tensor([float(getattr(self.best, name)) for name in NUMBERS], dtype=torch.float64)
        return {"numbers": numbers} | {f"{POLICY}{name}": tensor for name, tensor in self.best.weights.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is kept in checkpoints of releases that kept nothing."""
        self.best = None
        if tensors:
            step, *others = tensors["numbers"].tolist()
            self.best = Kept(int(step), *others, weights=policy_weights(tensors))


def policy_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what was kept, or of a whole agent."""
    return {name.removeprefix(POLICY): tensor for name, tensor in tensors.items() if name.startswith(POLICY)}
