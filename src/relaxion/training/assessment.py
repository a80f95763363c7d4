"""How good is the policy? Fixed starts, no noise, environments of its own: training never notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.experience.vector_environment import Task, VectorEnvironments
from relaxion.training.seeds import named_generator

STARTS_SEED = 20  # of all assessments, whatever the run's seed: every agent meets the same starts


@dataclass(frozen=True)
class Assessed:
    """Undiscounted returns and lengths of the episodes."""

    returns: Tensor  # (n_starts,) float64
    lengths: Tensor  # (n_starts,)

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def worst(self) -> float:
        return float(self.returns.min())

    def metrics(self) -> dict[str, float]:
        """Under the names of Stable-Baselines3, and the worst of all."""
        lengths = float(self.lengths.to(torch.float64).mean())
        return {"eval/mean_reward": self.mean, "eval/worst_reward": self.worst, "eval/mean_ep_length": lengths}


class Assessor:
    """One episode from each of the fixed starts, side by side: one call of the policy serves all."""

    def __init__(self, task: Task, n_starts: int) -> None:
        self.task, self.n_starts = task, n_starts
        self._environments: VectorEnvironments | None = None  # made when first needed, then kept

    def __call__(self, act: Callable[[Tensor], Tensor]) -> Assessed:
        environments = self._from_the_start()
        returns = torch.zeros(self.n_starts, dtype=torch.float64)
        lengths = torch.zeros(self.n_starts, dtype=torch.int64)
        running = torch.ones(self.n_starts, dtype=torch.bool)
        while running.any():
            stepped = environments.step(act(environments.observations), running)
            returns += stepped.rewards
            lengths += running
            running &= ~stepped.ended
        return Assessed(returns, lengths)

    def _from_the_start(self) -> VectorEnvironments:
        generator = named_generator(STARTS_SEED, "assessment")
        if self._environments is None:
            self._environments = VectorEnvironments(self.task.make, self.n_starts, generator)
        else:
            self._environments.generator = generator
            self._environments.renew(torch.ones(self.n_starts, dtype=torch.bool))
        return self._environments

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def assess(act: Callable[[Tensor], Tensor], task: Task, n_starts: int) -> Assessed:
    """Once, with environments that are closed afterwards."""
    assessor = Assessor(task, n_starts)
    try:
        return assessor(act)
    finally:
        assessor.close()
