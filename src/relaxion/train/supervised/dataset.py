"""Datasets of relaxations: each gives an update its examples.

Live relaxations are made between the updates by the policy that learns, under the safeguard as in use. So the policy
learns from the states that it comes to itself (data aggregation), and what it cannot finish alone becomes examples too.
Relaxations of a relaxation database are what a policy is fine-tuned with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Generator, Tensor

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.errors import RunError
from relaxion.files import Stored, joined
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.learned import LearnedHessians, states_at
from relaxion.optimizer.safeguard import StepRule
from relaxion.potentials.base import Potential
from relaxion.train.data.starts import Starts
from relaxion.train.supervised.fit import (
    FARTHEST,
    ExampleDataset,
    Examples,
    FitSettings,
    RelaxationExamples,
    towards_minimum,
)

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
