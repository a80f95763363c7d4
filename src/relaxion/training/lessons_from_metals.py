"""Lessons from live relaxations of metals: which kinds of structures, and how much of each."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from relaxion.bench.assessment import Assessor, Starts
from relaxion.generators.alloys import EAM_METALS, EMT_METALS
from relaxion.generators.slabs import ADSORBATES
from relaxion.generators.starts import KINDS, MetalStarts
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.potentials import potential
from relaxion.structures import Structures
from relaxion.training.lessons import LiveExamples, LiveLessonSettings, Source

STARTS_SEED = 8500  # of validation starts: neither trained on nor those of any benchmark


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
        """By the names of `generators.metals.KINDS`, those that occur."""
        every = {kind: getattr(self, f"{kind}_share") for kind in ("alloy", "vacancy", "slab", "cluster", "packing")}
        return {name: share for name, share in every.items() if share > 0}

    def sources(self) -> list[Source]:
        """EMT and EAM, each with its metals."""
        worlds = [("emt", EMT_METALS, self.emt_share), ("eam", EAM_METALS, 1 - self.emt_share)]
        return [Source(potential(name), self._starts(elements), share) for name, elements, share in worlds if share > 0]

    def _starts(self, elements: tuple[str, ...]) -> MetalStarts:
        return MetalStarts(
            elements=elements,
            sizes=(self.smallest_n_atoms, self.largest_n_atoms),
            shares=self.shares,
            rattle_angstrom=(0.03, self.largest_rattle_angstrom),
            free_share=self.free_cell_share,
            adsorbates=ADSORBATES if elements == EMT_METALS else (),
            largest_slab=self.largest_slab_n_atoms,
        )

    def plan(self, starts: int) -> MetalsPlan:
        """With so many assessed starts of each kind."""
        return MetalsPlan(self, starts)


class MetalsPlan:
    """What a run does with these settings: examples, assessment, card. (`StorePlan` is the other kind.)"""

    engines, structures = "emt and eam", "metals"
    fails_on = (
        "The starts of the results are validation starts: never trained on, but the guard's rule was chosen on such.",
        "Other bonding than metals' was never seen; H, C, N and O only as single atoms on slabs of EMT's metals.",
    )

    def __init__(self, settings: MetalsSettings, starts: int) -> None:
        self.settings, self.per_kind = settings, starts

    def examples(self, policy: MetricPolicy, generator: Generator) -> LiveExamples:
        return LiveExamples(policy, self.settings.sources(), self.settings, generator)

    @cached_property
    def assessor(self) -> Assessor:
        return Assessor(self._starts)

    def _starts(self) -> list[Starts]:
        """The same `per_kind` starts of each kind every time, on EMT, and as many alloys on the EAM."""
        emt, eam = potential("emt"), potential("eam")
        found = [Starts(kind, emt, self._sample(EMT_METALS, kind, 0.0, place)) for place, kind in enumerate(KINDS)]
        found.append(Starts("free_cell", emt, self._sample(EMT_METALS, "alloy", 1.0, 10)))
        return [*found, Starts("eam", eam, self._sample(EAM_METALS, "alloy", 0.4, 11))]

    def _sample(self, elements: tuple[str, ...], kind: str, free: float, place: int) -> Structures:
        adsorbates = ADSORBATES if elements == EMT_METALS else ()
        starts = MetalStarts(elements, (4, 20), {kind: 1.0}, free_share=free, adsorbates=adsorbates)
        return starts.sample(torch.Generator().manual_seed(STARTS_SEED + place), self.per_kind)

    def compare(self, folder: Path) -> None:
        """Core, BFGS and FIRE on the assessed starts."""
        self.assessor.compare(folder)

    def errors(self, _network: MetricNetwork) -> dict[str, float]:
        """On lessons never trained on, for the log. There is nothing apart: every gathering is of new structures."""
        return {}

    def card(self) -> dict[str, Any]:
        """What is trained on."""
        metals = self.settings
        return {
            "elements": tuple(sorted({*EMT_METALS, *EAM_METALS})),
            "adsorbates": ADSORBATES,
            "smallest_n_atoms": metals.smallest_n_atoms,
            "largest_n_atoms": metals.largest_n_atoms,
            "potential": "emt (Al Cu Ag Au Ni Pd Pt) and eam (16 metals)",
            "starts": (
                *(f"{kind} {share:g}" for kind, share in metals.shares.items()),
                f"displaced by Gaussians of up to {metals.largest_rattle_angstrom:g} Å",
                f"{metals.free_cell_share:.0%} of the crystals strained by up to 4 %, with a free cell",
            ),
            "cells": "both",
        }
