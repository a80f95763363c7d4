"""The task `metric`: a stiffness is taught by finished relaxations; a step is an update.

What differs between the policies `metals`, `universal` and a user's own is the recipe: lessons from live relaxations of
metals (`examples = "live"`), of any kinds with any engine ("kinds"), or from a store of relaxations ("store").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from relaxion.bench.assessment import FMAX, Assessed, under_guard
from relaxion.bundles import PolicyBundle
from relaxion.bundles.networks import network_of, policy_of
from relaxion.errors import CheckpointError
from relaxion.files import Stored, digest, joined
from relaxion.networks.metric.network import MetricSettings
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.optimize.choice import new_stepper
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.stepper import Stepper
from relaxion.optimize.trust_rule import DEFAULT, GATE, INEXACT, StepControl, constant_network, rule_of
from relaxion.settings import Settings
from relaxion.training.checkpoint import checked_finite, named_generator, taken_back
from relaxion.training.lessons.files import FileLessonSettings, FilePlan
from relaxion.training.lessons.kinds import KindLessonSettings, KindPlan
from relaxion.training.lessons.live import Imitation
from relaxion.training.lessons.metals import MetalsPlan, MetalsSettings
from relaxion.training.lessons.plans import Plan
from relaxion.training.lessons.store import StorePlan, StoreSettings
from relaxion.training.packaging import Packed
from relaxion.training.records import RelaxationResult, ScalarMeans
from relaxion.training.settings import LoopSettings, RunSettings

LONGEST_MOVE, LARGEST_STRAIN = 1.0, 0.1  # Å; of the bare policy. The guard's trust radius is what binds in use.


class MetricTaskSettings(Settings):
    """Where the lessons come from, and the trust rule of the bundle."""

    examples: Literal["live", "kinds", "store", "files"] = "live"
    """Live relaxations by the policy itself: of metals, of the kinds of a recipe to collect, or (files) of the user's
    own structures; or a store that `relaxion collect` filled."""

    secant_weight: float | None = Field(default=None, ge=0, le=1)
    """Of the bundle's own trust rule: how far the secants of short steps correct the metric. None: the guard's own
    rule, and the next two settings are not used."""

    n_secants: int = Field(default=1, ge=1)
    """So many of them, the newest ones."""

    secant_length_angstrom: float = Field(default=INEXACT, gt=0)
    """Secants of steps of this length have half the weight. A metric for everything is less exact than one for a few
    metals, for which the guard's own rule has 0.1 Å."""

    def control(self) -> StepControl | None:
        """What the bundle's own rule says at every step: the usual, but for the secants."""
        if self.secant_weight is None:
            return None
        secants = {"n_secants": self.n_secants, "secant_length": self.secant_length_angstrom}
        return replace(DEFAULT, secant_weight=self.secant_weight, **secants)


@dataclass(frozen=True)
class MetricRunSettings(RunSettings):
    """No agent acts here; one may go on from the metric (task relax with policy = metric, from these weights)."""

    metric: MetricSettings
    bundle: MetricTaskSettings
    lessons: MetalsSettings | KindLessonSettings | StoreSettings | FileLessonSettings

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:
        kinds = {"store": StoreSettings, "files": FileLessonSettings, "kinds": KindLessonSettings}
        lessons = kinds.get(values.get("examples", ""), MetalsSettings)
        return {"training": LoopSettings, "metric": MetricSettings, "bundle": MetricTaskSettings, "lessons": lessons}

    @property
    def plan(self) -> Plan:
        starts, lessons = self.training.assessment_starts, self.lessons
        if isinstance(lessons, FileLessonSettings):
            return FilePlan(lessons, starts)
        if isinstance(lessons, KindLessonSettings):
            return KindPlan(lessons, starts, self.bundle.control())
        return StorePlan(lessons, starts) if isinstance(lessons, StoreSettings) else MetalsPlan(lessons, starts)

    def trainer(self) -> MetricTrainer:
        return MetricTrainer(self)

    def packed(self, stored: Stored, /) -> Packed:
        plan, control = self.plan, self.bundle.control()
        networks = {"policy": network_of(self.metric, stored.part("metric"), stochastic=False)}
        if control is not None:
            networks[GATE] = constant_network(control)
        return Packed(
            networks=networks,
            card=plan.card() | {"agent": "imitation", "force_tolerance_ev_per_angstrom": FMAX},
            assessor=plan.assessor,
            relax=lambda bundle: under_guard(lambda: stepper_of(bundle)),
            fails_on=plan.fails_on,
            steps_are_updates=True,
        )


