"""What every agent looks like. Policy, critics and generators are handed in; no shape of a state is known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from relaxion.experience.batch import Batch

PolicyPenalty: TypeAlias = Callable[[Batch, Any], Tensor]
"""An extra term of the policy's loss: batch and the policy's fresh actions -> (batch,) or (), differentiable."""


class ActionDomain(Protocol):
    """What an agent must be able to do with actions, be they vectors or moves of atoms."""

    def bound(self, actions: Any) -> Any:
        """The nearest actions inside the bounds."""
        ...

    def perturb(
        self,
        actions: Any,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: Any = None,
    ) -> Any:
        """Actions plus Gaussian noise, `scale` and `clip` in units of the action's half range; not yet bounded.

        The observations the actions belong to are for domains whose unit depends on them.
        """
        ...

    def random(self, observations: Any, generator: torch.Generator) -> Any:
        """Uniform actions within the bounds, for warm-up."""
        ...

    def dimensions(self, observations: Any) -> Tensor:
        """Number of components of each action, (batch,): SAC's target entropy is minus this."""
        ...


@runtime_checkable
class Agent(Protocol):
    """Acts by day, learns by night. Updates touch a batch only, never an environment (R1.4)."""

    def act(self, observations: Any) -> Any:
        """What the agent believes best, inside the bounds. No exploration, no gradient."""
        ...

    def explore(self, observations: Any, generator: torch.Generator) -> Any:
        """What to try while collecting, inside the bounds. No gradient."""
        ...

    def update(self, batch: Batch) -> Mapping[str, Tensor]:
        """Learn from one batch; metrics as tensors without gradient, so that nobody waits for `.item()`."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all that changes while learning: networks, targets, Adam's memory, counter, own generator."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; raises RestartError on missing, left-over or misshapen tensors."""
        ...


@runtime_checkable
class NoisyExplorer(Protocol):
    """An agent whose exploration is noise of a size that a schedule may set before `explore` (SAC has none)."""

    exploration_scale: float  # half ranges of the action
