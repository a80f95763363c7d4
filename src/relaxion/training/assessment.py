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


def assess(act: Callable[[Tensor], Tensor], task: Task, n_starts: int) -> Assessed:
    """One episode from each of the fixed starts, side by side: one call of the policy serves all."""
    environments = VectorEnvironments(task.make, n_starts, named_generator(STARTS_SEED, "assessment"))
    try:
        return _episodes(act, environments, n_starts)
    finally:
        environments.close()


def _episodes(act: Callable[[Tensor], Tensor], environments: VectorEnvironments, n_starts: int) -> Assessed:
    returns = torch.zeros(n_starts, dtype=torch.float64)
    lengths = torch.zeros(n_starts, dtype=torch.int64)
    running = torch.ones(n_starts, dtype=torch.bool)
    while running.any():
        stepped = environments.step(act(environments.observations), running)
        returns += torch.where(running, stepped.rewards, 0.0)
        lengths += running
        running &= ~stepped.ended
    return Assessed(returns, lengths)
