"""Where the lessons of a metric come from: live relaxations (under the guard: `guarded.py`; a store:
`store.py`).

A lesson is a state and the way to the end of its own relaxation; `networks/metric/teacher.py` learns from it. Live:
the policy that learns makes the relaxations itself, so it learns from the states that it comes to (data aggregation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from relaxion.errors import RunError
from relaxion.experience.environment import Environment, EnvironmentSettings, Relaxations, rollout
from relaxion.files import Stored
from relaxion.generators.starts import Starts
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.metric.teacher import Lessons, Teacher, TeachingSettings, way_to
from relaxion.optimize.batch import BatchRelaxer, BatchSettings
from relaxion.optimize.choice import new_stepper
from relaxion.potentials.potential import Potential
from relaxion.potentials.reward import largest_force
from relaxion.structures import Outcome, State, Structures


class LiveLessonSettings(TeachingSettings):
    """Relaxations made for the lessons, in gatherings between the updates."""

    lesson_starts: int = Field(default=64, ge=1)
    """Relaxations per gathering; six to ten lessons come of each."""

    lesson_updates_per_gathering: int = Field(default=40, ge=1)
    """Updates between two gatherings."""

    lesson_gatherings_before: int = Field(default=6, ge=1)
    """Gatherings before the first update, by the springs alone."""

    lesson_gatherings_kept: int = Field(default=60, ge=1)
    """Older lessons are forgotten: they show where an older policy went."""

    lesson_tolerance_ev_per_angstrom: float = Field(default=2e-4, gt=0)
    """A relaxation is finished here: its end is then known to about 1e-4 Å."""

    lesson_smallest_force_ev_per_angstrom: float = Field(default=8e-3, gt=0)
    """States below need no lesson: nobody steps from there, and their labels are not sharp."""

    lesson_farthest_angstrom: float = Field(default=1.0, gt=0)
    """States with an atom farther from the end teach nothing: no quadratic form knows the way."""

    lesson_force_calls: int = Field(default=40, ge=2)
    """Force calls of the policy in a relaxation; what takes longer is left to the core, or given up."""

    lesson_core_force_calls: int = Field(default=0, ge=0)
    """Force calls of the classical core for what the policy did not finish, which then teaches too. 0: it does not."""

    lesson_trust_angstrom: float = Field(default=0.3, gt=0)
    """Longest displacement in a step of a relaxation."""

    lesson_under_guard: bool = False
    """The relaxations are made under the guard, as in use. Each gathering has starts of every source and each update
    lessons of every source, by their shares. What the policy alone cannot finish teaches too."""

    lesson_tries: int = Field(default=1, ge=1, le=8)
    """Relaxations of each start under the guard, with steps and trust radii of different lengths; the one that took the
    fewest force calls teaches (search, then learn). Costs as many times the force calls; what it brings is in
    docs/decisions.md."""

    younger = ("lesson_tries",)

    @model_validator(mode="after")
    def _tries_under_the_guard(self) -> Self:
        if self.lesson_tries > 1 and not self.lesson_under_guard:
            raise ValueError(f"lesson_tries {self.lesson_tries} needs lesson_under_guard = true: rules are the guard's")
        return self


class Examples:
    """Lessons to draw from."""

    force_calls = 0  # spent on them

    def draw(self, _n_updates: int, /) -> tuple[Lessons, dict[str, float]]:
        """For the next update, so many having been made; and what there is to tell of them."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """What is nowhere else, for a checkpoint."""
        return {}

    def restore(self, stored: Stored) -> None:
        """The opposite of `tensors`."""


class Imitation:
    """`while not imitation.done: imitation.update()`. All that is random comes from the generator."""

    def __init__(
        self, policy: MetricPolicy, examples: Examples, settings: TeachingSettings, generator: Generator
    ) -> None:
        self.policy, self.examples, self.generator = policy, examples, generator
        self.teacher = Teacher(policy.network, settings)

    @property
    def n_updates(self) -> int:
        return self.teacher.n_updates

    @property
    def done(self) -> bool:
        return self.n_updates >= self.teacher.settings.lesson_updates

    def update(self) -> dict[str, float]:
        """One update, and what it and its lessons showed."""
        lessons, told = self.examples.draw(self.n_updates)
        return told | self.teacher.update(lessons)

    def snapshot(self) -> dict[str, Tensor]:
        """Everything, as flat tensors: weights, Adam, generator, counters, and lessons that are nowhere else."""
        tensors = {f"policy.{name}": tensor.clone() for name, tensor in self.policy.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.teacher.tensors().items()}
        counters = torch.tensor([self.n_updates, self.examples.force_calls])
        return tensors | {"generator": self.generator.get_state(), "counters": counters} | self.examples.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on exactly where the snapshot was taken."""
        stored = Stored(dict(tensors), {})
        counters = [*tensors["counters"].tolist(), 0]  # of a store, earlier releases kept the first alone
        self.policy.load_state_dict(stored.part("policy"))
        self.teacher.restore(stored.part("optimizer"), counters[0])
        self.generator.set_state(tensors["generator"])
        self.examples.restore(stored)
        self.examples.force_calls = counters[1] or self.examples.force_calls


