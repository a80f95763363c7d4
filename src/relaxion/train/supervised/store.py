"""Examples from the relaxations of a store, made once: for potentials whose force calls are expensive."""

from __future__ import annotations

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

from relaxion.database.relaxations import RelaxationDatabase
from relaxion.database.trajectory import Trajectory
from relaxion.errors import RunError
from relaxion.files import Stored
from relaxion.model.stiffness_network import MetricNetwork
from relaxion.potentials import potential
from relaxion.train.data.splits import ELEMENTS as HELD_APART
from relaxion.train.experience.reward import largest_force
from relaxion.train.judge.assessment import CAP, FMAX, Calls, Starts
from relaxion.train.supervised.examples import Examples, examples_of_minimised, is_validation
from relaxion.train.supervised.fit import ExampleSet, FitSettings, relative_errors
from relaxion.train.supervised.live import FitPlan

logger = logging.getLogger(__name__)

VALIDATION_ONE_IN = 20  # one stored relaxation in so many is not trained on
MOLECULES = "molecules"
CRYSTALS = "crystals"
BETWEEN_STORES = ":"


class StoreSettings(FitSettings):
    """Which relaxations."""

    store: str = ""
    """Folder that `relaxion collect` filled; several with ':' between them."""

    molecule_share: float = Field(default=0.0, ge=0, le=1)
    """Of the examples of an update, those from structures without any periodic direction. 1 or 0: only such, or none,
    and the policy is for such or for the others."""

    @property
    def shares(self) -> dict[str, float]:
        """How much of an update is of which group."""
        return {MOLECULES: self.molecule_share, CRYSTALS: 1 - self.molecule_share}


def split_store(settings: StoreSettings) -> tuple[list[Trajectory], list[Trajectory]]:
    """What is trained on, and what is not; of crystals and molecules those that have a share in the training."""
    training: list[Trajectory] = []
    validation: list[Trajectory] = []
    for path in settings.store.split(BETWEEN_STORES):
        for trajectory in RelaxationDatabase.open(Path(path)):
            if settings.shares[group_of(trajectory)] > 0:
                held_out = is_validation(trajectory.key, VALIDATION_ONE_IN, digits=64)
                (validation if held_out else training).append(trajectory)
    return training, validation


def group_of(trajectory: Trajectory) -> str:
    """Whether anything is periodic."""
    return CRYSTALS if bool(trajectory.pbc.any()) else MOLECULES


@dataclass(frozen=True, eq=False)
class WeightedExamples:
    """Examples of one group, and how often each is drawn relative to the others."""

    examples: Examples
    weights: Tensor  # (number,)


def grouped_examples(trajectories: Iterable[Trajectory]) -> dict[str, WeightedExamples]:
    """All examples of the relaxations, in groups.

    A relaxation that took long has many examples, most of them on the last soft mode. So that they do not drown the
    others, an example weighs the less the more its relaxation has: 1/√n.
    """
    parts: dict[str, list[Examples]] = {}
    n_read = 0
    for trajectory in trajectories:
        n_read += 1
        if (examples := examples_of_minimised(trajectory)) is not None:
            parts.setdefault(group_of(trajectory), []).append(examples)
    n_useless = n_read - sum(len(own) for own in parts.values())
    logger.info("%d relaxations read, %d of them without examples", n_read, n_useless)
    groups = {}
    for name, own in sorted(parts.items()):
        weights = [torch.full((part.number,), part.number**-0.5) for part in own]
        groups[name] = WeightedExamples(Examples.concatenate(own), torch.cat(weights))
    return groups


class StoredExamples(ExampleSet):
    """Examples that are all there: groups are drawn from by shares, examples by weights."""

    def __init__(
        self, groups: Mapping[str, WeightedExamples], shares: Mapping[str, float], number: int, generator: Generator
    ) -> None:
        self.number = number
        self.generator = generator
        self.groups = {name: found for name, found in groups.items() if shares[name] > 0}
        self.shares = torch.tensor([shares[name] for name in self.groups], dtype=torch.float64)
        self.sums = {name: found.weights.double().cumsum(0) for name, found in self.groups.items()}

    def draw(self, _n_updates: int, /) -> tuple[Examples, dict[str, float]]:
        """As many as an update takes, from the groups by their shares."""
        drawn = torch.multinomial(self.shares, self.number, replacement=True, generator=self.generator)
        parts = []
        for place, (name, found) in enumerate(self.groups.items()):
            count = int((drawn == place).sum())
            if count:
                sums = self.sums[name]
                places = torch.rand(count, generator=self.generator, dtype=torch.float64) * sums[-1]
                parts.append(found.examples.select(torch.searchsorted(sums, places).clamp_max(len(sums) - 1)))
        return Examples.concatenate(parts), {}

    def snapshot(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def restore(self, stored: Stored) -> None:
        self.generator.set_state(stored.tensors["generator"])


def mean_error(network: MetricNetwork, examples: Examples, batch: int = 256) -> float:
    """The mean relative error on all of the examples, without learning from them."""
    errors = []
    with torch.no_grad():
        for first in range(0, examples.number, batch):
            which = torch.arange(first, min(first + batch, examples.number))
            errors.append(relative_errors(network, examples.select(which)))
    return float(torch.cat(errors).mean())


class StorePlan(FitPlan):
    """Relaxations of a store; those that are not trained on are assessed."""

    structures = "universal"
    fails_on = ("Potentials other than those named were not trained on; see docs/results/relaxing.md for others.",)

    def __init__(self, settings: StoreSettings, starts: int) -> None:
        if not settings.store:
            raise RunError(
                "no store of relaxations: fill one with 'relaxion collect universal-data', and name its folder in the "
                "setting store"
            )
        self.settings = settings
        self.per_kind = starts
        self.training, self.validation = split_store(settings)
        self.engines = " and ".join(sorted({trajectory.engine for trajectory in self.training}))

    def dataset(self, _network: MetricNetwork, generator: Generator, /) -> StoredExamples:
        groups = grouped_examples(self.training)
        if not groups:
            raise RunError(f"the store {self.settings.store} holds no finished relaxation to learn from")
        shares = self.settings.shares if len(groups) > 1 else dict.fromkeys(groups, 1.0)
        dataset = StoredExamples(groups, shares, self.settings.examples_per_update, generator)
        dataset.force_calls = sum(len(trajectory) for trajectory in (*self.training, *self.validation))
        return dataset

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
        groups = grouped_examples(self.validation)
        return {f"eval/relative_error_{name}": mean_error(network, found.examples) for name, found in groups.items()}

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
            else (),  # measured: docs/results/relaxing.md
            "smallest_n_atoms": min(sizes),
            "largest_n_atoms": max(sizes),
            "potential": self.engines,
            "starts": tuple(f"{number} relaxations of kind {kind}" for kind, number in kinds.items()),
            "cells": "both" if any(bool(t.cell_free) for t in training) else "fixed",
            "periodic": periodic,
        }


def stored_calls(trajectory: Trajectory) -> int:
    """Structures evaluated until the first below the tolerance; the cap where none was."""
    forces = largest_force(trajectory.structures, trajectory.evaluation)
    below = (forces < FMAX).nonzero().flatten()
    return int(below[0]) + 1 if len(below) else CAP
