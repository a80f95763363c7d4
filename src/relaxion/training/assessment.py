"""How good is the policy? Fixed starts, no noise, environments of its own: training never notices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.errors import RelaxionWarning, RunError
from relaxion.experience.vector_environment import Task, VectorEnvironments
from relaxion.training.assessment_record import ReturnsRecord
from relaxion.training.seeds import named_generator

STARTS_SEED = 20  # of all assessments, whatever the run's seed: every agent meets the same starts
MAX_STEPS = 10_000  # per episode, unless told otherwise
DIVERGED = "the agent has diverged: lower its learning rates or the scale of the rewards and begin a new run"


class AssessmentStopped(Exception):
    """Somebody asked it to stop before it was done."""


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

    @property
    def record(self) -> ReturnsRecord:
        return ReturnsRecord(self.returns.tolist(), self.lengths.tolist())

    def metrics(self) -> dict[str, float]:
        """Under the names of Stable-Baselines3, and the worst of all."""
        lengths = float(self.lengths.to(torch.float64).mean())
        return {"eval/mean_reward": self.mean, "eval/worst_reward": self.worst, "eval/mean_ep_length": lengths}


class Assessor:
    """One episode from each of the fixed starts, side by side: one call of the policy serves all."""

    def __init__(self, task: Task, n_starts: int, max_steps: int = MAX_STEPS) -> None:
        self.task, self.n_starts, self.max_steps = task, n_starts, max_steps
        self._warned = False
        self._environments: VectorEnvironments | None = None  # made when first needed, then kept

    def __call__(self, act: Callable[[Tensor], Tensor], stop: Callable[[], bool] | None = None) -> Assessed:
        """Episodes are cut after `max_steps`; `stop` is asked before every step."""
        environments = self._from_the_start()
        returns = torch.zeros(self.n_starts, dtype=torch.float64)
        lengths = torch.zeros(self.n_starts, dtype=torch.int64)
        running = torch.ones(self.n_starts, dtype=torch.bool)
        while running.any():
            if stop is not None and stop():
                raise AssessmentStopped
            if (step := int(lengths.max())) == self.max_steps:
                self._warn_of_cut(int(running.sum()))
                break
            _check_finite("the environment's observation", environments.observations, step)
            actions = act(environments.observations)
            _check_finite("the policy's action", actions, step, DIVERGED)
            stepped = environments.step(actions, running)
            _check_finite("the environment's reward", stepped.rewards, step)
            returns += stepped.rewards
            lengths += running
            running &= ~stepped.ended
        return Assessed(returns, lengths)

    def _warn_of_cut(self, n_cut: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.task.name} did not end by itself: {n_cut} of {self.n_starts} episodes of an assessment were cut "
            f"after assessment_max_steps = {self.max_steps}, and their returns count up to there",
            RelaxionWarning,
            stacklevel=3,
        )

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


def _check_finite(what: str, numbers: Tensor, step: int, advice: str = "look into the environment") -> None:
    if not torch.isfinite(numbers).all():
        raise RunError(f"{what} in step {step} of an assessment is not finite; {advice}")


def assess(act: Callable[[Tensor], Tensor], task: Task, n_starts: int, max_steps: int = MAX_STEPS) -> Assessed:
    """Once, with environments that are closed afterwards."""
    assessor = Assessor(task, n_starts, max_steps)
    try:
        return assessor(act)
    finally:
        assessor.close()
