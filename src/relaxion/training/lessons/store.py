"""Lessons from the relaxations of a store, made once: for potentials whose force calls are expensive."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from pydantic import Field
from torch import Generator, Tensor

from relaxion.bench.assessment import CAP, FMAX, Calls, Starts
from relaxion.errors import RunError
from relaxion.memory.store import TrajectoryStore
from relaxion.memory.trajectory import Trajectory
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.metric.teacher import Lessons, TeachingSettings, relative_errors
from relaxion.potentials import potential
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State
from relaxion.structures.splits import ELEMENTS as HELD_APART
from relaxion.training.lessons.live import Examples, lessons_towards
from relaxion.training.lessons.plans import Plan

logger = logging.getLogger(__name__)

VALIDATION_MODULUS = 20  # one stored relaxation in so many is not trained on
TRUST_ANGSTROM = 0.3  # written into states, which must have one; the metric does not see it
MOLECULES, CRYSTALS = "molecules", "crystals"
STORES_APART = ":"


class StoreSettings(TeachingSettings):
    """Relaxations of a store, made once: for potentials whose force calls are expensive."""

    lesson_updates: int = Field(default=5000, ge=1)
    """Updates in all; the rate falls along half a cosine over them."""

    store: str = ""
    """Folder that `relaxion collect` filled; several with ':' between them."""

    molecule_share: float = Field(default=0.0, ge=0, le=1)
    """Of the lessons of an update, those from structures without any periodic direction. 1 or 0: only such, or none,
    and the policy is for such or for the others."""

    lesson_smallest_force_ev_per_angstrom: float = Field(default=0.03, gt=0)
    """States below need no lesson: nobody steps from there, and single precision blurs the way."""

    lesson_farthest_angstrom: float = Field(default=1.0, gt=0)
    """States with an atom farther from the end teach nothing: no quadratic form knows the way."""

    lesson_end_tolerance_ev_per_angstrom: float = Field(default=5e-3, gt=0)
    """A relaxation whose last structure has no larger force has found its minimum."""

    @property
    def shares(self) -> dict[str, float]:
        """How much of an update is of which group."""
        return {MOLECULES: self.molecule_share, CRYSTALS: 1 - self.molecule_share}


def is_validation(key: str) -> bool:
    """Of a stored relaxation, by its key alone, so that a store that grows keeps its two sides apart."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % VALIDATION_MODULUS == 0


def split_store(settings: StoreSettings) -> tuple[list[Trajectory], list[Trajectory]]:
    """What is trained on, and what is not; of crystals and molecules those that have a share in the training."""
    wanted = settings.shares
    stores = (TrajectoryStore.open(Path(path)) for path in settings.store.split(STORES_APART))
    every = [t for store in stores for t in store if wanted[group(t)] > 0]
    return [t for t in every if not is_validation(t.key)], [t for t in every if is_validation(t.key)]


def largest_forces(trajectory: Trajectory) -> Tensor:
    """Of every structure on the way, (T,)."""
    return largest_force(trajectory.structures, trajectory.evaluation)


def stored_lessons(trajectory: Trajectory, settings: StoreSettings) -> Lessons | None:
    """Every state above the smallest force, with the way to the end; None where the end is no minimum."""
    structures, evaluation, number = trajectory.structures, trajectory.evaluation, len(trajectory)
    last_force = float(largest_forces(trajectory)[-1])
    ended = trajectory.outcome == Outcome.CONVERGED or last_force < settings.lesson_end_tolerance_ev_per_angstrom
    if not ended or number < 2:
        return None
    trust = torch.full((number,), TRUST_ANGSTROM, dtype=structures.dtype)
    calls, still = torch.arange(1, number + 1), Move.zero(structures)
    state = State(structures, evaluation, None, still, evaluation.forces, trust, calls)
    ends = structures.select(torch.full((number,), number - 1))
    limits = settings.lesson_smallest_force_ev_per_angstrom, settings.lesson_farthest_angstrom
    return lessons_towards(ends, state, True, *limits)


def group(trajectory: Trajectory) -> str:
    """Whether anything is periodic."""
    return CRYSTALS if bool(trajectory.pbc.any()) else MOLECULES


@dataclass(frozen=True, eq=False)
class Group:
    """Lessons of one group, and how often each is drawn relative to the others."""

    lessons: Lessons
    weights: Tensor  # (n_lessons,)


def grouped_lessons(trajectories: Iterable[Trajectory], settings: StoreSettings) -> dict[str, Group]:
    """All lessons of the relaxations, in groups.

    A relaxation that took long has many lessons, most of them on the last soft mode. So that they do not drown the
    others, a lesson weighs the less the more its relaxation has: 1/√n.
    """
    parts: dict[str, list[Lessons]] = {}
    n_read = 0
    for trajectory in trajectories:
        n_read += 1
        if (lessons := stored_lessons(trajectory, settings)) is not None:
            parts.setdefault(group(trajectory), []).append(lessons)
    n_useless = n_read - sum(len(own) for own in parts.values())
    logger.info("%d relaxations read, %d of them teach nothing", n_read, n_useless)
    groups = {}
    for name, own in sorted(parts.items()):
        weights = [torch.full((part.number,), part.number**-0.5) for part in own]
        groups[name] = Group(Lessons.concatenate(own), torch.cat(weights))
    return groups


