"""Fixed starts, worked by hand where the answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relaxion.experience.vector_environment import task
from relaxion.training.assessment import Assessor, assess

PENDULUM = task("Pendulum-v1")


def hang(observations: Tensor) -> Tensor:
    return torch.zeros(len(observations), 1)


def test_the_starts_never_change() -> None:
    assessor = Assessor(PENDULUM, 3)
    first, again = assessor(hang), assessor(hang)
    assert torch.equal(first.returns, again.returns)
    assert torch.equal(first.returns, assess(hang, PENDULUM, 3).returns)
    assert torch.equal(first.returns[:2], assess(hang, PENDULUM, 2).returns)
    assert len(first.returns.unique()) == 3
    assessor.close()


def test_mean_worst_and_lengths() -> None:
    assessed = assess(hang, PENDULUM, 3)
    assert assessed.worst == float(assessed.returns.min())
    assert assessed.metrics() == {
        "eval/mean_reward": pytest.approx(float(assessed.returns.mean())),
        "eval/worst_reward": assessed.worst,
        "eval/mean_ep_length": 200.0,
    }
