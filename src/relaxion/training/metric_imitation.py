"""Supervised learning of the metric: B⁻¹F is to be the way to the minimum.

Rounds of two parts. *Gather*: fresh starts are relaxed by the policy as it is, and all states on the way become lessons
(data aggregation: it learns where it goes). *Update*: Adam on the relative error of the step, measured in the energy of
the springs the network begins with, so that states near the minimum count as much as far ones:

    loss = mean √( e·B₀e / t·B₀t ),   e = B⁻¹F - t,   t = x_min - x  (strain included)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from relaxion.agents.shared import adam, backward, restore_snapshot, take_snapshot
from relaxion.errors import RestartError, RunError
from relaxion.experience.environment import Environment, EnvironmentSettings
from relaxion.generators.starts import Starts
from relaxion.networks.metric.lessons import Lessons, relative_errors
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.potentials.potential import Potential
from relaxion.settings import Settings
from relaxion.structures import Outcome
from relaxion.training.metric_data import finished_by_core, relax


class ImitationSettings(Settings):
    """How the metric learns from finished relaxations."""

    n_updates: int = Field(default=4000, ge=0)
    """Updates in all; the rate falls along half a cosine over them. 0: the metric stays as it is (--from-weights)."""

    n_lessons: int = Field(default=64, ge=1)
    """Lessons per update."""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Of Adam, at the start."""

    final_learning_rate: float = Field(default=1e-5, gt=0)
    """At the end."""

    largest_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened: one odd structure must not throw the weights off."""

    updates_per_round: int = Field(default=40, ge=1)
    """Between two gatherings."""

    starts_per_round: int = Field(default=64, ge=1)
    """Relaxations per gathering; six to ten lessons come of each."""

    rounds_before: int = Field(default=6, ge=1)
    """Gatherings before the first update, by the springs alone."""

    rounds_kept: int = Field(default=60, ge=1)
    """Older lessons are forgotten: they show where an older policy went."""

    label_tolerance_ev_per_angstrom: float = Field(default=2e-4, gt=0)
    """A relaxation is finished here: its end is then known to about 1e-4 Å."""

    smallest_force_ev_per_angstrom: float = Field(default=8e-3, gt=0)
    """States below need no lesson: nobody steps from there, and their labels are not sharp."""

    farthest_angstrom: float = Field(default=1.0, gt=0)
    """States with an atom farther from the minimum teach nothing: no quadratic form knows the way."""

    max_force_calls: int = Field(default=40, ge=2)
    """Force calls of the policy in a relaxation; what takes longer is left to the core, or given up."""

    core_force_calls: int = Field(default=0, ge=0)
    """Force calls of the classical core for what the policy did not finish, which then teaches too. 0: it does not."""

    trust_angstrom: float = Field(default=0.3, gt=0)
    """Longest displacement in a step of a relaxation."""


@dataclass(frozen=True)
class Source:
    """A potential and the structures it may judge."""

    potential: Potential
    starts: Starts
    share: float = 1.0


class MetricImitation:
    """`while not learner.done: learner.update()`. All that is random comes from the generator."""

    def __init__(
        self,
        policy: MetricPolicy,
        sources: Sequence[Source],
        settings: ImitationSettings | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.policy, self.sources = policy, list(sources)
        self.settings = settings or ImitationSettings()
        self.generator = generator or torch.Generator().manual_seed(0)
        self.parameters = list(policy.network.parameters())
        self.optimizer = adam(self.parameters, self.settings.learning_rate)
        self.rounds: list[Lessons] = []
        self.counters = torch.zeros(2, dtype=torch.int64)  # updates, force calls
        self._pool: Lessons | None = None

    @property
    def n_updates(self) -> int:
        return int(self.counters[0])

    @property
    def force_calls(self) -> int:
        return int(self.counters[1])

    @property
    def done(self) -> bool:
        return self.n_updates >= self.settings.n_updates

    @property
    def n_lessons(self) -> int:
        return sum(part.number for part in self.rounds)

    def update(self) -> dict[str, float]:
        """One update, after a gathering where one is due; and what it showed."""
        metrics: dict[str, float] = {}
        if not self.rounds:
            for _ in range(self.settings.rounds_before):
                metrics = self.gather()
        elif self.n_updates % self.settings.updates_per_round == 0:
            metrics = self.gather()
        return metrics | self._descend()

    def gather(self) -> dict[str, float]:
        """Relax fresh starts with the present policy; what finished becomes lessons."""
        settings = self.settings
        weights = torch.tensor([source.share for source in self.sources], dtype=torch.float64)
        source = self.sources[int(torch.multinomial(weights, 1, generator=self.generator))]
        environment = Environment(source.potential, source.starts, self._environment_settings())
        start = environment.reset(self.generator, settings.starts_per_round)
        found = relax(environment, lambda state: self.policy.move(state), start)
        by_itself = found.outcomes == Outcome.CONVERGED
        if settings.core_force_calls:
            label = settings.label_tolerance_ev_per_angstrom
            found = finished_by_core(found, source.potential, label, settings.core_force_calls)
        self.counters[1] += int(found.calls.sum())
        lessons = found.lessons(settings.smallest_force_ev_per_angstrom, settings.farthest_angstrom)
        if lessons is not None:
            self.rounds = [*self.rounds, lessons][-settings.rounds_kept :]
            self._pool = None
        return {
            "imitation/finished_share": float(by_itself.double().mean()),
            "imitation/calls_to_label": float(found.calls.double().mean()),
        }

    def _environment_settings(self) -> EnvironmentSettings:
        return EnvironmentSettings(
            force_tolerance_ev_per_angstrom=self.settings.label_tolerance_ev_per_angstrom,
            max_force_calls=self.settings.max_force_calls,
            max_displacement_angstrom=self.settings.trust_angstrom,
            stall_length_angstrom=0.0,
        )

    def _descend(self) -> dict[str, float]:
        self.optimizer.param_groups[0]["lr"] = learning_rate = self._learning_rate()
        errors = relative_errors(self.policy.network, self._sample())
        loss = errors.mean()
        gradients = backward(loss, self.optimizer)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        if bool(torch.isfinite(norm)):  # a state that no weights can stand must not end all
            factor = (self.settings.largest_gradient_norm / norm.clamp_min(1e-12)).clamp_max(1)
            for gradient in gradients:
                gradient.mul_(factor)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.counters[0] += 1
        return {
            "imitation/relative_error": float(errors.detach().mean()),
            "imitation/relative_error_median": float(errors.detach().median()),
            "imitation/gradient_norm": float(norm),
            "imitation/learning_rate": learning_rate,
        }

    def _learning_rate(self) -> float:
        share = min(1.0, self.n_updates / self.settings.n_updates)
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

    def _sample(self) -> Lessons:
        if not self.rounds:
            raise RunError(
                "nothing to learn from: none of the relaxations came to "
                f"{self.settings.label_tolerance_ev_per_angstrom:g} eV/Å within {self.settings.max_force_calls} force "
                f"calls and {self.settings.farthest_angstrom:g} Å of their start; allow more of either, or perturb less"
            )
        if self._pool is None:
            self._pool = Lessons.concatenate(self.rounds)
        which = torch.randint(self._pool.number, (self.settings.n_lessons,), generator=self.generator)
        return self._pool.select(which)

    def snapshot(self) -> dict[str, Tensor]:
        """Everything, as flat tensors: weights, Adam, generator, counters, lessons."""
        tensors = take_snapshot(self._parts())
        for number, part in enumerate(self.rounds):
            tensors |= {f"lessons.{number}.{name}": tensor.clone() for name, tensor in part.tensors().items()}
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on exactly where the snapshot was taken."""
        rounds: dict[int, dict[str, Tensor]] = {}
        for key in [key for key in tensors if key.startswith("lessons.")]:
            _, number, name = key.split(".", 2)
            rounds.setdefault(int(number), {})[name] = tensors[key]
        restore_snapshot(self._parts(), {k: v for k, v in tensors.items() if not k.startswith("lessons.")})
        try:
            self.rounds = [Lessons.of_tensors(rounds[number]) for number in sorted(rounds)]
        except KeyError as error:
            raise RestartError(f"the snapshot's lessons lack {error}; it was not written by this version") from error
        self._pool = None

    def _parts(self) -> dict:
        return {
            "policy": self.policy,
            "optimizer": self.optimizer,
            "generator": self.generator,
            "counters": self.counters,
        }