class StoredExamples(Examples):
    """Lessons that are all there: groups are drawn from by shares, lessons by weights."""

    def __init__(
        self, groups: Mapping[str, Group], shares: Mapping[str, float], number: int, generator: Generator
    ) -> None:
        self.number, self.generator = number, generator
        self.groups = {name: found for name, found in groups.items() if shares[name] > 0}
        self.shares = torch.tensor([shares[name] for name in self.groups], dtype=torch.float64)
        self.sums = {name: found.weights.double().cumsum(0) for name, found in self.groups.items()}

    def draw(self, _n_updates: int, /) -> tuple[Lessons, dict[str, float]]:
        """As many as an update takes, from the groups by their shares."""
        drawn = torch.multinomial(self.shares, self.number, replacement=True, generator=self.generator)
        parts = []
        for place, (name, found) in enumerate(self.groups.items()):
            count = int((drawn == place).sum())
            if count:
                sums = self.sums[name]
                places = torch.rand(count, generator=self.generator, dtype=torch.float64) * sums[-1]
                parts.append(found.lessons.select(torch.searchsorted(sums, places).clamp_max(len(sums) - 1)))
        return Lessons.concatenate(parts), {}


def mean_error(network: MetricNetwork, lessons: Lessons, batch: int = 256) -> float:
    """The mean relative error on all of the lessons, without learning from them."""
    errors = []
    with torch.no_grad():
        for first in range(0, lessons.number, batch):
            which = torch.arange(first, min(first + batch, lessons.number))
            errors.append(relative_errors(network, lessons.select(which)))
    return float(torch.cat(errors).mean())


class StorePlan(Plan):
    """Relaxations of a store; those that are not trained on are assessed."""

    structures = "universal"
    fails_on = ("Potentials other than those named were not trained on; see docs/results/relaxing.md for others.",)

    def __init__(self, settings: StoreSettings, starts: int) -> None:
        if not settings.store:
            raise RunError(
                "no store of relaxations: fill one with 'relaxion collect universal-data', and name its folder in the "
                "setting store"
            )
        self.settings, self.per_kind = settings, starts
        self.training, self.validation = split_store(settings)
        self.engines = " and ".join(sorted({trajectory.engine for trajectory in self.training}))

    def examples(self, _policy: MetricPolicy, generator: Generator, /) -> Examples:
        groups = grouped_lessons(self.training, self.settings)
        if not groups:
            raise RunError(f"the store {self.settings.store} holds no finished relaxation to learn from")
        shares = self.settings.shares if len(groups) > 1 else dict.fromkeys(groups, 1.0)
        examples = StoredExamples(groups, shares, self.settings.lessons_per_update, generator)
        examples.force_calls = sum(len(trajectory) for trajectory in (*self.training, *self.validation))
        return examples

    @cached_property
    def assessed(self) -> list[Trajectory]:
        """At most `per_kind` of each kind."""
        by_kind: dict[str, list[Trajectory]] = {}
        for trajectory in sorted(self.validation, key=lambda t: t.key):
            by_kind.setdefault(trajectory.kind, []).append(trajectory)
        return [trajectory for _, found in sorted(by_kind.items()) for trajectory in found[: self.per_kind]]

    def starts(self) -> list[Starts]:
        engines = {name: potential(name) for name in {trajectory.engine for trajectory in self.assessed}}
        return [Starts(t.kind, engines[t.engine], t.structures.select(torch.tensor([0]))) for t in self.assessed]

    def compare(self, folder: Path) -> None:
        """Also with who collected."""
        calls = tuple(stored_calls(trajectory) for trajectory in self.assessed)
        energies = tuple(float(t.energies[-1]) if n < CAP else None for t, n in zip(self.assessed, calls, strict=True))
        self.assessor.compare(folder, collector=Calls(calls, energies))

    def errors(self, network: MetricNetwork, /) -> dict[str, float]:
        groups = grouped_lessons(self.validation, self.settings)
        return {f"eval/relative_error_{name}": mean_error(network, found.lessons) for name, found in groups.items()}

    def card(self) -> dict[str, Any]:
        training = self.training
        numbers = sorted({int(number) for t in training for number in t.numbers.unique()})
        sizes = [t.n_atoms for t in training]
        kinds = {kind: sum(t.kind == kind for t in training) for kind in sorted({t.kind for t in training})}
        symbols = [chemical_symbols[number] for number in numbers]
        found = {bool(t.pbc.any()) for t in training}
        periodic = found.pop() if len(found) == 1 else None  # what all of them are; None where they differ
        return {
            "elements": tuple(symbols),
            "unseen": tuple(sorted(HELD_APART - set(symbols)))
            if periodic
            else (),  # measured in docs/results/relaxing.md
            "smallest_n_atoms": min(sizes),
            "largest_n_atoms": max(sizes),
            "potential": self.engines,
            "starts": tuple(f"{number} relaxations of kind {kind}" for kind, number in kinds.items()),
            "cells": "both" if any(bool(t.cell_free) for t in training) else "fixed",
            "periodic": periodic,
        }


def stored_calls(trajectory: Trajectory) -> int:
    """Structures evaluated until the first below the tolerance; the cap where none was."""
    below = (largest_forces(trajectory) < FMAX).nonzero().flatten()
    return int(below[0]) + 1 if len(below) else CAP
