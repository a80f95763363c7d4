"""Settings of the metric policy inside an agent's training on atoms (`policy = "metric"`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from relaxion.networks.metric.network import MetricShape
from relaxion.settings import Settings
from relaxion.training.metric_imitation import ImitationSettings


class MetricPolicySettings(MetricShape):
    """The policy follows a metric. Backbone, reach and gate are those of the critics (`AtomNetworkSettings`)."""

    policy: Literal["metric"] = "metric"
    """Which kind of policy: the step is what the stiffness makes of the forces (docs/metric.md)."""

    damped: bool = True
    """As in every metric policy; here the policy relaxes alone, and without it far starts fail (docs/metric.md)."""

    reinforced: Literal["all", "gate"] = "all"
    """What reinforcement learning moves: the whole policy; or only what turns the knobs, the metric being left as its
    lessons made it (the critic's error may be larger than what is left to gain)."""


class LessonSettings(Settings):
    """Lessons from finished relaxations: before reinforcement learning, and as an anchor beside it."""

    lesson_updates: int = Field(default=0, ge=0)
    """Updates of the metric before the first environment step; each counts as one of `steps`. 0: none."""

    lessons_per_update: int = Field(default=64, ge=1)
    """States per update, here and in the anchor."""

    lesson_learning_rate: float = Field(default=3e-3, gt=0)
    """Of Adam at the start; it falls along half a cosine."""

    lesson_learning_rate_final: float = Field(default=1e-5, gt=0)
    """At the end of the lessons."""

    lesson_starts: int = Field(default=64, ge=1)
    """Relaxations per gathering."""

    lesson_updates_per_gathering: int = Field(default=40, ge=1)
    """Updates between two gatherings."""

    lesson_gatherings_before: int = Field(default=6, ge=1)
    """Gatherings before the first update."""

    lesson_tolerance_ev_per_angstrom: float = Field(default=2e-4, gt=0)
    """A relaxation is finished here: its end is then known to about 1e-4 Å."""

    lesson_force_calls: int = Field(default=40, ge=2)
    """A relaxation that takes longer is given up, and not learned from."""

    lesson_trust_angstrom: float = Field(default=0.3, gt=0)
    """Longest displacement in a step of a relaxation."""

    lesson_farthest_angstrom: float = Field(default=1.0, gt=0)
    """States with an atom farther from the end teach nothing: no quadratic form knows the way."""

    critic_updates_before: int = Field(default=0, ge=0)
    """Updates of the agent in which only its critics learn: what a critic says before would undo the lessons."""

    lesson_weight: float = Field(default=0.0, ge=0)
    """Weight in the policy's loss of the mean relative error on secants and finished relaxations from replay: the
    anchor of the metric while the critic pulls at it. Goes to `lesson_weight_final` within `expert_steps`."""

    lesson_weight_final: float = Field(default=0.0, ge=0)
    """At the end of that schedule."""

    @property
    def imitation(self) -> ImitationSettings:
        """As `MetricImitation` takes them."""
        return ImitationSettings(
            n_updates=self.lesson_updates,
            n_lessons=self.lessons_per_update,
            learning_rate=self.lesson_learning_rate,
            final_learning_rate=self.lesson_learning_rate_final,
            updates_per_round=self.lesson_updates_per_gathering,
            starts_per_round=self.lesson_starts,
            rounds_before=self.lesson_gatherings_before,
            label_tolerance_ev_per_angstrom=self.lesson_tolerance_ev_per_angstrom,
            farthest_angstrom=self.lesson_farthest_angstrom,
            max_force_calls=self.lesson_force_calls,
            trust_angstrom=self.lesson_trust_angstrom,
        )