@dataclass(frozen=True)
class Source:
    """A potential and the structures it may judge."""

    potential: Potential
    starts: Starts
    share: float = 1.0


class LiveExamples(Examples):
    """Fresh starts relaxed by the policy as it is; all states on the way of what finished become lessons."""

    def __init__(
        self, policy: MetricPolicy, sources: Sequence[Source], settings: LiveLessonSettings, generator: Generator
    ) -> None:
        self.policy, self.sources, self.settings, self.generator = policy, list(sources), settings, generator
        self.gatherings: list[Lessons] = []
        self._pool: Lessons | None = None

    @property
    def world(self) -> EnvironmentSettings:
        return EnvironmentSettings(
            force_tolerance_ev_per_angstrom=self.settings.lesson_tolerance_ev_per_angstrom,
            max_force_calls=self.settings.lesson_force_calls,
            max_displacement_angstrom=self.settings.lesson_trust_angstrom,
            stall_length_angstrom=0.0,
        )

    def draw(self, n_updates: int, /) -> tuple[Lessons, dict[str, float]]:
        """After a gathering where one is due."""
        told: dict[str, float] = {}
        if not self.gatherings:
            for _ in range(self.settings.lesson_gatherings_before):
                told = self.gather()
        elif n_updates % self.settings.lesson_updates_per_gathering == 0:
            told = self.gather()
        return self._sample(), told

    def gather(self) -> dict[str, float]:
        """Relax fresh starts with the present policy; what finished becomes lessons."""
        settings = self.settings
        weights = torch.tensor([source.share for source in self.sources], dtype=torch.float64)
        source = self.sources[int(torch.multinomial(weights, 1, generator=self.generator))]
        environment = Environment(source.potential, source.starts, self.world)
        start = environment.reset(self.generator, settings.lesson_starts)
        found = rollout(environment, lambda state: self.policy.move(state), start)
        by_itself = found.outcomes == Outcome.CONVERGED
        if settings.lesson_core_force_calls:
            tolerance = settings.lesson_tolerance_ev_per_angstrom
            found = finished_by_core(found, source.potential, tolerance, settings.lesson_core_force_calls)
        self.force_calls += int(found.calls.sum())
        lessons = lessons_of(found, settings.lesson_smallest_force_ev_per_angstrom, settings.lesson_farthest_angstrom)
        if lessons is not None:
            self.gatherings = [*self.gatherings, lessons][-settings.lesson_gatherings_kept :]
            self._pool = None
        return {
            "imitation/finished_share": float(by_itself.double().mean()),
            "imitation/calls_to_label": float(found.calls.double().mean()),
        }

    def _sample(self) -> Lessons:
        settings = self.settings
        if not self.gatherings:
            raise RunError(self._nothing())
        if self._pool is None:
            self._pool = Lessons.concatenate(self.gatherings)
        return self._pool.select(
            torch.randint(self._pool.number, (settings.lessons_per_update,), generator=self.generator)
        )

    def _nothing(self) -> str:
        settings = self.settings
        return (
            "nothing to learn from: none of the relaxations came to "
            f"{settings.lesson_tolerance_ev_per_angstrom:g} eV/Å within {settings.lesson_force_calls} force calls "
            f"and {settings.lesson_farthest_angstrom:g} Å of their start; allow more of either, or perturb less"
        )

    def forget(self) -> None:
        """Nobody learns from them any more."""
        self.gatherings, self._pool = [], None

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"lessons.{number}.{name}": tensor.clone()
            for number, lessons in enumerate(self.gatherings)
            for name, tensor in lessons.tensors().items()
        }

    def restore(self, stored: Stored) -> None:
        """A KeyError where a lesson lacks something."""
        kept = Stored(stored.part("lessons"), {})
        numbers = sorted({int(name.split(".")[0]) for name in kept.tensors})
        self.gatherings = [Lessons.of_tensors(kept.part(str(number))) for number in numbers]
        self._pool = None


