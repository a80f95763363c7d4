"""Lessons from the user's own structures and calculator: fine-tuning of any policy with fresh force calls."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import torch
from ase import Atoms
from ase.symbols import Symbols
from pydantic import Field
from torch import Generator

from relaxion.bench.assessment import Starts
from relaxion.errors import MissingStressError, RunError
from relaxion.generators.perturbations import perturbation
from relaxion.generators.sources import structure_source
from relaxion.generators.starts import PerturbedStarts
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.potentials.potential import Potential
from relaxion.potentials.registry import make_potential
from relaxion.structures import Structures
from relaxion.training.lessons.guarded import live_examples
from relaxion.training.lessons.live import Examples, LiveLessonSettings, Source
from relaxion.training.lessons.plans import STARTS_SEED, Plan

MOST_MADE = 100  # structures, where they are not of a file
VALIDATION_MODULUS = 5  # one structure in so many is assessed, and not trained on


class FileLessonSettings(LiveLessonSettings):
    """Which structures and which calculator; relaxations are made under the guard, as in use."""

    lesson_updates: int = Field(default=300, ge=0)
    """Updates in all; the rate falls along half a cosine over them."""

    lessons_per_update: int = Field(default=24, ge=1)
    """States per update."""

    lesson_learning_rate: float = Field(default=4e-4, gt=0)
    """A policy that is good already goes on with small steps."""

    lesson_starts: int = Field(default=12, ge=1)
    """Relaxations per gathering."""

    lesson_updates_per_gathering: int = Field(default=10, ge=1)
    """Updates between two gatherings."""

    lesson_gatherings_before: int = Field(default=2, ge=1)
    """Gatherings before the first update."""

    lesson_gatherings_kept: int = Field(default=30, ge=1)
    """Older lessons are forgotten."""

    lesson_tolerance_ev_per_angstrom: float = Field(default=5e-3, gt=0)
    """A relaxation is finished here: tighter than users ask for, because its end is the label of all states before."""

    lesson_smallest_force_ev_per_angstrom: float = Field(default=0.03, gt=0)
    """States below need no lesson."""

    lesson_force_calls: int = Field(default=100, ge=2)
    """Of one relaxation."""

    lesson_under_guard: bool = True
    """As in use."""

    calculator: str = ""
    """By the name that `potential` takes."""

    structures: str = ""
    """A file that ASE reads, or any source of structures of the task relax."""

    perturbation: str = "rattle:0.08"
    """Of every start, so that few structures give many."""

    free_cell: bool = False
    """Relax the cells too."""


class FilePlan(Plan):
    """The user's own world."""

    structures = "own structures"
    fails_on = ("Structures other than those of its files, and other calculators, were never tried.",)

    def __init__(self, settings: FileLessonSettings, starts: int) -> None:
        if not settings.structures or not settings.calculator:
            raise RunError(
                "fine-tuning needs structures and a calculator: the settings structures (as my.xyz) and calculator "
                "(as my_module:make)"
            )
        self.settings, self.per_kind = settings, starts
        self.engines = settings.calculator
        if settings.free_cell and not self.potential.has_stress:
            raise MissingStressError(f"{self.potential.name} gives no stress; leave out free_cell")

    @cached_property
    def potential(self) -> Potential:
        return make_potential(self.settings.calculator)

    @cached_property
    def _sides(self) -> tuple[list[Atoms], list[Atoms]]:
        """Trained on, and assessed: by the structure's place. A single structure is on both, perturbed differently."""
        text = self.settings.structures
        named = text.partition(":")[0] in ("file", "b2", "alloys", "packings")
        source = structure_source(text if named else f"file:{text}")
        images = source(MOST_MADE, torch.Generator().manual_seed(0), self.potential)
        taught = [atoms for place, atoms in enumerate(images) if not _is_apart(place)]
        apart = [atoms for place, atoms in enumerate(images) if _is_apart(place)]
        return (taught, apart) if taught and apart else (images, images)

    def _starts_of(self, images: list[Atoms]) -> PerturbedStarts:
        pool = Structures.from_ase(images, cell_free=[self.settings.free_cell and bool(a.pbc.all()) for a in images])
        return PerturbedStarts(pool, [perturbation(self.settings.perturbation)])

    def examples(self, policy: MetricPolicy, generator: Generator, /) -> Examples:
        source = Source(self.potential, self._starts_of(self._sides[0]))
        return live_examples(policy, [source], self.settings, generator)

    def starts(self) -> list[Starts]:
        drawn = self._starts_of(self._sides[1]).sample(torch.Generator().manual_seed(STARTS_SEED), self.per_kind)
        return [Starts("own", self.potential, drawn)]

    def card(self) -> dict[str, Any]:
        images = self._sides[0]
        numbers, sizes = sorted({int(n) for atoms in images for n in atoms.numbers}), [len(atoms) for atoms in images]
        periodic = {bool(atoms.pbc.any()) for atoms in images}
        return {
            "elements": tuple(Symbols(numbers)),
            "smallest_n_atoms": min(sizes),
            "largest_n_atoms": max(sizes),
            "potential": self.engines,
            "starts": (f"{len(images)} structures of {self.settings.structures}", self.settings.perturbation),
            "cells": "free" if self.settings.free_cell else "fixed",
            "periodic": periodic.pop() if len(periodic) == 1 else None,
        }


def _is_apart(place: int) -> bool:
    return int(hashlib.sha256(str(place).encode()).hexdigest()[:8], 16) % VALIDATION_MODULUS == 0
