"""What to try while collecting: random actions first, then the policy's with noise that a schedule turns down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Generator


@runtime_checkable
class NoisyExplorer(Protocol):
    """An agent whose noise can be set, in half ranges of the action."""

    exploration_scale: float

    def explore(self, observations: Any, generator: Generator) -> Any: ...


@dataclass(frozen=True)
class LinearSchedule:
    """From `start` to `end` within `steps`, then `end` for good. Constant where both are the same."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        share = min(max(step / self.steps, 0.0), 1.0)
        return (1 - share) * self.start + share * self.end  # this form ends at `end` exactly


class Exploration:
    """Uniform actions until `warmup_steps` transitions are stored, then the agent's own exploration.

    With `random_warmup=False` the agent explores from the first step on: for policies that are of use untrained.
    Where the agent adds Gaussian noise, its size follows `noise`. It is a function of the step alone, so a resumed
    run needs no memory of it.
    """

    def __init__(
        self,
        agent: Any,
        domain: Any,
        generator: Generator,
        *,
        warmup_steps: int,
        noise: LinearSchedule | None,
        random_warmup: bool = True,
    ) -> None:
        self.agent, self.domain, self.generator = agent, domain, generator
        self.warmup_steps, self.noise, self.random_warmup = warmup_steps, noise, random_warmup

    def warming_up(self, n_stored: int) -> bool:
        """While true, collect only (R1.2)."""
        return n_stored < self.warmup_steps

    def at_random(self, n_stored: int) -> bool:
        """While true, actions are chance's and not the agent's."""
        return self.random_warmup and self.warming_up(n_stored)

    def __call__(self, observations: Any, n_stored: int, step: int) -> Any:
        """Actions within the bounds, in the environment's units."""
        if self.at_random(n_stored):
            return self.domain.random(observations, self.generator)
        if self.noise is not None and isinstance(self.agent, NoisyExplorer):
            self.agent.exploration_scale = self.noise(step)
        return self.agent.explore(observations, self.generator)
