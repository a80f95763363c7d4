"""The task `stiffness`: a stiffness is fitted to finished relaxations; a step is an update.

What differs between the policies `metals`, `universal` and a user's own is the recipe: examples from live relaxations
of metals (`examples = "live"`), of any kinds with any engine ("kinds"), or of own structures ("files").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field
from torch import Tensor

from relaxion.files import Stored, digest, joined
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.policy_file import PolicyFile, network_of, policy_of
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.optimizer.safeguard import DEFAULT, GATE, INEXACT, StepRule, constant_network, rule_of
from relaxion.optimizer.step import Stepper
from relaxion.settings import Settings
from relaxion.train.judge.assessment import FMAX, Assessed, under_safeguard
from relaxion.train.supervised.fit import Fit
from relaxion.train.supervised.sources import SOURCES, FitSource, TrainingData
from relaxion.train.tasks.progress import RelaxationResult, ScalarMeans, checked_finite, named_generator, taken_back
from relaxion.train.tasks.settings import LoopSettings, Packed, RunSettings

LONGEST_MOVE = 1.0  # Å; of the bare policy. The safeguard's trust radius is what binds in use.
LARGEST_STRAIN = 0.1


class StiffnessTaskSettings(Settings):
    """Where the examples come from, and the step rule of the policy file."""

    examples: Literal["live", "kinds", "files"] = "live"
    """Relaxations by the policy itself: of metals ("live"), of the kinds of starts of a recipe, or (files) of the
    user's own structures."""

    secant_weight: float | None = Field(default=None, ge=0, le=1)
    """Of the policy file's own step rule: how far the secants of short steps correct the stiffness. None: that of
    the safeguard, and the next setting is not used."""

    n_secants: int = Field(default=1, ge=1)
    """So many of them, the newest ones."""

    def control(self) -> StepRule | None:
        """The step rule of the policy file: the usual one, but for the secants."""
        if self.secant_weight is None:
            return None
        return replace(DEFAULT, secant_weight=self.secant_weight, n_secants=self.n_secants, secant_length=INEXACT)


@dataclass(frozen=True)
class StiffnessRunSettings(RunSettings):
    """No agent acts here; one may go on from it (task relax with policy = stiffness, from these weights)."""

    stiffness: StiffnessSettings
    bundle: StiffnessTaskSettings
    fit: FitSource

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:
        fit, _ = SOURCES.get(str(values.get("examples")), SOURCES["live"])
        return {"training": LoopSettings, "stiffness": StiffnessSettings, "bundle": StiffnessTaskSettings, "fit": fit}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The rate falls over all steps, unless the settings say how many updates it takes."""
        settings = super().read(values)
        if settings.fit.fit_updates:
            return settings
        return replace(settings, fit=settings.fit.model_copy(update={"fit_updates": settings.training.steps}))

    @property
    def data(self) -> TrainingData:
        """What is learned from and assessed."""
        _, data = SOURCES[self.bundle.examples]
        return data(self.fit, self.training.assessment_starts, self.bundle.control())

    def trainer(self) -> StiffnessTrainer:
        return StiffnessTrainer(self)

    def packed(self, stored: Stored, /) -> Packed:
        data = self.data
        control = self.bundle.control()
        networks = {"policy": network_of(self.stiffness, stored.part("stiffness"), stochastic=False)}
        if control is not None:
            networks[GATE] = constant_network(control)
        return Packed(
            networks=networks,
            card=data.card() | {"agent": "imitation", "force_tolerance_ev_per_angstrom": FMAX},
            assessor=data.assessor,
            relax=lambda bundle: under_safeguard(lambda: stepper_of(bundle)),
            fails_on=data.fails_on,
            steps_are_updates=True,
        )


def stepper_of(bundle: PolicyFile) -> Stepper:
    """What a relaxer would use: stiffness model and step rule as they come out of the policy file."""
    policy = policy_of(bundle)
    gate = bundle.networks.get(GATE)
    assert isinstance(policy, StiffnessPolicy)
    rule = None if gate is None else rule_of(gate, bundle.name)
    return new_stepper(policy_model=LearnedHessians(policy.network), rule=rule)


class StiffnessTrainer:
    """`advance` is one update, after a round of relaxations where one is due; resumable to the bit."""

    def __init__(self, settings: StiffnessRunSettings) -> None:
        self.settings = settings
        self.data = settings.data
        seed = settings.training.seed
        bounds = MoveActions(LONGEST_MOVE, LARGEST_STRAIN)
        self.policy = StiffnessPolicy(bounds, settings.stiffness, named_generator(seed, "agent"))
        dataset = self.data.dataset(self.policy.network, named_generator(seed, "replay"))
        self.fit = Fit(self.policy.network, dataset, settings.fit)
        self.means = ScalarMeans()

    @property
    def step(self) -> int:
        return self.fit.n_updates

    @property
    def steps_per_round(self) -> int:
        return 1

    @property
    def force_calls(self) -> int:
        """Spent on the examples."""
        return self.fit.dataset.force_calls

    def prepare(self, folder: Path) -> None:
        self.data.compare(folder)

    def advance(self) -> None:
        self.means.add(self.fit.update())

    def scalars(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        return own | self.means.take()

    def take_events(self) -> list[Any]:
        """Diagnoses are for agents."""
        return []

    def stepper(self) -> Stepper:
        """What a relaxer would use."""
        return new_stepper(policy_model=LearnedHessians(self.policy.network), rule=self.settings.bundle.control())

    def assess(self, stop: Callable[[], bool] | None = None) -> Assessed:
        return self.data.assessor(under_safeguard(self.stepper), stop)

    def result(self, final: Assessed, wall_time_seconds: float) -> RelaxationResult:
        return RelaxationResult.of(
            self.settings,
            final,
            steps=self.step,
            episodes=0,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
            training_force_calls=self.force_calls,
            potential=self.data.engines,
            structures=self.data.structures,
        )

    def weights(self) -> dict[str, Tensor]:
        return joined({"stiffness": self.policy.state_dict()})

    def start_from(self, stored: Stored) -> None:
        """Take over an old stiffness model."""
        with taken_back():
            self.policy.load_state_dict(stored.part("stiffness"))

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs. A DivergedError when the stiffness model is not worth keeping."""
        checked_finite(self.policy.state_dict(), self.step)
        return joined(
            {"stiffness": self.policy.state_dict(), "fit": self.fit.snapshot(), "means": self.means.snapshot()}
        )

    def restore(self, stored: Stored) -> None:
        with taken_back():
            self.policy.load_state_dict(stored.part("stiffness"))
            self.fit.restore(stored.part("fit"))
            self.means.restore(stored.part("means"))

    def close(self) -> None:
        """Nothing is open."""
