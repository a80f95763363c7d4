"""The policy `universal`: a metric for all elements, learned from a store of relaxations with dear engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torch import Tensor

from relaxion.collecting.store import Trajectory, TrajectoryStore
from relaxion.errors import RunError
from relaxion.files import Stored, digest, joined
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.optimize.guard import Guard
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.training.diagnostics import Event
from relaxion.training.metals_trainer import LARGEST_STRAIN, LONGEST_MOVE
from relaxion.training.result import RelaxationResult
from relaxion.training.run_settings import UniversalRunSettings
from relaxion.training.seeds import named_generator
from relaxion.training.statistics import MetricMeans
from relaxion.training.stored_imitation import StoredImitation, mean_error
from relaxion.training.stored_lessons import is_validation, sorted_lessons
from relaxion.training.universal_assessment import UniversalAssessed, UniversalAssessor
from relaxion.training.universal_settings import UniversalSettings

MOLECULES, CRYSTALS = "molecules", "crystals"
STORES_APART = ":"


def group(trajectory: Trajectory) -> str:
    """Whether anything is periodic."""
    return CRYSTALS if bool(trajectory.pbc.any()) else MOLECULES


def split_store(settings: UniversalSettings) -> tuple[list[Trajectory], list[Trajectory]]:
    """What is trained on, and what is not; of crystals and molecules those that have a share in the training."""
    shares = _shares(settings)
    stores = (TrajectoryStore.open(Path(path)) for path in settings.store.split(STORES_APART))
    every = [t for store in stores for t in store if shares[group(t)] > 0]
    return [t for t in every if not is_validation(t.key)], [t for t in every if is_validation(t.key)]


def _shares(settings: UniversalSettings) -> dict[str, float]:
    return {MOLECULES: settings.molecule_share, CRYSTALS: 1 - settings.molecule_share}


class UniversalTrainer:
    """Updates of a metric from stored lessons; a step is an update."""

    def __init__(self, settings: UniversalRunSettings) -> None:
        self.settings = settings
        seed = settings.training.seed
        if not settings.universal.store:
            raise RunError(
                "no store of relaxations: fill one with 'relaxion collect universal-data --out STORE', then "
                "--set store=STORE"
            )
        self.policy = MetricPolicy(
            MoveActions(LONGEST_MOVE, LARGEST_STRAIN), settings.metric, named_generator(seed, "agent")
        )
        training, self.validation = split_store(settings.universal)
        self.force_calls = sum(len(trajectory) for trajectory in (*training, *self.validation))
        self.engines = sorted({trajectory.engine for trajectory in training})
        groups = sorted_lessons(training, settings.universal.rule(), group)
        if not groups:
            raise RunError(f"the store {settings.universal.store} holds no finished relaxation to learn from")
        shares = _shares(settings.universal) if len(groups) > 1 else dict.fromkeys(groups, 1.0)
        self.imitation = StoredImitation(
            self.policy,
            {name: found.lessons for name, found in groups.items()},
            shares,
            {name: found.weights for name, found in groups.items()},
            settings.universal,
            named_generator(seed, "replay"),
        )
        self.means = MetricMeans()

    @cached_property
    def assessor(self) -> UniversalAssessor:
        return UniversalAssessor(self.validation, self.settings.training.assessment_starts)

    @property
    def step(self) -> int:
        return self.imitation.n_updates

    @property
    def steps_per_round(self) -> int:
        return 1

    def prepare(self, folder: Path) -> None:
        """BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def advance(self) -> None:
        """One update."""
        self.means.add_numbers(self.imitation.update())

    def metrics(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        return own | self.means.take()

    def take_events(self) -> list[Event]:
        return []

    def chain(self) -> Stepper:
        """What a relaxer would use."""
        settings, knobs = QuasiNewtonSettings(), self.settings.universal.gate()
        metrics = LearnedMetrics(self.policy.network)
        return Stepper(settings, quasi_newton=Guard(settings, metrics, lambda _: knobs))

    def assess(self, stop: Callable[[], bool] | None = None) -> UniversalAssessed:
        groups = sorted_lessons(self.validation, self.settings.universal.rule(), group)
        errors = {name: mean_error(self.policy, found.lessons) for name, found in groups.items()}
        return UniversalAssessed(self.assessor.calls(self.chain, stop), errors, self.assessor.baselines)

    def result(self, final: UniversalAssessed, wall_time_seconds: float) -> RelaxationResult:
        measured = final.metrics()
        return RelaxationResult(
            agent=self.settings.agent_name,
            task=self.settings.training.task,
            seed=self.settings.training.seed,
            steps=self.step,
            final_return_mean=measured["eval/mean_reward"],
            final_return_worst=-float(final.all_calls.max()),
            episodes=0,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
            final_force_calls_mean=measured["eval/force_calls_mean"],
            final_force_calls_median=measured["eval/force_calls_median"],
            final_success_rate=final.success_rate,
            force_calls_bfgs=final.baselines["BFGS"],
            force_calls_fire=final.baselines["FIRE"],
            training_force_calls=self.force_calls,
            potential=" and ".join(self.engines),
            structures="universal",
        )

    def weights(self) -> dict[str, Tensor]:
        return joined({"metric": self.policy.state_dict()})

    def start_from(self, stored: Stored) -> None:
        """Take over an old metric."""
        self.policy.load_state_dict(stored.part("metric"))

    def snapshot(self) -> dict[str, Tensor]:
        return joined(
            {
                "metric": self.policy.state_dict(),
                "imitation": self.imitation.snapshot(),
                "means": self.means.snapshot(),
            }
        )

    def restore(self, stored: Stored) -> None:
        self.imitation.restore(stored.part("imitation"))
        self.means.restore(stored.part("means"))

    def close(self) -> None:
        """Nothing is held."""
