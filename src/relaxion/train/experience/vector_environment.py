"""Gymnasium tasks with vectors: checked, stepped side by side, reset by hand, and repeatable from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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


class VectorEnvironments:
    """Some environments of one task, side by side in one process: Gymnasium's, which never reset by themselves.

    `step` answers with what the step led to, `renew` begins new episodes. Every episode is reset with a seed from
    `generator`, so any deterministic environment can be brought back by repeating its current episode.
    """

    def __init__(self, make: MakeEnvironment, n_environments: int, generator: Generator) -> None:
        self.generator = generator
        self._environments = SyncVectorEnv([make] * n_environments, autoreset_mode=AutoresetMode.DISABLED)
        space = self._environments.single_action_space
        assert isinstance(space, Box)  # `task` has refused all others
        self._action_space = space
        self._seeds = [0] * n_environments  # of the current episodes
        self._actions: list[list[NDArray[np.float32]]] = [[] for _ in range(n_environments)]  # since their beginning
        self.renew(torch.ones(n_environments, dtype=torch.bool))

    def step(self, actions: Tensor) -> Stepped:
        """Do the actions (n_environments, action_size), in the environment's own units."""
        raw = actions.numpy()
        answers = self._environments.step(shaped(self._action_space, raw))
        for done, action in zip(self._actions, raw, strict=True):
            done.append(action.copy())
        self.observations = flat(answers[0])
        rewards, terminated, truncated = (torch.from_numpy(answer) for answer in answers[1:4])
        return Stepped(self.observations, rewards, terminated, truncated)

    def renew(self, ended: Tensor) -> None:
        """Begin a new episode where one has ended."""
        for number in ended.nonzero().flatten().tolist():
            self._seeds[number] = int(torch.randint(LARGEST_SEED, (), generator=self.generator))
            self._actions[number] = []
        if ended.any():
            self._reset(ended)

    def _reset(self, which: Tensor) -> None:
        observations, _ = self._environments.reset(seed=list(self._seeds), options={"reset_mask": which.numpy()})
        self.observations = flat(observations)

    def close(self) -> None:
        self._environments.close()

    def snapshot(self) -> dict[str, Tensor]:
        """Seeds and actions of the current episodes; the generator is its owner's to save."""
        actions = [torch.from_numpy(np.stack(done)) for done in self._actions if done]
        return {
            "seeds": torch.tensor(self._seeds),
            "lengths": torch.tensor([len(done) for done in self._actions]),
            "actions": torch.cat(actions) if actions else torch.zeros(0, 0),
            "observations": self.observations,
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Repeat the episodes up to the snapshot. False when an environment did not answer as it did then."""
        self._seeds = tensors["seeds"].tolist()
        lengths = tensors["lengths"].tolist()
        parts = tensors["actions"].split(lengths) if sum(lengths) else [tensors["actions"]] * len(lengths)
        self._actions = [list(part.numpy().copy()) for part in parts]
        self._reset(torch.ones(len(lengths), dtype=torch.bool))
        repeated = []
        for environment, done, begun in zip(self._environments.envs, self._actions, self.observations, strict=True):
            observation = begun
            for action in done:
                observation = flat([environment.step(shaped(self._action_space, action))[0]])[0]
            repeated.append(observation)
        self.observations = torch.stack(repeated)
        return torch.equal(self.observations, tensors["observations"])


def flat(observations: Any) -> Tensor:
    """Some observations as float32 vectors of their own, (n, observation_size)."""
    return torch.from_numpy(np.array(observations, dtype=np.float32).reshape(len(observations), -1))
