"""A toy every agent must solve: two atoms on a spring, brought to rest by moving them along the bond."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit
from torch import Tensor

from relaxion.train import D4PG, DDPG, SAC, TD3
from relaxion.train.experience.vectors import task
from relaxion.train.runs.loop import VectorLearner
from relaxion.train.tasks.control import assess

STIFFNESS, REST = 2.0, 2.5  # eV/Å², Å


class SpringPair(gymnasium.Env[Any, Any]):
    """Observes bond length and force; the action lengthens the bond; each step costs the energy that is left.

    Bounds are lopsided on purpose: an agent that forgets the centre or the range of its actions cannot solve it.
    """

    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Box(-0.2, 0.6, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.length = REST + self.np_random.uniform(-1.0, 0.4)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.length = float(np.clip(self.length + action[0], REST - 1, REST + 1))
        stretch = self.length - REST
        return self._observation(), -0.5 * STIFFNESS * stretch**2, abs(stretch) < 0.01, False, {}

    def _observation(self) -> Any:
        return np.array([self.length, STIFFNESS * (REST - self.length)])


def make_spring_pair() -> gymnasium.Env[Any, Any]:
    return TimeLimit(SpringPair(), 8)


COMMON = {"widths": (32, 32), "batch_size": 64, "warmup_steps": 200, "replay_capacity": 5000, "discount_factor": 0.9}
RATES = {"policy_learning_rate": 2e-3, "critic_learning_rate": 2e-3}
OWN: list[tuple[type[VectorLearner], dict[str, Any]]] = [
    (DDPG, {"target_update_rate": 0.02}),
    (TD3, {"target_update_rate": 0.02}),
    (D4PG, {"target_update_rate": 0.02, "lowest_value": -7.0, "highest_value": 0.0, "n_steps": 2}),
    (SAC, {"target_update_rate": 0.02, "initial_entropy_weight": 0.1, "entropy_weight_learning_rate": 2e-3}),
]


def best_actions(observations: Tensor) -> Tensor:
    """Straight to the rest length, as far as the bounds allow."""
    return (REST - observations[:, :1]).clamp(-0.2, 0.6)


@pytest.mark.parametrize(("kind", "own"), OWN, ids=[kind.name for kind, _ in OWN])
def test_every_agent_brings_the_pair_to_rest(kind: type[VectorLearner], own: dict[str, Any]) -> None:
    best = assess(best_actions, task("spring pair", make_spring_pair), 20).mean
    agent = kind(make_spring_pair, seed=1, **COMMON, **RATES, **own)
    before = agent.assess().mean
    agent.learn(2000)
    assert before < best - 1
    assert agent.assess().mean > best - 0.03
