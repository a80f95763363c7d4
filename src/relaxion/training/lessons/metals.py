"""Lessons from live relaxations of metals with EMT and EAM: how `metals` is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from relaxion.bench.assessment import Starts
from relaxion.generators.alloys import EAM_METALS, EMT_METALS
from relaxion.generators.slabs import ADSORBATES
from relaxion.generators.starts import KINDS, MetalStarts
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.potentials import potential
from relaxion.structures import Structures
from relaxion.training.lessons.guarded import live_examples
from relaxion.training.lessons.live import Examples, LiveLessonSettings, Source
from relaxion.training.lessons.plans import STARTS_SEED, Plan


class MetalsSettings(LiveLessonSettings):
    """Lessons from live relaxations: kinds of structures, and how much of each."""

    lesson_updates: int = Field(default=5000, ge=0)
    """Updates in all; the rate falls along half a cosine over them. 0: the metric stays as it was read."""

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

    def __init__(self, settings: MetalsSettings, starts: int) -> None:
        self.settings, self.per_kind = settings, starts
        where = "on slabs and in defects" if settings.defect_share else "on slabs"
        self.fails_on = (
            "The results are on validation starts: never trained on, but the guard's rule was chosen on such starts.",
            f"Bonding other than metallic was never seen; H, C, N and O only with EMT, {where}.",
        )

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
