"""What the task `metric` is taught with: live relaxations of metals, or a store (`relaxion collect`), whose expensive
force calls are paid once and learned from often. Each has its settings, and a plan of what a run does with them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from ase.data import chemical_symbols
from pydantic import Field, model_validator
from torch import Generator, Tensor

from relaxion.bench.assessment import CAP, FMAX, Assessor, Calls, Starts
from relaxion.errors import RunError
from relaxion.generators.alloys import EAM_METALS, EMT_METALS
from relaxion.generators.slabs import ADSORBATES
from relaxion.generators.starts import KINDS, MetalStarts
from relaxion.memory.store import TrajectoryStore
from relaxion.memory.trajectory import Trajectory
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.metric.teacher import Lessons, TeachingSettings, relative_errors
from relaxion.potentials import potential
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.structures.splits import ELEMENTS as HELD_APART
from relaxion.training.lessons import Examples, LiveLessonSettings, Source, lessons_towards, live_examples

logger = logging.getLogger(__name__)

STARTS_SEED = 8500  # of validation starts: neither trained on nor those of any benchmark
VALIDATION_MODULUS = 20  # one stored relaxation in so many is not trained on
TRUST_ANGSTROM = 0.3  # written into states, which must have one; the metric does not see it
MOLECULES, CRYSTALS = "molecules", "crystals"
STORES_APART = ":"


class Plan:
    """What a run does with these settings: examples, assessment, card."""

    structures: ClassVar[str]  # in words, for the result
    fails_on: ClassVar[tuple[str, ...]]
    engines: str

    def examples(self, policy: MetricPolicy, generator: Generator, /) -> Examples:
        """Lessons for the policy."""
        raise NotImplementedError

    def starts(self) -> list[Starts]:
        """To be assessed, never trained on; the same every time, so many of each kind."""
        raise NotImplementedError

    @cached_property
    def assessor(self) -> Assessor:
        return Assessor(self.starts)

    def compare(self, folder: Path) -> None:
        """Core, BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def errors(self, _network: MetricNetwork, /) -> dict[str, float]:
        """On lessons never trained on, for the log, where some are kept apart."""
        return {}

    def card(self) -> dict[str, Any]:
        """What is trained on."""
        raise NotImplementedError


