"""Examples from fresh starts of a collection's kinds, relaxed with any engine: how `universal` is made.

The kinds are those of a recipe for `relaxion collect`: who makes the structures, which engine judges them. Nothing is
stored but the newest examples, so the policy always learns from the states that it comes to itself.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from ase.symbols import Symbols
from torch import Generator

from relaxion.errors import RelaxionWarning, RunError
from relaxion.model.stiffness_network import MetricNetwork
from relaxion.optimizer.safeguard import StepControl
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.structures import Structures
from relaxion.train.collecting.relaxing import Sizing, bring_to_volume
from relaxion.train.collecting.settings import CollectSettings, KindSettings
from relaxion.train.collecting.starts import Start, file_structures, make_start
from relaxion.train.data.splits import ELEMENTS as HELD_APART
from relaxion.train.judge.assessment import Starts
from relaxion.train.runs.recipe import find, read_toml
from relaxion.train.supervised.live import VALIDATION_SEED, FitPlan, LiveExamples, LiveSettings, LiveSource

NUMBERS = 2**40  # of starts to draw from: none comes twice
SAMPLED = 200  # starts of each kind whose elements and sizes the card tells


class KindSourceSettings(LiveSettings):
    """Which kinds."""

    kinds_of: str = "universal-data"
    """The recipe for `relaxion collect` whose kinds are made; how much of each is its `share`."""


@dataclass(frozen=True)
class KindStarts:
    """Starts of one kind, none like another, brought to the volume that their engine gives them."""

    collection: CollectSettings
    kind: str
    potential: Potential

    def sample(self, generator: Generator, n_structures: int) -> Structures:
        numbers = torch.randint(NUMBERS, (n_structures,), generator=generator).tolist()
        return Structures.concatenate(self.structures(numbers))

    def structures(self, numbers: list[int]) -> list[Structures]:
        """A start whose volume cannot be found keeps the one that it was made with."""
        starts = [self.start(number) for number in numbers]
        most = self.collection.kinds[self.kind].sizing_force_calls
        sizings = [None if start.crystal is None else Sizing(start.crystal, most) for start in starts]
        bring_to_volume(self.potential, [sizing for sizing in sizings if sizing is not None])
        scales = [1.0 if sizing is None or sizing.failed else sizing.scale for sizing in sizings]
        return [start.structure(scale) for start, scale in zip(starts, scales, strict=True)]

    def start(self, number: int) -> Start:
        return make_start(self.collection, self.kind, number)


class KindPlan(FitPlan):
    """Structures of all kinds at hand; elements and prototypes that are held out never occur."""

    structures = "universal"
    fails_on = (
        "Potentials other than those named were not trained on; see docs/results/relaxing.md for others.",
        "From single starts it needs more calls than the classical core, often where it ends in a lower minimum.",
    )

    def __init__(self, settings: KindSourceSettings, starts: int, rule: StepControl | None) -> None:
        self.settings = settings
        self.per_kind = starts
        self.rule = rule
        self.collection = CollectSettings.of(read_toml(find(settings.kinds_of)), {})
        self.wanted = {name: kind for name, kind in self.collection.kinds.items() if kind.share > 0}
        self.kinds = {name: kind for name, kind in self.wanted.items() if self._at_hand(kind)}
        if not self.kinds:
            raise RunError(f"none of the kinds of {settings.kinds_of} has a share and its engine or files at hand")
        self.engines = " and ".join(sorted({kind.engine for kind in self.kinds.values()}))

    def _at_hand(self, kind: KindSettings) -> bool:
        return kind.make != "file" or bool(file_structures(kind, self.collection.side))

    @cached_property
    def potentials(self) -> dict[str, Potential]:
        return {engine: potential(engine) for engine in {kind.engine for kind in self.kinds.values()}}

    def _starts_of(self, name: str) -> KindStarts:
        return KindStarts(self.collection, name, self.potentials[self.kinds[name].engine])

    def dataset(self, network: MetricNetwork, generator: Generator, /) -> LiveExamples:
        self._warn_of_missing_files()
        found = [(self._starts_of(name), kind.share) for name, kind in self.kinds.items()]
        sources = [LiveSource(starts.potential, starts, share) for starts, share in found]
        return LiveExamples(network, sources, self.settings, generator, self.rule)

    def _warn_of_missing_files(self) -> None:
        missing = {name: kind.share for name, kind in self.wanted.items() if name not in self.kinds}
        if not missing:
            return
        share = sum(missing.values()) / sum(kind.share for kind in self.wanted.values())
        warnings.warn(
            f"the files of {', '.join(missing)} are not here, {share:.0%} of the starts of {self.settings.kinds_of}: "
            "the policy will be another than with them; put them where the recipe says",
            RelaxionWarning,
            stacklevel=2,
        )

    def starts(self) -> list[Starts]:
        found = []
        for place, name in enumerate(self.kinds):
            own = self._starts_of(name)
            generator = torch.Generator().manual_seed(VALIDATION_SEED + place)
            found.append(Starts(name, own.potential, own.sample(generator, self.per_kind)))
        return found

    def card(self) -> dict[str, Any]:
        made = [make_start(self.collection, name, number).atoms for name in self.kinds for number in range(SAMPLED)]
        symbols = tuple(Symbols(sorted({int(number) for atoms in made for number in atoms.numbers})))
        sizes = [len(atoms) for atoms in made]
        return {
            "elements": symbols,
            "unseen": tuple(sorted(HELD_APART - set(symbols))),  # measured in docs/results/relaxing.md
            "smallest_n_atoms": min(sizes),
            "largest_n_atoms": max(sizes),
            "potential": self.engines,
            "starts": tuple(f"{name} {kind.share:g} ({kind.engine})" for name, kind in self.kinds.items()),
            "cells": "both",
            "periodic": True,
        }
