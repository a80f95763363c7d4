"""Fixed starts, worked by hand where the answer is known."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from relaxion.errors import AssessmentStopped, RelaxionWarning, RunError
from relaxion.train.experience.vectors import task
from relaxion.train.tasks.control import ReturnsAssessor, assess

PENDULUM = task("Pendulum-v1")


def hang(observations: Tensor) -> Tensor:
    return torch.zeros(len(observations), 1)


def test_the_starts_never_change() -> None:
    assessor = ReturnsAssessor(PENDULUM, 3)
    first, again = assessor(hang), assessor(hang)
    assert torch.equal(first.returns, again.returns)
    assert torch.equal(first.returns, assess(hang, PENDULUM, 3).returns)
    assert torch.equal(first.returns[:2], assess(hang, PENDULUM, 2).returns)
    assert len(first.returns.unique()) == 3
    assessor.close()


def test_mean_worst_and_lengths() -> None:
    assessed = assess(hang, PENDULUM, 3)
    assert assessed.worst == float(assessed.returns.min())
    assert assessed.scalars() == {
        "eval/mean_reward": pytest.approx(float(assessed.returns.mean())),
        "eval/worst_reward": assessed.worst,
        "eval/mean_ep_length": 200.0,
    }


class Endless(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return np.zeros(1, np.float32), {}

    def step(self, _action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_an_episode_without_end_is_cut_with_one_warning() -> None:
    assessor = ReturnsAssessor(task("endless", Endless), 2, max_steps=7)
    with pytest.warns(RelaxionWarning, match=r"endless did not end by itself: 2 of 2 .*after 7 steps") as told:
        first, again = assessor(hang), assessor(hang)
    assert len(told) == 1
    assert first.returns.tolist() == again.returns.tolist() == [7.0, 7.0]
    assert assess(hang, PENDULUM, 1, max_steps=200).lengths.tolist() == [200]  # at its own end, nothing is cut


def test_stopped_when_asked() -> None:
    with pytest.raises(AssessmentStopped):
        ReturnsAssessor(PENDULUM, 1)(hang, lambda: True)


def test_a_policy_that_is_not_finite_has_diverged() -> None:
    with pytest.raises(RunError, match=r"policy's action in step 0 .* diverged: lower its learning rates"):
        assess(lambda observations: hang(observations) / 0, PENDULUM, 2)