class MetalsSettings(LiveLessonSettings):
    """Lessons from live relaxations: kinds of structures, and how much of each."""

    lesson_updates: int = Field(default=5000, ge=0)
    """Updates in all; the rate falls along half a cosine over them. 0: the metric stays as it is (--from-weights)."""

    emt_share: float = Field(default=0.5, ge=0, le=1)
    """Of the structures, those judged by EMT (7 metals); the rest by the analytic EAM (16 metals)."""

    smallest_n_atoms: int = Field(default=2, ge=1)
    """Atoms of the smallest structure."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest one."""

    alloy_share: float = Field(default=0.5, ge=0)
    """Weight of random alloys on lattices among the kinds of starts."""

    vacancy_share: float = Field(default=0.1, ge=0)
    """Weight of alloys with a vacancy."""

    slab_share: float = Field(default=0.35, ge=0)
    """Weight of slabs, many with atoms on top, many with a fixed layer: the kind that is hardest to learn."""

    largest_slab_n_atoms: int = Field(default=27, ge=4)
    """Atoms of the largest slab, atoms on top not counted; the smallest has at least 4."""

    cluster_share: float = Field(default=0.1, ge=0)
    """Weight of random clusters, far from any minimum."""

    packing_share: float = Field(default=0.1, ge=0)
    """Weight of random packings in periodic cells, far from any minimum."""

    surface_share: float = Field(default=0.0, ge=0)
    """Weight of slabs of any low-index facet (fcc, bcc, hcp), many with atoms or small molecules on top."""

    step_share: float = Field(default=0.0, ge=0)
    """Weight of such slabs with steps."""

    defect_share: float = Field(default=0.0, ge=0)
    """Weight of pure and ordered crystals with an interstitial, exchanged or foreign atom."""

    boundary_share: float = Field(default=0.0, ge=0)
    """Weight of twins and tilt boundaries between two grains."""

    largest_defect_n_atoms: int = Field(default=40, ge=16)
    """Atoms of the largest crystal with a defect or a boundary."""

    particle_share: float = Field(default=0.0, ge=0)
    """Weight of larger clusters: half of them cut from crystals, half random."""

    largest_particle_n_atoms: int = Field(default=60, ge=3)
    """Atoms of the largest of them."""

    free_cell_share: float = Field(default=0.4, ge=0, le=1)
    """Of the crystals, those that are strained and relax with their cell."""

    largest_rattle_angstrom: float = Field(default=0.3, gt=0)
    """Widest Gaussian by which atoms are displaced."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.smallest_n_atoms > self.largest_n_atoms:
            raise ValueError(
                f"smallest_n_atoms {self.smallest_n_atoms} is above largest_n_atoms {self.largest_n_atoms}"
            )
        if not self.shares:
            raise ValueError("all shares of the kinds of starts are 0; give at least one of them a weight")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """By the names of `generators.starts.KINDS`, those that occur."""
        every = {kind: getattr(self, f"{kind}_share") for kind in KINDS}
        return {name: share for name, share in every.items() if share > 0}

    @property
    def largest_of_any_kind(self) -> int:
        """Atoms; what sits on slabs not counted."""
        own = dict.fromkeys(("slab", "surface", "step"), self.largest_slab_n_atoms)
        own |= {"defect": self.largest_defect_n_atoms, "boundary": self.largest_defect_n_atoms}
        own["particle"] = self.largest_particle_n_atoms
        return max(own.get(kind, self.largest_n_atoms) for kind in self.shares)

    def sources(self) -> list[Source]:
        """EMT and EAM, each with its metals; under the guard each kind of start is a source of its own."""
        worlds = [("emt", EMT_METALS, self.emt_share), ("eam", EAM_METALS, 1 - self.emt_share)]
        kinds = [{kind: share} for kind, share in self.shares.items()] if self.lesson_under_guard else [self.shares]
        return [
            Source(potential(name), self._starts(elements, shares), share * sum(shares.values()))
            for name, elements, share in worlds
            if share > 0
            for shares in kinds
        ]

    def _starts(self, elements: tuple[str, ...], shares: Mapping[str, float]) -> MetalStarts:
        return MetalStarts(
            elements=elements,
            sizes=(self.smallest_n_atoms, self.largest_n_atoms),
            shares=shares,
            rattle_angstrom=(0.03, self.largest_rattle_angstrom),
            free_share=self.free_cell_share,
            adsorbates=ADSORBATES if elements == EMT_METALS else (),
            largest_slab=self.largest_slab_n_atoms,
            largest_defect=self.largest_defect_n_atoms,
            largest_particle=self.largest_particle_n_atoms,
        )


class MetalsPlan(Plan):
    """Every gathering is of new structures: none are kept apart."""

    engines, structures = "emt and eam", "metals"
    fails_on = (
        "The results are on validation starts: never trained on, but the guard's rule was chosen on such starts.",
        "Bonding other than metallic was never seen; H, C, N and O only with EMT, on slabs and in defects.",
    )

    def __init__(self, settings: MetalsSettings, starts: int) -> None:
        self.settings, self.per_kind = settings, starts

    def examples(self, policy: MetricPolicy, generator: Generator, /) -> Examples:
        return live_examples(policy, self.settings.sources(), self.settings, generator)

    def starts(self) -> list[Starts]:
        """The same `per_kind` starts of each kind trained on every time, on EMT, and as many alloys on the EAM."""
        emt, eam, places = potential("emt"), potential("eam"), list(KINDS)
        found = [
            Starts(kind, emt, self._sample(EMT_METALS, kind, 0.0, places.index(kind))) for kind in self.settings.shares
        ]
        found.append(Starts("free_cell", emt, self._sample(EMT_METALS, "alloy", 1.0, 10)))
        return [*found, Starts("eam", eam, self._sample(EAM_METALS, "alloy", 0.4, 11))]

    def _sample(self, elements: tuple[str, ...], kind: str, free: float, place: int) -> Structures:
        adsorbates = ADSORBATES if elements == EMT_METALS else ()
        starts = MetalStarts(
            elements,
            (4, 20),
            {kind: 1.0},
            free_share=free,
            adsorbates=adsorbates,
            largest_defect=self.settings.largest_defect_n_atoms,
            largest_particle=self.settings.largest_particle_n_atoms,
        )
        return starts.sample(torch.Generator().manual_seed(STARTS_SEED + place), self.per_kind)

    def card(self) -> dict[str, Any]:
        metals = self.settings
        return {
            "elements": tuple(sorted({*EMT_METALS, *EAM_METALS})),
            "adsorbates": ADSORBATES,
            "smallest_n_atoms": metals.smallest_n_atoms,
            "largest_n_atoms": metals.largest_of_any_kind,
            "potential": "emt (Al Cu Ag Au Ni Pd Pt) and eam (16 metals)",
            "starts": (
                *(f"{kind} {share:g}" for kind, share in metals.shares.items()),
                f"displaced by Gaussians of up to {metals.largest_rattle_angstrom:g} Å",
                f"{metals.free_cell_share:.0%} of the crystals strained by up to 4 %, with a free cell",
            ),
            "cells": "both",
        }


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
                "no store of relaxations: fill one with 'relaxion collect universal-data --out STORE', then "
                "--set store=STORE"
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
