"""Datasets of relaxations, live or stored: each gives an update its examples.

Live relaxations are made between the updates by the policy that learns, under the safeguard as in use. So the policy
learns from the states that it comes to itself (data aggregation), and what it cannot finish alone becomes examples too.
Stored ones were made once, for potentials whose force calls are expensive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Generator, Tensor

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.database.trajectory import Trajectory
from relaxion.errors import RunError
from relaxion.files import Stored, joined
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.learned import LearnedHessians, states_at
from relaxion.optimizer.safeguard import StepRule
from relaxion.potentials.base import Potential
from relaxion.train.data.starts import Starts
from relaxion.train.supervised.examples import (
    FARTHEST,
    Examples,
    RelaxationExamples,
    examples_of_minimised,
    towards_minimum,
)
from relaxion.train.supervised.fit import ExampleDataset, FitSettings, relative_errors

logger = logging.getLogger(__name__)

MOLECULES = "molecules"
CRYSTALS = "crystals"
NEWEST_SHARE = 0.25  # of the examples of an update, those from relaxations that no earlier fit has seen


class LiveSettings(FitSettings):
    """Relaxations made for the examples, in rounds between the updates."""

    example_relaxations: int = Field(default=64, ge=1)
    """Relaxations per round; six to ten examples come of each."""

    example_interval_updates: int = Field(default=40, ge=1)
    """Updates between two rounds."""

    example_rounds_before: int = Field(default=6, ge=1)
    """Rounds before the first update."""

    example_rounds_kept: int = Field(default=60, ge=1)
    """Examples of older rounds are dropped: they show where an older policy went."""

    example_tolerance_ev_per_angstrom: float = Field(default=5e-3, gt=0)
    """A relaxation is finished here: tighter than users ask for, because its end is the label of all states before."""

    example_force_calls: int = Field(default=100, ge=2)
    """Of one relaxation; one that takes longer gives no examples."""


@dataclass(frozen=True)
class LiveSource:
    """A potential and the structures it may judge; how much of each round and update is theirs."""

    potential: Potential
    starts: Starts
    share: float = 1.0


class LiveExamples(ExampleDataset):
    """Fresh starts of every source relaxed with the present network; each update has examples of every source.

    One kind of start does not push out another.
    """

    def __init__(
        self,
        network: StiffnessNetwork,
        sources: Sequence[LiveSource],
        settings: LiveSettings,
        generator: Generator,
        rule: StepRule | None = None,
    ) -> None:
        """`rule`: the step rule of the policy file, if it has one."""
        self.network = network
        self.sources = list(sources)
        self.settings = settings
        self.generator = generator
        self.rule = rule
        self.rounds: list[dict[int, Examples]] = []  # those kept, by the place of the source
        self._pools: dict[int, Examples] = {}  # the same of all rounds, made when asked for
        total = sum(source.share for source in self.sources)
        self.shares = [source.share / total for source in self.sources]

    def draw(self, n_updates: int, /) -> tuple[Examples, dict[str, float]]:
        """After a round of relaxations where one is due."""
        scalars: dict[str, float] = {}
        due = 0
        if not self.rounds:
            due = self.settings.example_rounds_before
        elif n_updates % self.settings.example_interval_updates == 0:
            due = 1
        for _ in range(due):
            scalars = self.relax()
        parts = [part for place in range(len(self.sources)) if (part := self._drawn(place)) is not None]
        if not parts:
            raise RunError(
                "nothing to learn from: none of the relaxations came to "
                f"{self.settings.example_tolerance_ev_per_angstrom:g} eV/Å within {self.settings.example_force_calls} "
                f"force calls and {FARTHEST:g} Å of their start; allow more calls, or perturb less"
            )
        return Examples.concatenate(parts), scalars

    def relax(self) -> dict[str, float]:
        """One round of relaxations; scalars for the log."""
        found: dict[int, list[Relaxed]] = {place: [] for place in range(len(self.sources))}
        for potential in dict.fromkeys(source.potential for source in self.sources):
            places = [place for place, source in enumerate(self.sources) if source.potential is potential]
            for one in self._relaxed(potential, places):
                found[one.tag].append(one)
        relaxed = [one for own in found.values() for one in own]
        learned = {place: examples for place, own in found.items() if (examples := _examples(own)) is not None}
        self.rounds = [*self.rounds, learned][-self.settings.example_rounds_kept :]
        self._pools = {}
        self.force_calls += sum(one.force_calls for one in relaxed)
        return {
            "fit/finished_share": sum(one.converged for one in relaxed) / len(relaxed),
            "fit/calls_per_relaxation": sum(one.force_calls for one in relaxed) / len(relaxed),
        }

    def _relaxed(self, potential: Potential, places: Sequence[int]) -> list[Relaxed]:
        """Fresh starts of these sources in one batch, tagged with the place of their source."""
        settings = BatchSettings(
            fmax=self.settings.example_tolerance_ev_per_angstrom,
            max_force_calls=self.settings.example_force_calls,
            record=True,
        )
        model = LearnedHessians(self.network)
        relaxer = BatchRelaxer(potential, settings, lambda _: ("", new_stepper(policy_model=model, rule=self.rule)))
        before = potential.calls
        drawn = [
            (place, self.sources[place].starts.sample(self.generator, self._number(place, "example_relaxations")))
            for place in places
        ]
        self.force_calls += potential.calls - before  # a start may ask for its volume
        for place, starts in drawn:
            for atoms, cell_free in zip(starts.to_ase(), starts.cell_free.tolist(), strict=True):
                relaxer.add(atoms, cell=cell_free, tag=place)
        finished: list[Relaxed] = []
        while relaxer.n_running or relaxer.has_finished:
            finished += relaxer.advance()
        return finished

    def _number(self, place: int, name: str) -> int:
        """How much of a setting is this source's share."""
        return max(1, round(getattr(self.settings, name) * self.shares[place]))

    def _drawn(self, place: int) -> Examples | None:
        if place not in self._pools:
            pool = [found[place] for found in self.rounds if place in found]
            if not pool:
                return None
            self._pools[place] = Examples.concatenate(pool)
        pool = self._pools[place]
        number = self._number(place, "examples_per_update")
        return pool.select(torch.randint(pool.number, (number,), generator=self.generator))

    def forget(self) -> None:
        """Nobody learns from them any more."""
        self.rounds = []
        self._pools = {}

    def snapshot(self) -> dict[str, Tensor]:
        kept = {
            f"{number}.{place}.{name}": tensor.clone()
            for number, found in enumerate(self.rounds)
            for place, examples in found.items()
            for name, tensor in examples.tensors().items()
        }
        return joined({"rounds": kept}) | {"generator": self.generator.get_state()}

    def restore(self, stored: Stored) -> None:
        """A KeyError where an example lacks something."""
        self.generator.set_state(stored.tensors["generator"])
        places = sorted({tuple(map(int, name.split(".")[:2])) for name in stored.part("rounds")})
        self.forget()
        self.rounds = [{} for _ in range(1 + max((number for number, _ in places), default=-1))]
        for number, place in places:
            self.rounds[number][place] = Examples.of_tensors(stored.part(f"rounds.{number}.{place}"))


