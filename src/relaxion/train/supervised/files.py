"""Examples from the user's own structures and calculator: fine-tuning of any policy with fresh force calls."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from ase import Atoms
from ase.symbols import Symbols
from torch import Generator

from relaxion.errors import MissingStressError, RunError
from relaxion.model.stiffness_network import MetricNetwork
from relaxion.potentials.base import Potential
from relaxion.potentials.registry import make_potential
from relaxion.structures import Structures
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.sources import structure_source
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.judge.assessment import Starts
from relaxion.train.supervised.examples import is_validation
from relaxion.train.supervised.live import VALIDATION_SEED, FitPlan, LiveExamples, LiveSettings, LiveSource

MOST_MADE = 100  # structures, where they are not of a file
VALIDATION_ONE_IN = 5  # one structure in so many is assessed, and not trained on


class FileSourceSettings(LiveSettings):
    """Which structures and which calculator."""

    calculator: str = ""
    """By the name that `potential` takes."""

    structures: str = ""
    """A file that ASE reads, or any source of structures of the task relax."""

    perturbation: str = "rattle:0.08"
    """Of every start, so that few structures give many."""

    free_cell: bool = False
    """Relax the cells too."""


class FilePlan(FitPlan):
    """The user's own world."""

    structures = "own structures"
    fails_on = ("Structures other than those of its files, and other calculators, were never tried.",)

    def __init__(self, settings: FileSourceSettings, starts: int) -> None:
        if not settings.structures or not settings.calculator:
            raise RunError(
                "fine-tuning needs structures and a calculator: the settings structures (as my.xyz) and calculator "
                "(as my_module:make)"
            )
        self.settings = settings
        self.per_kind = starts
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
        training: list[Atoms] = []
        validation: list[Atoms] = []
        for place, atoms in enumerate(images):
            held_out = is_validation(str(place), VALIDATION_ONE_IN, digits=8)
            (validation if held_out else training).append(atoms)
        return (training, validation) if training and validation else (images, images)

    def _starts_of(self, images: list[Atoms]) -> PerturbedStarts:
        pool = Structures.from_ase(images, cell_free=[self.settings.free_cell and bool(a.pbc.all()) for a in images])
        return PerturbedStarts(pool, [perturbation(self.settings.perturbation)])

    def dataset(self, network: MetricNetwork, generator: Generator, /) -> LiveExamples:
        source = LiveSource(self.potential, self._starts_of(self._sides[0]))
        return LiveExamples(network, [source], self.settings, generator)

    def starts(self) -> list[Starts]:
        drawn = self._starts_of(self._sides[1]).sample(torch.Generator().manual_seed(VALIDATION_SEED), self.per_kind)
        return [Starts("own", self.potential, drawn)]

    def card(self) -> dict[str, Any]:
        images = self._sides[0]
        numbers = sorted({int(n) for atoms in images for n in atoms.numbers})
        sizes = [len(atoms) for atoms in images]
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
