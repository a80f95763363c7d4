"""How good is a policy? Force calls from fixed starts of every kind, beside the classical core, BFGS and FIRE.

Who relaxes is handed in: steppers under the guard (`under_guard`), or a rollout through the environment of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ase import Atoms

from relaxion import batch
from relaxion.errors import AssessmentStopped, FileError
from relaxion.files import json_of, write_json
from relaxion.optimizer import batch_relaxation
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.step import Stepper
from relaxion.potentials.base import Potential
from relaxion.settings import shown
from relaxion.structures import Outcome, Structures
from relaxion.train.judge.contest import Conditions, relax_one
from relaxion.train.judge.films import RelaxationRecord, Relaxed, Shot, film_of, shot
from relaxion.train.judge.optimizers import CORE, classical_contestants

FMAX = 0.05  # eV/Å
CAP = 200  # force calls
COMPARED = ("BFGS", "FIRE")
BASELINES = "baselines.json"

Stop: TypeAlias = Callable[[], bool]
Relax: TypeAlias = Callable[[Potential, Structures, Stop | None], Sequence[Relaxed]]
"""One relaxation of each structure, in their order; what does not converge is charged the cap."""


@dataclass(frozen=True, eq=False)
class Starts:
    """Starts of one kind, and the potential that they are relaxed on."""

    kind: str  # empty where there is only one
    potential: Potential
    structures: Structures


@dataclass(frozen=True)
class Calls:
    """Force calls from each start; failures are charged the cap."""

    force_calls: tuple[int, ...]
    energies_ev: tuple[float | None, ...]  # None: it did not converge

    @property
    def mean(self) -> float:
        return float(np.mean(self.force_calls))

    @property
    def failures(self) -> int:
        return sum(energy is None for energy in self.energies_ev)

    def as_plain(self) -> dict[str, Any]:
        """For baselines.json; start by start too, in the order of the assessment."""
        return {
            "mean_force_calls": self.mean,
            "median_force_calls": float(np.median(self.force_calls)),
            "failures": self.failures,
            "force_calls": list(self.force_calls),
            "energy_ev": list(self.energies_ev),
        }


@dataclass(frozen=True, eq=False)
class Assessed:
    """One relaxation from each start, kind after kind."""

    relaxed: Sequence[Relaxed]
    baselines: Mapping[str, float]  # mean force calls of others, by name
    fmax: float = FMAX
    cap: int = CAP
    extra: Mapping[str, float] = field(default_factory=dict)  # scalars that only one task has

    @cached_property
    def force_calls(self) -> np.ndarray:
        return np.array([one.force_calls for one in self.relaxed])

    @cached_property
    def returns(self) -> np.ndarray:
        """Sums of rewards; -1 for each force call where there were none."""
        return np.array([-float(one.force_calls) if one.reward is None else one.reward for one in self.relaxed])

    @property
    def calls(self) -> Calls:
        return Calls(tuple(self.force_calls.tolist()), tuple(one.energy_ev for one in self.relaxed))

    @property
    def success_rate(self) -> float:
        return float(np.mean([one.converged for one in self.relaxed]))

    @property
    def record(self) -> RelaxationRecord:
        return RelaxationRecord(self.fmax, self.cap, self.relaxed)

    def beside(self, name: str) -> float | None:
        """Mean force calls in units of those of a baseline; None where it was not measured."""
        return float(self.force_calls.mean()) / max(self.baselines[name], 1.0) if name in self.baselines else None

    def by_kind(self) -> dict[str, list[Relaxed]]:
        """In the order in which the kinds come."""
        found: dict[str, list[Relaxed]] = {}
        for one in self.relaxed:
            found.setdefault(one.label, []).append(one)
        return found

    def scalars(self) -> dict[str, float]:
        """For the log, under the names of Stable-Baselines3 where it has them."""
        calls = self.force_calls
        lengths = [one.length for one in self.relaxed if one.length is not None]
        own = {
            "eval/mean_reward": float(self.returns.mean()),
            "eval/force_calls_mean": float(calls.mean()),
            "eval/force_calls_median": float(np.median(calls)),
            "eval/force_calls_p95": float(np.quantile(calls, 0.95)),
            "eval/success_rate": self.success_rate,
        }
        if lengths:
            own |= {"eval/worst_reward": float(self.returns.min()), "eval/mean_ep_length": float(np.mean(lengths))}
        for kind, ones in self.by_kind().items():
            if kind:
                own[f"eval/force_calls_{kind}"] = float(np.mean([one.force_calls for one in ones]))
        return own | dict(self.extra) | {f"eval/force_calls_{n.lower()}": mean for n, mean in self.baselines.items()}


class Assessor:
    """The same starts every time."""

    def __init__(
        self,
        starts: Callable[[], Sequence[Starts]] | Sequence[Starts],
        fmax: float = FMAX,
        cap: int = CAP,
        compared: Sequence[str] = (*COMPARED, CORE),
    ) -> None:
        """`starts`: as they are, or who makes them when they are first needed. `compared`: baselines by name."""
        self._given = starts
        self.fmax = fmax
        self.cap = cap
        self.compared = compared
        self.baselines: dict[str, float] = {}

    @cached_property
    def starts(self) -> list[Starts]:
        return list(self._given() if callable(self._given) else self._given)

    @property
    def n_starts(self) -> int:
        return sum(len(group.structures) for group in self.starts)

    def __call__(self, relax: Relax, stop: Stop | None = None) -> Assessed:
        """One relaxation from each start, those of one potential side by side; `stop` is asked on the way."""
        found: dict[int, list[Relaxed]] = {}
        for potential in {id(group.potential): group.potential for group in self.starts}.values():
            places = [place for place, group in enumerate(self.starts) if group.potential is potential]
            groups = [self.starts[place] for place in places]
            ended = iter(relax(potential, Structures.concatenate([group.structures for group in groups]), stop))
            for place, group in zip(places, groups, strict=True):
                found[place] = [replace(next(ended), label=group.kind) for _ in range(len(group.structures))]
        relaxed = [one for place in sorted(found) for one in found[place]]
        return Assessed(relaxed, self.baselines, self.fmax, self.cap)

    def compare(self, folder: Path, **known: Calls) -> None:
        """Measure the baselines once and keep them in the folder; a resumed run reads them. `known`: others."""
        file = folder / BASELINES
        if not file.exists():
            found = {name: self.measure(name) for name in self.compared} | known
            write_json(file, {name: calls.as_plain() for name, calls in found.items()})
        self.baselines = read_baselines(file)

    def measure(self, name: str) -> Calls:
        """What an optimizer of ASE with its defaults needs from every start, or our classical core ("core")."""
        if name == CORE:
            return self(under_guard(new_stepper, self.fmax, self.cap)).calls
        [contestant] = classical_contestants(name, without_gpmin=False, free_cell=True)
        scores = []
        for group in self.starts:
            for atoms, free in zip(group.structures.to_ase(), group.structures.cell_free.tolist(), strict=True):
                conditions = Conditions(group.potential, self.fmax, self.cap, free)
                scores.append(relax_one(contestant, atoms, conditions))
        return Calls(tuple(score.charged for score in scores), tuple(score.energy_ev for score in scores))


def read_baselines(file: Path, names: Sequence[str] | None = None) -> dict[str, float]:
    """Mean force calls by optimizer, as the run wrote them down at its start; all of them, or those of these names."""
    try:
        plain = json_of(file)
        return {name: float(plain[name]["mean_force_calls"]) for name in (plain if names is None else names)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FileError(f"{file} cannot be read ({shown(error)}); remove it, and the run measures again") from error


def under_guard(make_stepper: Callable[[], Stepper], fmax: float = FMAX, cap: int = CAP) -> Relax:
    """Relaxations as `relaxion.relax_batch` makes them, each with a new stepper; `stop` is asked at each force call."""

    def relax(potential: Potential, structures: Structures, stop: Stop | None) -> list[Relaxed]:
        settings = batch.BatchSettings(fmax=fmax, max_force_calls=cap, record=True)
        relaxer = batch.BatchRelaxer(potential, settings, lambda _: ("", make_stepper()))
        starts = structures.to_ase()
        for place, (atoms, free) in enumerate(zip(starts, structures.cell_free.tolist(), strict=True)):
            relaxer.add(atoms, place, cell=free)
        found: dict[int, Relaxed] = {}
        while relaxer.n_running or relaxer.has_finished:
            if stop is not None and stop():
                raise AssessmentStopped
            found |= {one.tag: _seen(starts[one.tag], one, cap) for one in relaxer.advance()}
        return [found[place] for place in range(len(starts))]

    return relax


def _seen(start: Atoms, ended: batch_relaxation.Relaxed, cap: int) -> Relaxed:
    shots = (_shot(call, visit) for call, visit in enumerate(ended.visited, start=1))
    return Relaxed(
        numbers=start.numbers,
        periodic=bool(start.pbc.any()),
        outcome=(Outcome.STEP_LIMIT if ended.outcome is Outcome.RUNNING else ended.outcome).name.lower(),
        force_calls=ended.force_calls if ended.converged else cap,
        energy_ev=ended.energy_ev if ended.converged else None,
        film=film_of(shots, len(start)),
    )


def _shot(call: int, visit: batch_relaxation.Visit) -> Shot:
    point = visit.point
    geometry = visit.point.geometry
    assert geometry is not None  # of plain atoms, and of the cell filter that the batch makes
    return shot(call, geometry.positions, geometry.cell, point.energy, point.largest_force)
