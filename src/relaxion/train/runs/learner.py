"""Agents as one object, for scripts and notebooks: learn, predict, save, load."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from relaxion.errors import CheckpointError, RunError, SettingsError
from relaxion.train.agents import AGENTS
from relaxion.train.experience.vector_environment import MakeEnvironment, shaped, task
from relaxion.train.runs.loop import read_weights, write_agent
from relaxion.train.tasks.control import AssessedReturns, Trainer, VectorRunSettings, assess
from relaxion.train.tasks.progress import NonFiniteError, stored_settings
from relaxion.train.tasks.settings import RunSettings


class VectorLearner:
    """An algorithm with its task. For long runs that can be resumed use `relaxion train`.

    >>> agent = TD3("Pendulum-v1", seed=0, widths=(64, 64))
    >>> agent.learn(10_000)
    >>> action = agent.predict(observation)
    """

    name: ClassVar[str]

    def __init__(self, environment: str | MakeEnvironment, *, seed: int = 0, **settings: Any) -> None:
        """`environment` is a Gymnasium id or a function that makes one; settings are those of recipes."""
        if isinstance(environment, gymnasium.Env) or not (isinstance(environment, str) or callable(environment)):
            raise SettingsError(
                f"an environment is given by its id or by a function that makes a new one, got {environment!r}; "
                f'for example {type(self).__name__}(lambda: gymnasium.make("Pendulum-v1"))'
            )
        word = environment if isinstance(environment, str) else getattr(environment, "__name__", "environment")
        learned = task(word, None if isinstance(environment, str) else environment)
        values = {**settings, "task": word, "seed": seed, "agent": self.name}
        self._trainer = Trainer(VectorRunSettings.read(values), learned)

    @property
    def settings(self) -> RunSettings:
        return self._trainer.settings

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._trainer.step

    def learn(self, steps: int, callback: Callable[[Self], bool | None] | None = None) -> Self:
        """Go on for so many environment steps.

        `callback` is called with this object after every step of the environments; it may look at `steps`, `metrics()`
        and `assess()`, or save. Where it returns False, learning stops, as in Stable-Baselines3.
        """
        end = self._trainer.step + steps
        try:
            while self._trainer.step < end:
                self._trainer.advance()
                if callback is not None and callback(self) is False:
                    break
        except NonFiniteError as error:
            raise RunError(f"{error.what} at step {self.steps} is not finite: {error.transition}") from error
        return self

    def predict(self, observation: ArrayLike) -> NDArray[Any]:
        """The best known action for one observation, or one for each of several; shapes are those of the spaces."""
        learned = self._trainer.task
        raw = torch.as_tensor(np.asarray(observation, dtype=np.float32))
        one = raw.shape == learned.observation_shape
        if not one and (raw.ndim == 0 or raw.shape[1:] != learned.observation_shape):
            shape = learned.observation_shape
            raise SettingsError(f"an observation has shape {shape}, several have one axis more, got {tuple(raw.shape)}")
        actions = self._trainer.act(raw.reshape(1 if one else len(raw), learned.observation_size)).numpy()
        own = shaped(learned.actions, actions)
        return own[0] if one else own

    def assess(self, n_starts: int = 20) -> AssessedReturns:
        """Returns without noise from fixed starts, in environments of their own."""
        return assess(self._trainer.act, self._trainer.task, n_starts)

    def metrics(self) -> dict[str, float]:
        """Records of training since the last call, under the names of metrics.jsonl."""
        return self._trainer.scalars()

    def save(self, path: str | Path) -> None:
        """Networks, normaliser and settings; not the replay."""
        write_agent(Path(path), self._trainer)

    @classmethod
    def load(cls, path: str | Path, environment: str | MakeEnvironment | None = None) -> Self:
        """From `save`, or from the folder of a run. It acts as the saved one did; what it learns is a new run."""
        stored = read_weights(Path(path))
        settings = dict(stored_settings(stored))
        if (name := settings.pop("agent", None)) != cls.name:
            raise CheckpointError(f"{path} holds an agent of kind {str(name)[:40]}, not {cls.name}")
        if not isinstance(settings.get("task"), str):
            raise CheckpointError(f"{path} does not name the task of its agent; choose another file")
        learner = cls(environment or settings["task"], **{k: v for k, v in settings.items() if k != "task"})
        learner._trainer.start_from(stored)
        return learner


@cache
def learner(name: str) -> type[VectorLearner]:
    """The class of the agent of this name, as `relaxion.train.agents` shows it."""
    algorithm = AGENTS[name].algorithm
    facts = {"name": name, "__doc__": algorithm.__doc__, "__module__": "relaxion.train.agents"}
    return type(algorithm.__name__, (VectorLearner,), facts)
