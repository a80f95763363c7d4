"""Examples from live relaxations of metals with EMT and EAM: how `metals` is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from relaxion.model.stiffness_network import MetricNetwork
from relaxion.potentials.registry import potential
from relaxion.settings import nearest
from relaxion.structures import Structures
from relaxion.train.data.alloys import EAM_METALS, EMT_METALS
from relaxion.train.data.slabs import ADSORBATES
from relaxion.train.data.starts import KINDS, MetalStarts
from relaxion.train.judge.assessment import Starts
from relaxion.train.supervised.live import VALIDATION_SEED, FitPlan, LiveExamples, LiveSettings, LiveSource

SMALLEST_N_ATOMS = 2
LARGEST_RATTLE = 0.3  # Å: the widest Gaussian by which atoms are displaced
FREE_CELL_SHARE = 0.4  # of the crystals, those that are strained and relax with their cell


class MetalsSettings(LiveSettings):
    """Kinds of structures, and how much of each."""

    emt_share: float = Field(default=0.5, ge=0, le=1)
    """Of the structures, those judged by EMT (7 metals); the rest by the analytic EAM (16 metals)."""

    largest_n_atoms: int = Field(default=16, ge=2)
    """Atoms of the largest structure."""

    metal_starts: str = "alloy:0.5+vacancy:0.1+slab:0.35+cluster:0.1+packing:0.1"
    """Kinds of starts and how much of each, joined by `+`: alloy (random, on lattices), vacancy, slab (many with atoms
    on top, many with a fixed layer), cluster and packing (random, far from any minimum), surface (slabs of any
    low-index facet), step, defect (an interstitial, exchanged or foreign atom), boundary (twins and tilt
    boundaries), particle (larger clusters)."""

    largest_slab_n_atoms: int = Field(default=27, ge=4)
    """Atoms of the largest slab, atoms on top not counted; the smallest has at least 4."""

    largest_defect_n_atoms: int = Field(default=40, ge=16)
    """Atoms of the largest crystal with a defect or a boundary."""

    largest_particle_n_atoms: int = Field(default=60, ge=3)
    """Atoms of the largest particle."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.shares:
            raise ValueError("metal_starts names no kind with a share above 0")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """By the names of `generators.starts.KINDS`, those that occur, in that order."""
        given = {}
        for part in self.metal_starts.split("+"):
            name, _, share = part.strip().partition(":")
            if name not in KINDS:
                raise ValueError(f"metal_starts has no kind '{name}': {nearest(name, KINDS)}")
            given[name] = float(share or 1)
        return {name: given[name] for name in KINDS if given.get(name, 0) > 0}

    @property
    def largest_of_any_kind(self) -> int:
        """Atoms; what sits on slabs not counted."""
        own = dict.fromkeys(("slab", "surface", "step"), self.largest_slab_n_atoms)
        own |= {"defect": self.largest_defect_n_atoms, "boundary": self.largest_defect_n_atoms}
        own["particle"] = self.largest_particle_n_atoms
        return max(own.get(kind, self.largest_n_atoms) for kind in self.shares)

    def sources(self) -> list[LiveSource]:
        """Each kind of start with EMT and with EAM, each of these with its metals."""
        worlds = [("emt", EMT_METALS, self.emt_share), ("eam", EAM_METALS, 1 - self.emt_share)]
        return [
            LiveSource(potential(name), self._starts(elements, {kind: 1.0}), share * weight)
            for name, elements, share in worlds
            if share > 0
            for kind, weight in self.shares.items()
        ]

    def _starts(self, elements: tuple[str, ...], shares: Mapping[str, float]) -> MetalStarts:
        return MetalStarts(
            elements=elements,
            sizes=(SMALLEST_N_ATOMS, self.largest_n_atoms),
            shares=shares,
            rattle_angstrom=(0.03, LARGEST_RATTLE),
            free_share=FREE_CELL_SHARE,
            adsorbates=ADSORBATES if elements == EMT_METALS else (),
            largest_slab=self.largest_slab_n_atoms,
            largest_defect=self.largest_defect_n_atoms,
            largest_particle=self.largest_particle_n_atoms,
        )


class MetalsPlan(FitPlan):
    """Every round is of new structures: none need be held out."""

    engines = "emt and eam"
    structures = "metals"

    def __init__(self, settings: MetalsSettings, starts: int) -> None:
        self.settings = settings
        self.per_kind = starts
        where = "on slabs and in defects" if "defect" in settings.shares else "on slabs"
        self.fails_on = (
            "The results are on validation starts: never trained on, but the guard's rule was chosen on such starts.",
            f"Bonding other than metallic was never seen; H, C, N and O only with EMT, {where}.",
        )

    def dataset(self, network: MetricNetwork, generator: Generator, /) -> LiveExamples:
        return LiveExamples(network, self.settings.sources(), self.settings, generator)

    def starts(self) -> list[Starts]:
        """The same `per_kind` starts of each kind trained on every time, on EMT, and as many alloys on the EAM."""
        emt = potential("emt")
        eam = potential("eam")
        places = list(KINDS)
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
        return starts.sample(torch.Generator().manual_seed(VALIDATION_SEED + place), self.per_kind)

    def card(self) -> dict[str, Any]:
        metals = self.settings
        return {
            "elements": tuple(sorted({*EMT_METALS, *EAM_METALS})),
            "adsorbates": ADSORBATES,
            "smallest_n_atoms": SMALLEST_N_ATOMS,
            "largest_n_atoms": metals.largest_of_any_kind,
            "potential": "emt (Al Cu Ag Au Ni Pd Pt) and eam (16 metals)",
            "starts": (
                *(f"{kind} {share:g}" for kind, share in metals.shares.items()),
                f"displaced by Gaussians of up to {LARGEST_RATTLE:g} Å",
                f"{FREE_CELL_SHARE:.0%} of the crystals strained by up to 4 %, with a free cell",
            ),
            "cells": "both",
        }
