"""Settings of a training run that are the same for all agents; those that only vectors need stand apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from relaxion.errors import SettingsError
from relaxion.settings import Settings


class TrainingSettings(Settings):
    """What is learned, for how long, from how much, and what is written down."""

    task: str
    """Any Gymnasium id with a bounded Box of actions, or "relax": atomic structures."""

    steps: int = Field(default=10_000, ge=1)
    """Environment steps in all. The only setting a resume may change: nothing is scheduled by it."""

    seed: int = Field(default=0, ge=0)
    """Decides everything: weights, exploration, batches, starts."""

    replay_capacity: int = Field(default=100_000, ge=1)
    """Transitions kept; the newest replaces the oldest."""

    batch_size: int = Field(default=128, ge=1)
    """Transitions per update, drawn without replacement."""

    warmup_steps: int = Field(default=1_000, ge=1)
    """Transitions collected by random actions before the first update (R1.2)."""

    n_steps: int = Field(default=1, ge=1)
    """Steps of reward before the bootstrap; D4PG's paper takes 5."""

    exploration_noise_final: float | None = Field(default=None, ge=0)
    """The agent's `exploration_noise` goes linearly to this, half ranges of the action; None: it stays."""

    exploration_noise_steps: int = Field(default=10_000, ge=1)
    """Environment steps until `exploration_noise_final` is reached."""

    log_interval_steps: int = Field(default=1_000, ge=1)
    """A line in metrics.jsonl every so many environment steps."""

    assessment_interval_steps: int = Field(default=5_000, ge=0)
    """Assess the policy without noise every so many steps; 0: only at the end."""

    assessment_starts: int = Field(default=20, ge=1)
    """Fixed starts, the same for every agent and seed."""

    checkpoint_interval_steps: int = Field(default=5_000, ge=1)
    """Most environment steps that a kill can cost. A checkpoint holds the whole replay."""

    tensorboard: bool = False
    """Also write TensorBoard files (extra: relaxion[train])."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        settings = super().read(values)
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        if self.replay_capacity < self.batch_size:
            raise SettingsError(
                f"replay_capacity {self.replay_capacity} is below batch_size {self.batch_size}: "
                "a batch needs that many different transitions"
            )
        if self.warmup_steps < self.batch_size:
            raise SettingsError(
                f"warmup_steps {self.warmup_steps} is below batch_size {self.batch_size}: "
                "the first batch needs that many different transitions"
            )
        if self.replay_capacity < self.warmup_steps:
            raise SettingsError(
                f"replay_capacity {self.replay_capacity} is below warmup_steps {self.warmup_steps}: "
                "the first update would never come"
            )


class VectorTrainingSettings(TrainingSettings):
    """For Gymnasium tasks."""

    n_environments: int = Field(default=1, ge=1)
    """Environments side by side, all stepped in this process."""

    updates_per_step: int = Field(default=1, ge=1)
    """Updates after each environment step."""

    discount_factor: float = Field(default=0.99, ge=0, le=1)
    """γ per step."""

    normalise_observations: bool = True
    """By the running mean and variance (R3.1); part of the policy from then on."""

    assessment_max_steps: int = Field(default=10_000, ge=1)
    """An assessed episode without an end of its own is cut after so many steps."""

    def _check_together(self) -> None:
        super()._check_together()
        if self.replay_capacity % self.n_environments:
            raise SettingsError(
                f"replay_capacity {self.replay_capacity} must be a multiple of n_environments {self.n_environments}"
            )
