"""Tasks that cannot be learned are refused; resets are by hand; an episode can be repeated to the bit."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import TimeLimit

from relaxion.errors import SettingsError
from relaxion.train.experience.vectors import VectorEnvironments, task


class Counter(gymnasium.Env[Any, Any]):
    """Observes the steps since reset, ends truly after `length`; its first observation is drawn below 0."""

    def __init__(self, length: int = 3, observations: Any = None, actions: Any = None) -> None:
        self.observation_space = observations or Box(-np.inf, np.inf, (1,))
        self.action_space = actions or Box(np.array([[-1.0, 2.0]]), np.array([[1.0, 6.0]]), dtype=np.float64)
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.count = 0
        self.received: list[Any] = []
        return np.array([-1.0 - self.np_random.random()]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.received.append(np.asarray(action))  # Gymnasium hands over scalars where the shape is ()
        return np.array([float(self.count)]), 0.1, self.count == self.length, False, {}


def make_environments(make: Any, n: int = 1) -> VectorEnvironments:
    return VectorEnvironments(make, n, torch.Generator().manual_seed(5))


def test_bounds_and_sizes_of_any_shape() -> None:
    learned = task("counter", Counter)
    assert (learned.observation_size, learned.action_size) == (1, 2)
    assert (learned.observation_shape, learned.actions.shape) == ((1,), (1, 2))
    assert learned.lowest_action.tolist() == [-1.0, 2.0]
    assert learned.highest_action.tolist() == [1.0, 6.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"actions": Discrete(3)}, r"need a Box of real actions, got Discrete\(3\)"),
        ({"actions": Box(-np.inf, np.inf, (1,))}, "bounds must be finite"),
        ({"actions": Box(0, np.inf, (1,))}, "bounds must be finite"),
        ({"actions": Box(0, 3, (2,), dtype=np.int64)}, "actions must be real numbers, got whole ones"),
        ({"actions": Box(0, 3, (2,), dtype=np.uint8)}, "actions must be real numbers"),
        ({"observations": Dict(a=Box(0, 1))}, "FlattenObservation"),
    ],
)
def test_tasks_that_cannot_be_learned(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        task("odd", lambda: Counter(**options))


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'Pendulum-v1'"):
        task("Pendulun-v1")


def test_actions_arrive_in_the_shape_and_kind_of_the_space() -> None:
    made = Counter()
    make_environments(lambda: made).step(torch.tensor([[0.5, 3.0]]))
    assert made.received[0].shape == (1, 2)
    assert made.received[0].dtype == np.float64
    assert made.received[0].tolist() == [[0.5, 3.0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_no_action_is_a_rounding_outside_the_space(dtype: Any, shape: tuple[int, ...]) -> None:
    made = Counter(actions=Box(0.1, 0.3, shape, dtype=dtype))
    learned = task("counter", lambda: made)
    environments = make_environments(lambda: made)
    for actions in (learned.lowest_action, learned.highest_action):
        environments.step(actions[None])
    assert all(made.action_space.contains(action) for action in made.received)
    assert made.received[0].min() < 0.11
    assert made.received[1].max() > 0.29


def test_the_observation_of_a_reset_is_never_a_next_observation() -> None:
    """Gymnasium's own vector environments answer one step with a reset; it must not get into replay."""
    environments = make_environments(lambda: TimeLimit(Counter(length=3), 2), 2)
    seen = []
    for _ in range(7):
        stepped = environments.step(torch.zeros(2, 2))
        environments.renew(stepped.ended)
        seen.append((stepped.next_observations[0].item(), stepped.ended[0].item()))
    assert seen == [(1.0, False), (2.0, True), (1.0, False), (2.0, True), (1.0, False), (2.0, True), (1.0, False)]
    assert bool((make_environments(Counter).observations < 0).all())


def test_a_time_limit_is_no_termination() -> None:
    limited, ended = make_environments(lambda: TimeLimit(Counter(length=3), 2)), make_environments(lambda: Counter(2))
    for environments in (limited, ended):
        environments.step(torch.zeros(1, 2))
    cut, over = limited.step(torch.zeros(1, 2)), ended.step(torch.zeros(1, 2))
    assert (cut.terminated.item(), cut.truncated.item()) == (False, True)
    assert (over.terminated.item(), over.truncated.item()) == (True, False)


def test_only_ended_environments_are_renewed() -> None:
    environments = make_environments(Counter, 2)
    environments.step(torch.zeros(2, 2))
    environments.renew(torch.tensor([False, True]))
    assert environments.observations[0].item() == 1.0
    assert environments.observations[1].item() < 0


@pytest.mark.parametrize("name", ["Pendulum-v1", "HalfCheetah-v5"])
def test_episodes_repeat_to_the_bit(name: str) -> None:
    if name == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
        pytest.importorskip("imageio")

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(name, max_episode_steps=200)

    size = task(name, make).action_size
    generator = torch.Generator().manual_seed(1)
    first, second = make_environments(make, 2), VectorEnvironments(make, 2, torch.Generator().manual_seed(77))
    for _ in range(230):  # into the second episode
        stepped = first.step(torch.rand(2, size, generator=generator) * 2 - 1)
        first.renew(stepped.ended)
    assert second.restore(first.snapshot())
    second.generator.set_state(first.generator.get_state())
    for _ in range(200):  # over the next reset and time limit
        actions = torch.rand(2, size, generator=generator) * 2 - 1
        one, other = first.step(actions), second.step(actions)
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in vars(one))
        first.renew(one.ended)
        second.renew(other.ended)
        assert torch.equal(first.observations, second.observations)


def test_an_environment_that_does_not_repeat_is_noticed() -> None:
    class Restless(Counter):
        drawn = 0

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            Restless.drawn += 1
            _, *rest = super().step(action)
            return np.array([float(Restless.drawn)]), *rest

    environments = make_environments(Restless)
    environments.step(torch.zeros(1, 2))
    assert not make_environments(Restless).restore(environments.snapshot())