RUN_SETTINGS = MetricRunSettings


def stepper_of(bundle: PolicyBundle) -> Stepper:
    """What a relaxer would use: metric and trust rule as they come out of the bundle."""
    policy, gate = policy_of(bundle), bundle.networks.get(GATE)
    assert isinstance(policy, MetricPolicy)
    rule = None if gate is None else rule_of(gate, bundle.name)
    return new_stepper(metrics=LearnedMetrics(policy.network), rule=rule)


class MetricTrainer:
    """`advance` is one update, after a gathering of lessons where one is due; resumable to the bit."""

    def __init__(self, settings: MetricRunSettings) -> None:
        self.settings, self.plan = settings, settings.plan
        seed, bounds = settings.training.seed, MoveActions(LONGEST_MOVE, LARGEST_STRAIN)
        self.policy = MetricPolicy(bounds, settings.metric, named_generator(seed, "agent"))
        generator = named_generator(seed, "replay")
        examples = self.plan.examples(self.policy, generator)
        self.imitation = Imitation(self.policy, examples, settings.lessons, generator)
        self.means = ScalarMeans()

    @property
    def step(self) -> int:
        return self.imitation.n_updates

    @property
    def steps_per_round(self) -> int:
        return 1

    @property
    def force_calls(self) -> int:
        """Spent on the lessons."""
        return self.imitation.examples.force_calls

    def prepare(self, folder: Path) -> None:
        self.plan.compare(folder)

    def advance(self) -> None:
        self.means.add(self.imitation.update())

    def scalars(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        return own | self.means.take()

    def take_events(self) -> list[Any]:
        """Diagnoses are for agents."""
        return []

    def stepper(self) -> Stepper:
        """What a relaxer would use."""
        return new_stepper(metrics=LearnedMetrics(self.policy.network), rule=self.settings.bundle.control())

    def assess(self, stop: Callable[[], bool] | None = None) -> Assessed:
        errors = self.plan.errors(self.policy.network)
        return replace(self.plan.assessor(under_guard(self.stepper), stop), extra=errors)

    def result(self, final: Assessed, wall_time_seconds: float) -> RelaxationResult:
        return RelaxationResult.of(
            self.settings,
            final,
            steps=self.step,
            episodes=0,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
            training_force_calls=self.force_calls,
            potential=self.plan.engines,
            structures=self.plan.structures,
        )

    def weights(self) -> dict[str, Tensor]:
        return joined({"metric": self.policy.state_dict()})

    def start_from(self, stored: Stored) -> None:
        """Take over an old metric."""
        with taken_back():
            self.policy.load_state_dict(stored.part("metric"))

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs. A DivergedError when the metric is not worth keeping."""
        checked_finite(self.policy.state_dict(), self.step)
        parts = {"metric": self.policy.state_dict(), "imitation": self.imitation.snapshot()}
        return joined(parts | {"means": self.means.snapshot()})

    def restore(self, stored: Stored) -> None:
        if stored.part("gate"):
            raise CheckpointError(
                "this run was training a gate after its metric, which was removed; `from_weights=...` begins a new run "
                "from its metric"
            )
        with taken_back():
            self.imitation.restore(stored.part("imitation"))
            self.means.restore(stored.part("means"))

    def close(self) -> None:
        """Nothing is open."""