def lessons_of(found: Relaxations, smallest_force: float, farthest: float) -> Lessons | None:
    """From relaxations that converged: states with a force above (eV/Å) and no atom farther from its end (Å)."""
    parts = []
    for numbers, state in found.visited:
        converged = found.outcomes[numbers] == Outcome.CONVERGED
        ends = found.ends.select(numbers).structures
        parts.append(lessons_towards(ends, state, converged, smallest_force, farthest))
    lessons = [part for part in parts if part is not None]
    return Lessons.concatenate(lessons) if lessons else None


def lessons_towards(
    ends: Structures, state: State, finished: Tensor | bool, smallest_force: float, farthest: float
) -> Lessons | None:
    """Of the states whose relaxation is finished, those with such a force and not too far from their end."""
    goal, forces = way_to(ends, state.structures), largest_force(state.structures, state.evaluation)
    good = (forces > smallest_force) & torch.isfinite(forces) & finished
    good &= goal.largest_displacements(state.structures) < farthest
    return Lessons(state, goal).select(good) if bool(good.any()) else None


def finished_by_core(found: Relaxations, potential: Potential, tolerance: float, max_force_calls: int) -> Relaxations:
    """The same, those that the policy did not bring to an end carried on by the classical core.

    What a policy cannot finish it would never learn from, and so never learn: the states where it went astray are those
    that it needs a lesson for.
    """
    unfinished = (found.outcomes == Outcome.STEP_LIMIT).nonzero().flatten()
    if len(unfinished) == 0:
        return found
    ends, free = list(found.ends.structures.to_ase()), found.ends.structures.cell_free.tolist()
    outcomes, calls = found.outcomes.clone(), found.calls.clone()
    settings = BatchSettings(fmax=tolerance, max_force_calls=max(1, max_force_calls - 1))
    relaxer = BatchRelaxer(potential, settings, lambda _: ("core", new_stepper()))
    for number in unfinished.tolist():
        relaxer.add(ends[number], tag=number, cell=free[number])
    while relaxer.n_running or relaxer.has_finished:
        for relaxed in relaxer.advance():
            ends[relaxed.tag] = relaxed.atoms
            calls[relaxed.tag] += relaxed.force_calls if relaxed.converged else max_force_calls
            if relaxed.converged:
                outcomes[relaxed.tag] = int(Outcome.CONVERGED)
    structures = Structures.from_ase(ends, cell_free=free).to(found.ends.structures.dtype)
    return replace(found, ends=replace(found.ends, structures=structures), outcomes=outcomes, calls=calls)
