"""Gymnasium tasks with vectors, and their replay.

Environments are checked, stepped side by side, reset by hand, and repeatable from a snapshot. Replay is a preallocated
ring of transitions, from which n-step batches are drawn; observations are stored raw and normalised when they are used.
"""

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

VARIANCE_FLOOR = 1e-8
LARGEST = 10.0


class Normaliser:
    """(x - mean) / √max(variance, 1e-8), cut to ±10, with the statistics of all observations so far (R3.1).

    Switched off, it counts on but leaves observations as they are. It belongs to the policy: save both or neither.
    """

    def __init__(self, size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.count = torch.zeros((), dtype=torch.int64)
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.variance = torch.ones(size, dtype=torch.float64)  # population variance; 1 until something was seen

    def update(self, observations: Tensor) -> None:
        """Take in raw observations (n, size), by Chan's rule for joining two sets."""
        new = observations.to(torch.float64)
        n_old = int(self.count)
        n_new = len(new)
        total = n_old + n_new
        away = new.mean(dim=0) - self.mean
        squares = self.variance * n_old + new.var(dim=0, correction=0) * n_new + away**2 * (n_old * n_new / total)
        self.mean = self.mean + away * (n_new / total)
        self.variance = squares / total
        self.count = self.count + n_new

    def __call__(self, observations: Tensor) -> Tensor:
        if not self.enabled:
            return observations
        kind = observations.dtype
        deviation = self.variance.clamp(min=VARIANCE_FLOOR).sqrt().to(kind)
        return (observations - self.mean.to(kind)).div_(deviation).clamp_(-LARGEST, LARGEST)

    def snapshot(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are not those of this size."""
        if tensors["mean"].shape != self.mean.shape:
            raise ValueError(f"normaliser of {len(tensors['mean'])} numbers, expected {len(self.mean)}")
        self.count, self.mean, self.variance = (tensors[name].clone() for name in ("count", "mean", "variance"))


COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminated", "ended")


@dataclass(frozen=True, eq=False)
class Batch:
    """Sampled transitions, observations already normalised.

    Observations and actions are opaque here and in the agents: tensors for control tasks, states and moves for atoms.
    `discounts` is γⁿ, and 0 only where the episode truly ended; a time limit bootstraps.
    """

    observations: Any
    actions: Any
    rewards: Tensor  # (batch,), n-step sums where n > 1
    discounts: Tensor  # (batch,)
    next_observations: Any
    sources: Tensor | None = None  # (batch,) int64, `Source`: who proposed the actions; None where nobody asks


class VectorReplay:
    """The newest transition replaces the oldest; batches are uniform without replacement (R1.3).

    Several environments write one row each, in turn, so that the row after row i of the same environment is
    i + n_environments. Observations are raw; what a batch shows is normalised with the statistics of the moment.
    """

    def __init__(
        self,
        capacity: int,
        observation_size: int,
        action_size: int,
        *,
        generator: Generator,
        discount_factor: float = 0.99,
        n_steps: int = 1,
        n_environments: int = 1,
    ) -> None:
        if capacity < n_environments or capacity % n_environments:
            raise SettingsError(f"a replay of {capacity} rows cannot be shared by {n_environments} environments evenly")
        self.capacity = capacity
        self.n_steps = n_steps
        self.n_environments = n_environments
        self.generator = generator
        self.observations = torch.zeros(capacity, observation_size)
        self.actions = torch.zeros(capacity, action_size)
        self.rewards = torch.zeros(capacity)
        self.next_observations = torch.zeros(capacity, observation_size)
        self.terminated = torch.zeros(capacity, dtype=torch.bool)  # the episode truly ended
        self.ended = torch.zeros(capacity, dtype=torch.bool)  # terminated or cut by a time limit
        self.total_added = 0
        self._powers = discount_factor ** torch.arange(n_steps + 1, dtype=torch.float64)  # γ⁰ … γⁿ
        self._strides = torch.arange(n_steps) * n_environments

    def __len__(self) -> int:
        return min(self.total_added, self.capacity)

    @property
    def head(self) -> int:
        """The row to be written next; once the ring is full, also the oldest."""
        return self.total_added % self.capacity

    def add(
        self,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        next_observations: Tensor,
        terminated: Tensor,
        truncated: Tensor,
    ) -> None:
        """One transition of every environment. `next_observations` is what the step led to, never a reset's."""
        rows = slice(self.head, self.head + self.n_environments)  # capacity is a multiple: never wraps in between
        self.observations[rows] = observations
        self.actions[rows] = actions
        self.rewards[rows] = rewards
        self.next_observations[rows] = next_observations
        self.terminated[rows] = terminated
        self.ended[rows] = terminated | truncated
        self.total_added += self.n_environments

    def cut(self) -> None:
        """The newest row of every environment becomes the last of its episode, as if cut by a time limit."""
        if self.total_added:
            newest = (self.head - self.n_environments) % self.capacity
            self.ended[newest : newest + self.n_environments] = True

    def sample(self, batch_size: int, normaliser: Normaliser | None = None) -> Batch:
        """So many different transitions, each lengthened to n steps as far as its episode and the head allow."""
        return self.assemble(draw_without_replacement(len(self), batch_size, self.generator), normaliser)

    def assemble(self, first: Tensor, normaliser: Normaliser | None = None) -> Batch:
        """The batch of n-step transitions that begin in the rows `first`, (batch,)."""
        rewards, discounts, last = self._single(first) if self.n_steps == 1 else self._windows(first)
        observations = self.observations.index_select(0, first)
        next_observations = self.next_observations.index_select(0, last)
        if normaliser is not None:
            observations = normaliser(observations)
            next_observations = normaliser(next_observations)
        return Batch(observations, self.actions.index_select(0, first), rewards, discounts, next_observations)

    def _single(self, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        discounts = self._powers[1] * ~self.terminated[first]
        return self.rewards[first], discounts.to(self.rewards.dtype), first

    def _windows(self, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ γᵏ r, γ^(steps really used) or 0 at termination, and the last row used."""
        rows = (first[:, None] + self._strides) % self.capacity  # (batch, n_steps)
        # A window stops before the write head: age counts from the oldest row, and must not wrap to the newest.
        oldest = self.head if self.total_added > self.capacity else 0
        age = (first - oldest) % self.capacity
        used = age[:, None] + self._strides < len(self)
        used[:, 1:] &= ~self.ended[rows[:, :-1]].cummax(dim=1).values  # nor does it go on in another episode
        length = used.sum(dim=1)
        last = rows.gather(1, length[:, None] - 1).squeeze(1)
        rewards = (self.rewards[rows] * used * self._powers[:-1]).sum(dim=1)
        discounts = self._powers[length] * ~self.terminated[last]
        return rewards.to(self.rewards.dtype), discounts.to(self.rewards.dtype), last

    def snapshot(self) -> dict[str, Tensor]:
        """The rows in use and the counter; the generator is its owner's to save."""
        stored = {name: getattr(self, name)[: len(self)] for name in COLUMNS}
        return stored | {"total_added": torch.tensor(self.total_added)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are not those of this replay."""
        total = int(tensors["total_added"])
        rows = min(total, self.capacity)
        for name in COLUMNS:
            column: Tensor = getattr(self, name)
            if tensors[name].shape != (rows, *column.shape[1:]):
                raise ValueError(f"replay {name} {tuple(tensors[name].shape)}, expected {rows} rows of this replay")
            column[:rows] = tensors[name]
        self.total_added = total


def draw_without_replacement(size: int, count: int, generator: Generator) -> Tensor:
    """`count` different numbers below `size`, every set equally likely, in time independent of `size`."""
    if count > size:
        raise SettingsError(f"{count} different transitions were asked for, the replay holds {size}")
    if size >= 4 * count:
        draws = torch.randint(size, (2 * count,), generator=generator)
        values, order = draws.sort(stable=True)
        repeats = torch.zeros(2 * count, dtype=torch.bool)
        repeats[order[1:]] = values[1:] == values[:-1]
        different = draws[~repeats]
        # Too few is next to impossible. No number is special, so what is drawn in its stead keeps all sets equal.
        if len(different) >= count:
            return different[:count]
    return torch.randperm(size, generator=generator)[:count]


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
        observations = environment.observation_space
        actions = environment.action_space
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
