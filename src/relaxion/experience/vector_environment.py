"""Gymnasium tasks with vectors: checked, stepped one by one, reset by hand, and repeatable from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import Generator, Tensor

from relaxion.errors import SettingsError
from relaxion.settings import nearest

MakeEnvironment = Callable[[], gymnasium.Env[Any, Any]]
LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class VectorTask:
    """Shapes and bounds of a task that can be learned here. Agents see flat vectors."""

    name: str
    make: MakeEnvironment
    observation_shape: tuple[int, ...]
    actions: Box
    lowest_action: Tensor  # (action_size,) float32: may be a rounding below the true bound
    highest_action: Tensor  # (action_size,) float32: may be a rounding above the true bound

    @property
    def observation_size(self) -> int:
        return int(np.prod(self.observation_shape))

    @property
    def action_size(self) -> int:
        return len(self.lowest_action)


@dataclass(frozen=True)
class Stepped:
    """One step of every environment. `next_observations` are what the steps led to, before any reset."""

    next_observations: Tensor  # (n_environments, observation_size)
    rewards: Tensor  # (n_environments,) float64
    terminated: Tensor  # (n_environments,) bool
    truncated: Tensor  # (n_environments,) bool, cut by a time limit

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


def task(name: str, make: MakeEnvironment | None = None) -> VectorTask:
    """The task of this Gymnasium id (or made by `make`), refused in one sentence when it cannot be learned here."""
    make = make or _maker(name)
    environment = make()
    try:
        observations, actions = environment.observation_space, environment.action_space
    finally:
        environment.close()
    if not isinstance(observations, Box):
        wrapper = "gymnasium.wrappers.FlattenObservation turns others into one"
        raise SettingsError(f"{name}: observations must be a Box of numbers, got {observations}; {wrapper}")
    if not isinstance(actions, Box):
        raise SettingsError(f"{name}: these agents need a Box of real actions, got {actions}; try 'Pendulum-v1'")
    if not np.issubdtype(actions.dtype, np.floating):
        advice = "a Box of floats with the rounding inside the environment makes them real"
        raise SettingsError(f"{name}: actions must be real numbers, got whole ones ({actions}); {advice}")
    if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all() and (actions.low < actions.high).all()):
        wrapper = "gymnasium.wrappers.RescaleAction or an own Box gives finite ones"
        raise SettingsError(f"{name}: action bounds must be finite and not empty, got {actions}; {wrapper}")
    low, high = (torch.as_tensor(bound, dtype=torch.float32).flatten() for bound in (actions.low, actions.high))
    return VectorTask(name, make, observations.shape, actions, low, high)


def shaped(space: Box, actions: NDArray[np.float32]) -> NDArray[Any]:
    """Flat actions (..., size of the space) in its shape and kind, clipped: float32 may round over a float64 bound."""
    own = actions.reshape((*actions.shape[:-1], *space.shape)).astype(space.dtype, copy=True)
    return np.clip(own, space.low, space.high, out=own)


def _maker(name: str) -> MakeEnvironment:
    try:
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        known = [str(known) for known in gymnasium.registry]
        raise SettingsError(f"no Gymnasium task '{name}' ({error}): {nearest(name, known)}") from error
    return lambda: _made(name)


def _made(name: str) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise SettingsError(f"{name} cannot be made: {error}") from error


class _Episode:
    """One environment, and how to get back to where it is: the seed of its reset and the actions since."""

    def __init__(self, environment: gymnasium.Env[Any, Any]) -> None:
        assert isinstance(environment.action_space, Box)  # `task` has refused all others
        self.environment, self.action_space = environment, environment.action_space
        self.seed = 0
        self.actions: list[NDArray[np.float32]] = []

    def begin(self, seed: int) -> Tensor:
        self.seed, self.actions = seed, []
        observation, _ = self.environment.reset(seed=seed)
        return flat(observation)

    def step(self, action: NDArray[np.float32]) -> tuple[Tensor, float, bool, bool]:
        observation, reward, terminated, truncated, _ = self.environment.step(shaped(self.action_space, action))
        self.actions.append(action.copy())
        return flat(observation), float(reward), bool(terminated), bool(truncated)


class VectorEnvironments:
    """Some environments of one task, side by side in one process.

    Nothing resets by itself: `step` answers with what the step led to, `renew` begins new episodes. (Gymnasium's
    own vector environments hide a reset between two steps, and it gets into replay.) Every episode is reset with a
    seed from `generator`, so any deterministic environment can be brought back by repeating its current episode.
    """

    def __init__(self, make: MakeEnvironment, n_environments: int, generator: Generator) -> None:
        self.generator = generator
        self._episodes = [_Episode(make()) for _ in range(n_environments)]
        self.observations = torch.stack([episode.begin(self._seed()) for episode in self._episodes])

    def _seed(self) -> int:
        return int(torch.randint(LARGEST_SEED, (), generator=self.generator))

    def step(self, actions: Tensor, running: Tensor | None = None) -> Stepped:
        """Do the actions (n_environments, action_size), in the environment's own units.

        Environments that are not `running` stay where they are and answer with reward 0 and an end.
        """
        going = [True] * len(actions) if running is None else running.tolist()
        places = zip(self._episodes, actions.numpy(), self.observations, going, strict=True)
        answers = [e.step(action) if goes else (here, 0.0, True, False) for e, action, here, goes in places]
        observations, rewards, terminated, truncated = zip(*answers, strict=True)
        self.observations = torch.stack(observations)
        ends = torch.tensor(terminated), torch.tensor(truncated)
        return Stepped(self.observations, torch.tensor(rewards, dtype=torch.float64), *ends)

    def renew(self, ended: Tensor) -> None:
        """Begin a new episode where one has ended."""
        if not ended.any():
            return
        fresh = [
            episode.begin(self._seed()) if over else observation
            for episode, over, observation in zip(self._episodes, ended.tolist(), self.observations, strict=True)
        ]
        self.observations = torch.stack(fresh)

    def close(self) -> None:
        for episode in self._episodes:
            episode.environment.close()

    def snapshot(self) -> dict[str, Tensor]:
        """Seeds and actions of the current episodes; the generator is its owner's to save."""
        actions = [torch.from_numpy(np.stack(e.actions)) for e in self._episodes if e.actions]
        return {
            "seeds": torch.tensor([episode.seed for episode in self._episodes]),
            "lengths": torch.tensor([len(episode.actions) for episode in self._episodes]),
            "actions": torch.cat(actions) if actions else torch.zeros(0, 0),
            "observations": self.observations,
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Repeat the episodes up to the snapshot. False when an environment did not answer as it did then."""
        actions = iter(tensors["actions"].numpy())
        repeated = []
        for episode, seed, length in zip(self._episodes, tensors["seeds"], tensors["lengths"], strict=True):
            observation = episode.begin(int(seed))
            for _ in range(int(length)):
                observation = episode.step(next(actions))[0]
            repeated.append(observation)
        self.observations = torch.stack(repeated)
        return torch.equal(self.observations, tensors["observations"])


def flat(observation: Any) -> Tensor:
    """One observation as a float32 vector of its own."""
    return torch.from_numpy(np.array(observation, dtype=np.float32).reshape(-1))