def _examples(relaxed: Sequence[Relaxed]) -> Examples | None:
    """Of those that converged: the bases of their steps, with the ways to their ends."""
    parts = []
    for one in relaxed:
        bases = [visit.point for visit in one.visited if visit.accepted and visit.point.finite]
        if len(bases) < 2 or not one.converged:
            continue
        end = bases.pop()
        found = towards_minimum(states_at([end] * len(bases)).structures, states_at(bases))
        if found is not None:
            parts.append(found)
    return Examples.concatenate(parts) if parts else None


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


class StoredExamples(ExampleDataset):
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


def mean_error(network: StiffnessNetwork, examples: Examples, batch: int = 256) -> float:
    """The mean relative error on all of the examples, without learning from them."""
    errors = []
    with torch.no_grad():
        for first in range(0, examples.number, batch):
            which = torch.arange(first, min(first + batch, examples.number))
            errors.append(relative_errors(network, examples.select(which)))
    return float(torch.cat(errors).mean())


class RelaxationSet(ExampleDataset):
    """Relaxations to learn from; the newest replace the oldest."""

    def __init__(self, number: int, most: int, seed: int) -> None:
        """`number`: examples per update; `most`: relaxations kept."""
        self.number = number
        self.most = most
        self.relaxations: list[RelaxationExamples] = []
        self.n_new = 0  # that no earlier fit has seen
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, found: RelaxationExamples) -> None:
        self.relaxations = [*self.relaxations, found][-self.most :]
        self.n_new += 1

    def draw(self, _n_updates: int, /) -> tuple[Examples, dict[str, float]]:
        """Relaxations first, then one example of each: long ones count no more than short ones."""
        total = len(self.relaxations)
        n_newest = round(self.number * NEWEST_SHARE) if 0 < self.n_new < total else 0
        first = total - self.n_new if n_newest else 0  # where all are new, or none is, anyone is drawn
        newest = torch.randint(first, total, (n_newest,), generator=self.generator)
        anyone = torch.randint(total, (self.number - n_newest,), generator=self.generator)
        parts = []
        for place in [*newest.tolist(), *anyone.tolist()]:
            singles = self.relaxations[place].singles
            parts.append(singles[int(torch.randint(len(singles), (1,), generator=self.generator))])
        return Examples.concatenate(parts), {}
