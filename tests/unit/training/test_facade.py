"""learn, predict, save, load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from relaxion.errors import CheckpointError, RelaxionError, RelaxionWarning, SettingsError
from relaxion.train import D4PG, DDPG, SAC, TD3
from relaxion.train.runs.loop import VectorLearner

SMALL: dict[str, Any] = {"widths": (8, 8), "batch_size": 8, "warmup_steps": 20, "replay_capacity": 100}
KINDS = (DDPG, TD3, D4PG, SAC)
OBSERVATIONS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def make_learner(kind: type[VectorLearner] = TD3, steps: int = 30, **settings: Any) -> VectorLearner:
    return kind("Pendulum-v1", seed=3, **{**SMALL, **settings}).learn(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_agent_acts_alike(kind: type[VectorLearner], tmp_path: Path) -> None:
    """The normaliser travels with the policy: without it the actions would differ."""
    agent = make_learner(kind)
    agent.save(tmp_path / "agent.safetensors")
    loaded = kind.load(tmp_path / "agent.safetensors")
    assert np.array_equal(loaded.predict(OBSERVATIONS), agent.predict(OBSERVATIONS))
    fresh = make_learner(kind, steps=0)
    assert not np.array_equal(fresh.predict(OBSERVATIONS), agent.predict(OBSERVATIONS))
    assert loaded.steps == 0
    assert loaded.learn(25).steps == 25


def test_predict_for_one_and_for_many() -> None:
    agent = make_learner(steps=0)
    many = agent.predict(OBSERVATIONS)
    assert many.shape == (5, 1)
    assert agent.predict(OBSERVATIONS[0]).shape == (1,)
    assert agent.predict(OBSERVATIONS[0]) == pytest.approx(many[0], abs=1e-6)
    with pytest.raises(SettingsError, match=r"has shape \(3,\), several have one axis more, got \(4,\)"):
        agent.predict(np.zeros(4))


def test_predict_stays_in_bounds() -> None:
    assert np.abs(make_learner(steps=0).predict(1e6 * OBSERVATIONS)).max() <= 2


class Tables(gymnasium.Env[Any, Any]):
    """Observations and actions with two axes; bounds that float32 cannot express."""

    observation_space = Box(-1, 1, (2, 2))
    action_space = Box(0.1, 0.3, (2, 3), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), 1.0, False, True, {}


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_bounds_are_those_of_the_spaces(kind: type[VectorLearner]) -> None:
    agent = kind(Tables, **SMALL).learn(30)
    several = 1e4 * np.random.default_rng(0).normal(size=(20, 2, 2))
    actions = agent.predict(several)
    assert actions.shape == (20, 2, 3)
    assert all(Tables.action_space.contains(action) for action in actions)
    assert agent.predict(several[0]) == pytest.approx(actions[0], abs=1e-6)
    assert Tables.action_space.contains(agent.predict(several[0]))
    assert agent.predict(several[:0]).shape == (0, 2, 3)
    for shape in ((4,), (2,), (), (1, 1, 2, 2)):
        with pytest.raises(SettingsError, match=r"has shape \(2, 2\)"):
            agent.predict(np.zeros(shape))


def test_an_environment_is_made_and_not_given() -> None:
    made = gymnasium.make("Pendulum-v1")
    odd: list[Any] = [made, None, 3, gymnasium.spec("Pendulum-v1")]
    for environment in odd:
        with pytest.raises(SettingsError, match=r'TD3\(lambda: gymnasium.make\("Pendulum-v1"\)\)'):
            TD3(environment)
    made.close()


def test_learning_in_pieces_is_learning_at_once() -> None:
    whole, pieces = make_learner(steps=60), make_learner(steps=25).learn(35)
    assert np.array_equal(whole.predict(OBSERVATIONS), pieces.predict(OBSERVATIONS))
    assert whole.metrics() == pieces.metrics()


def test_several_environments() -> None:
    agent = make_learner(SAC, steps=40, n_environments=4, n_steps=2)
    assert agent.steps == 40
    assert agent.metrics()["train/n_updates"] == 24  # one per step once 20 are stored, those of that round included


def test_other_kinds_and_missing_files_are_refused(tmp_path: Path) -> None:
    make_learner().save(tmp_path / "td3.safetensors")
    with pytest.raises(CheckpointError, match="of kind td3, not sac"):
        SAC.load(tmp_path / "td3.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        TD3.load(tmp_path / "nothing.safetensors")
    with pytest.raises(RelaxionError, match="did you mean 'batch_size'"):
        TD3("Pendulum-v1", batchsize=3)


def test_returns_outside_d4pg_support_are_told_once() -> None:
    with pytest.warns(RelaxionWarning, match="outside the support of D4PG's critic") as told:
        make_learner(D4PG, steps=410, batch_size=2, warmup_steps=90, lowest_value=-5.0, highest_value=0.0)
    assert len(told) == 1


def test_a_callback_sees_every_step_and_can_stop() -> None:
    seen: list[int] = []

    def watch(agent: TD3) -> bool:
        seen.append(agent.steps)
        return agent.steps < 7

    agent = TD3("Pendulum-v1", widths=(8, 8), warmup_steps=20, batch_size=8).learn(40, callback=watch)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert agent.steps == 7
