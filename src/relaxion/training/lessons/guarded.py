"""Lessons from live relaxations under the guard, as in use; each update has lessons of every source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Generator, Tensor

from relaxion.errors import RunError
from relaxion.files import Stored
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.metric.teacher import Lessons
from relaxion.optimize.batch import BatchRelaxer, BatchSettings
from relaxion.optimize.batch_relaxation import Relaxed
from relaxion.optimize.choice import new_stepper
from relaxion.optimize.learned import LearnedMetrics, states_at
from relaxion.optimize.trust_rule import DEFAULT, StepControl
from relaxion.potentials.potential import Potential
from relaxion.structures import Structures
from relaxion.training.lessons.live import LiveExamples, LiveLessonSettings, Source, lessons_towards

OTHERS = ((0, 0.5), (0, -0.5), (0.15, 0), (-0.15, 0), (0.15, 0.5), (-0.15, -0.5), (0.3, 0))
"""What further tries of a start add to the logarithms of the step's factor and of the trust radius."""


class GuardedExamples(LiveExamples):
    """Fresh starts of every source relaxed under the guard with the present policy; each update has lessons of each.

    So the policy learns from the states that users will bring it to, and one kind of start does not push out another.
    """

    def __init__(
        self,
        policy: MetricPolicy,
        sources: Sequence[Source],
        settings: LiveLessonSettings,
        generator: Generator,
        rule: StepControl | None = None,
    ) -> None:
        super().__init__(policy, sources, settings, generator)
        usual = rule or DEFAULT
        others = [replace(usual, log_scale=usual.log_scale + s, log_trust=usual.log_trust + t) for s, t in OTHERS]
        self.rules = [rule, *others][: settings.lesson_tries]
        self.kept: list[dict[int, Lessons]] = []  # by gathering and source
        self._pools: dict[int, Lessons] = {}  # the same by source, made when asked for
        total = sum(source.share for source in self.sources)
        self.shares = [source.share / total for source in self.sources]

    def draw(self, n_updates: int, /) -> tuple[Lessons, dict[str, float]]:
        told: dict[str, float] = {}
        due = self.settings.lesson_gatherings_before if not self.kept else 1
        if not self.kept or n_updates % self.settings.lesson_updates_per_gathering == 0:
            for _ in range(due):
                told = self.gather()
        parts = [part for place in range(len(self.sources)) if (part := self._drawn(place)) is not None]
        if not parts:
            raise RunError(self._nothing())
        return Lessons.concatenate(parts), told

    def gather(self) -> dict[str, float]:
        before = self._counted()
        by_place = self._relaxations()
        relaxed = [one for own in by_place.values() for one in own]
        taught = {place: self._lessons(own) for place, own in by_place.items()}
        found = {place: lessons for place, lessons in taught.items() if lessons is not None}
        self.kept, self._pools = [*self.kept, found][-self.settings.lesson_gatherings_kept :], {}
        self.force_calls += self._counted() - before
        return {
            "imitation/finished_share": sum(one.converged for one in relaxed) / len(relaxed),
            "imitation/calls_to_label": sum(one.force_calls for one in relaxed) / len(relaxed),
        }

    def _relaxations(self) -> dict[int, list[Relaxed]]:
        """Fresh starts of every source, relaxed, by the source's place."""
        return {
            place: self._relaxed(source.potential, self._starts(place)) for place, source in enumerate(self.sources)
        }

    def _starts(self, place: int) -> Structures:
        number = self._number(self.settings.lesson_starts, place)
        return self.sources[place].starts.sample(self.generator, number)

    def _counted(self) -> int:
        """By the potentials, so that starts that ask them are charged too."""
        return sum(potential.calls for potential in {source.potential for source in self.sources})

    def _number(self, total: int, place: int) -> int:
        return max(1, round(total * self.shares[place]))

    def _relaxed(self, potential: Potential, *starts: Structures) -> list[Relaxed]:
        """The cheapest relaxation of each, all in one batch; the tag is the place of the starts among the arguments."""
        settings = BatchSettings(
            fmax=self.settings.lesson_tolerance_ev_per_angstrom,
            max_force_calls=self.settings.lesson_force_calls,
            record=True,
        )
        metrics, rules = LearnedMetrics(self.policy.network), cycle(self.rules)
        relaxer = BatchRelaxer(potential, settings, lambda _: ("guard", new_stepper(metrics=metrics, rule=next(rules))))
        for place, own in enumerate(starts):
            for number, (atoms, cell) in enumerate(zip(own.to_ase(), own.cell_free.tolist(), strict=True)):
                for _ in self.rules:
                    relaxer.add(atoms.copy(), cell=cell, tag=(place, number))
        tries: dict[tuple[int, int], list[Relaxed]] = {}
        while relaxer.n_running or relaxer.has_finished:
            for one in relaxer.advance():
                tries.setdefault(one.tag, []).append(one)
        return [replace(_cheapest(own), tag=place) for (place, _), own in tries.items()]

    def _lessons(self, relaxed: Sequence[Relaxed]) -> Lessons | None:
        """The bases of their steps with their ways to the end."""
        lessons = [part for one in relaxed if (part := self._lessons_of(one)) is not None]
        return Lessons.concatenate(lessons) if lessons else None

    def _lessons_of(self, relaxed: Relaxed) -> Lessons | None:
        """Of one that converged."""
        bases = [visit.point for visit in relaxed.visited if visit.accepted and visit.point.finite]
        if len(bases) < 2 or not relaxed.converged:
            return None
        end, settings = bases.pop(), self.settings
        limits = settings.lesson_smallest_force_ev_per_angstrom, settings.lesson_farthest_angstrom
        return lessons_towards(states_at([end] * len(bases)).structures, states_at(bases), True, *limits)

    def _drawn(self, place: int) -> Lessons | None:
        if place not in self._pools:
            pool = [found[place] for found in self.kept if place in found]
            if not pool:
                return None
            self._pools[place] = Lessons.concatenate(pool)
        lessons = self._pools[place]
        number = self._number(self.settings.lessons_per_update, place)
        return lessons.select(torch.randint(lessons.number, (number,), generator=self.generator))

    def forget(self) -> None:
        self.kept, self._pools = [], {}

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"lessons.{number}.{place}.{name}": tensor.clone()
            for number, found in enumerate(self.kept)
            for place, lessons in found.items()
            for name, tensor in lessons.tensors().items()
        }

    def restore(self, stored: Stored) -> None:
        places = sorted({tuple(map(int, name.split(".")[:2])) for name in stored.part("lessons")})
        self.kept, self._pools = [{} for _ in range(1 + max((number for number, _ in places), default=-1))], {}
        for number, place in places:
            self.kept[number][place] = Lessons.of_tensors(stored.part(f"lessons.{number}.{place}"))


def _cheapest(tries: Sequence[Relaxed]) -> Relaxed:
    return min(tries, key=lambda one: (not one.converged, one.force_calls))


def live_examples(
    policy: MetricPolicy, sources: Sequence[Source], settings: LiveLessonSettings, generator: Generator
) -> LiveExamples:
    """As the settings want their relaxations made."""
    kind = GuardedExamples if settings.lesson_under_guard else LiveExamples
    return kind(policy, sources, settings, generator)
