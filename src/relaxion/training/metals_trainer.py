"""The policy `metals`: first its metric learns from finished relaxations, then an agent learns to turn its knobs.

Steps are counted through both: `n_updates` updates of the metric, then force calls of the gate's relaxations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from relaxion.experience.gate_environment import GateEnvironment
from relaxion.experience.vector_environment import task
from relaxion.files import Stored, digest, joined
from relaxion.generators.metals import ADSORBATES, EAM_METALS, EMT_METALS, MetalStarts
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.optimize.gate import begin_at_the_rule, gate_from
from relaxion.optimize.guard import Gate, Guard
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.potentials import potential
from relaxion.training.diagnostics import Event
from relaxion.training.metals_assessment import MetalsAssessed, MetalsAssessor
from relaxion.training.metric_imitation import MetricImitation, Source
from relaxion.training.result import RelaxationResult
from relaxion.training.run_settings import MetalsRunSettings, VectorRunSettings
from relaxion.training.seeds import named_generator
from relaxion.training.statistics import MetricMeans
from relaxion.training.trainer import Trainer, checked_finite

LONGEST_MOVE, LARGEST_STRAIN = 1.0, 0.1  # Å; of the bare policy. The guard's trust radius is what binds in use.


class MetalsTrainer:
    """Metric first, gate second; each resumable to the bit."""

    def __init__(self, settings: MetalsRunSettings) -> None:
        self.settings = settings
        seed = settings.training.seed
        bounds = MoveActions(LONGEST_MOVE, LARGEST_STRAIN)
        self.policy = MetricPolicy(bounds, settings.metric, named_generator(seed, "agent"))
        self.imitation = MetricImitation(
            self.policy,
            [Source(p, s, share) for p, s, share in self._worlds(settings.metals.shares)],
            settings.imitation,
            named_generator(seed, "replay"),
        )
        self.assessor = MetalsAssessor(settings.training.assessment_starts)
        self.means = MetricMeans()
        self._gate: Trainer | None = None  # made when its turn comes

    def _worlds(self, shares: dict[str, float]) -> list[tuple[Any, MetalStarts, float]]:
        metals = self.settings.metals
        emt_share = metals.emt_share
        worlds = [("emt", EMT_METALS, emt_share), ("eam", EAM_METALS, 1 - emt_share)]
        return [(potential(name), self._starts(elements, shares), s) for name, elements, s in worlds if s > 0]

    def _starts(self, elements: tuple[str, ...], shares: dict[str, float]) -> MetalStarts:
        metals = self.settings.metals
        return MetalStarts(
            elements=elements,
            sizes=(metals.smallest_n_atoms, metals.largest_n_atoms),
            shares=shares,
            rattle_angstrom=(0.03, metals.largest_rattle_angstrom),
            free_share=metals.free_cell_share,
            adsorbates=ADSORBATES if elements == EMT_METALS else (),
            largest_slab=metals.largest_slab_n_atoms,
        )

    @property
    def step(self) -> int:
        return self.imitation.n_updates + (0 if self._gate is None else self._gate.step)

    @property
    def steps_per_round(self) -> int:
        return self.settings.training.n_environments

    @property
    def gate_trainer(self) -> Trainer:
        """The agent that turns the knobs of the guard around the finished metric."""
        if self._gate is None:
            self.policy.requires_grad_(False)
            worlds = self._worlds(self.settings.metals.gate_shares)
            metrics = LearnedMetrics(self.policy.network)

            def gate() -> GateEnvironment:
                return GateEnvironment(worlds, metrics, self.settings.gate)

            self._gate = Trainer(self._gate_settings(), task("gate", gate))
            self._stay_near_the_rule(self._gate.agent)
        return self._gate

    def _stay_near_the_rule(self, agent: Any) -> None:
        """The gate begins at the hand-made rule, and every departure has to pay."""
        for name in ("policy", "target_policy"):
            if (network := getattr(agent, name, None)) is not None:  # SAC has no target policy
                begin_at_the_rule(network)
        weight = self.settings.gate.departure_penalty
        if weight > 0:
            agent.policy_penalty = lambda _batch, actions: weight * actions.square().sum(dim=-1)

    def _gate_settings(self) -> VectorRunSettings:
        whole = self.settings
        return VectorRunSettings(
            agent_name=whole.agent_name, training=whole.training, agent=whole.agent, networks=whole.networks
        )

    def prepare(self, folder: Path) -> None:
        """Core, BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def advance(self) -> None:
        """One update of the metric, or one step of the gate's environments."""
        if self.imitation.done:
            self.gate_trainer.advance()
        else:
            self.means.add_numbers(self.imitation.update())

    def metrics(self) -> dict[str, float]:
        own: dict[str, float] = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls}
        own |= self.means.take()
        if self._gate is not None:
            own |= {k: v for k, v in self._gate.metrics().items() if k != "time/total_timesteps"}
        return own

    @property
    def force_calls(self) -> int:
        """Spent on training so far. (The gate's first calls of each relaxation are not counted.)"""
        return self.imitation.force_calls + (0 if self._gate is None else self._gate.step)

    def take_events(self) -> list[Event]:
        return []

    def gate(self) -> Gate | None:
        """As learned so far; None before its warm-up is over, when the guard's own rule is better."""
        if self._gate is None or self._gate.n_updates == 0:
            return None
        return gate_from(self._gate.agent.policy)

    def chain(self) -> Stepper:
        """What a relaxer would use."""
        settings = QuasiNewtonSettings()
        return Stepper(settings, quasi_newton=Guard(settings, LearnedMetrics(self.policy.network), self.gate()))

    def assess(self, stop: Callable[[], bool] | None = None) -> MetalsAssessed:
        return self.assessor(self.chain, stop)

    def result(self, final: MetalsAssessed, wall_time_seconds: float) -> RelaxationResult:
        measured = final.metrics()
        return RelaxationResult(
            agent=self.settings.agent_name,
            task=self.settings.training.task,
            seed=self.settings.training.seed,
            steps=self.step,
            final_return_mean=measured["eval/mean_reward"],
            final_return_worst=-float(final.all_calls.max()),
            episodes=0 if self._gate is None else self._gate.episodes.finished,
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
            final_force_calls_mean=measured["eval/force_calls_mean"],
            final_force_calls_median=measured["eval/force_calls_median"],
            final_success_rate=final.success_rate,
            force_calls_bfgs=final.baselines["BFGS"],
            force_calls_fire=final.baselines["FIRE"],
            training_force_calls=self.force_calls,
            potential="emt and eam",
            structures="metals",
        )

    def weights(self) -> dict[str, Tensor]:
        own = joined({"metric": self.policy.state_dict()})
        return own if self._gate is None else own | joined({"gate": self._gate.weights()})

    def start_from(self, stored: Stored) -> None:
        """Take over an old metric; the gate is learned anew."""
        self.policy.load_state_dict(stored.part("metric"))

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs. A DivergedError when the metric is not worth keeping; the gate checks its own."""
        checked_finite(self.policy.state_dict(), self.step)
        parts = {"metric": self.policy.state_dict(), "imitation": self.imitation.snapshot()}
        parts["means"] = self.means.snapshot()
        if self._gate is not None:
            parts["gate"] = self._gate.snapshot()
        return joined(parts)

    def restore(self, stored: Stored) -> None:
        self.imitation.restore(stored.part("imitation"))
        self.means.restore(stored.part("means"))
        if gate := stored.part("gate"):
            self.gate_trainer.restore(Stored(gate, stored.values))

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
