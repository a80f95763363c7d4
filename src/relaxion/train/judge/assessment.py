"""How good is a policy? Force calls from fixed starts of every kind, beside the classical optimizer, BFGS and FIRE.

The relaxations are handed in: under the safeguard (`under_safeguard`), or by a rollout through
the environment of an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ase import Atoms
from ase.symbols import Symbols
from torch import Tensor

from relaxion import batch
from relaxion.errors import AssessmentStopped, FileError
from relaxion.files import json_of, write_json
from relaxion.optimizer import batch_relaxation
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.point import Film, Frame
from relaxion.optimizer.step import Stepper
from relaxion.potentials.base import Potential
from relaxion.settings import shown
from relaxion.structures import Outcome, State, Structures
from relaxion.train.experience.environment import largest_force
from relaxion.train.judge.runs import CORE, Conditions, classical_contestants, finite, relax_one

WORST = 10  # films: those that needed most force calls
MOST_SHOTS = 64  # of one film; then every second goes
MOST_NUMBERS = 600_000  # coordinates of all films, about 3 MB as text; larger structures get fewer shots
MILLI = 1000  # units of stored positions per Å
CONVERGED = Outcome.CONVERGED.name.lower()


@dataclass(frozen=True, eq=False, kw_only=True)
class Shot(Frame):
    """One force call, and what it said."""

    energy_ev: float
    fmax_ev_per_angstrom: float


def shot(call: int, positions: np.ndarray, cell: np.ndarray, energy_ev: float, fmax_ev_per_angstrom: float) -> Shot:
    """Of atoms at these positions, Å; both arrays are copied."""
    return Shot(
        call=call,
        positions=positions.astype(np.float32),
        cell=np.array(cell, dtype=np.float64),
        energy_ev=energy_ev,
        fmax_ev_per_angstrom=fmax_ev_per_angstrom,
    )


def film_of(shots: Iterable[Shot], n_atoms: int) -> Film:
    """At most `MOST_SHOTS` of them: thinned out by halves, first and newest kept."""
    film = Film(largest_bytes=MOST_SHOTS * 12 * n_atoms)
    for one in shots:
        film.add(one)
    return film


@dataclass(frozen=True, eq=False)
class AssessedRelaxation:
    """How the policy fared from one start."""

    numbers: np.ndarray  # (n_atoms,) atomic numbers
    periodic: bool  # along any axis
    outcome: str  # a label of `Outcome` with underscores
    force_calls: int  # the cap where it did not converge
    energy_ev: float | None  # where it converged
    film: Film  # of shots
    label: str = ""  # the kind of start; empty where there is only one
    reward: float | None = None  # undiscounted sum; None: nobody gave rewards
    length: int | None = None  # steps

    @property
    def converged(self) -> bool:
        return self.outcome == CONVERGED

    @property
    def shots(self) -> list[Shot]:
        return [frame for frame in self.film.frames if isinstance(frame, Shot)]


class Filming:
    """Films many relaxations that run side by side, and says in the end how each fared."""

    def __init__(self, structures: Structures) -> None:
        self._numbers = np.split(structures.atomic_numbers.numpy(), _cuts(structures))
        self._periodic = structures.periodic.any(dim=1).tolist()
        self._films = [film_of((), len(numbers)) for numbers in self._numbers]

    def shoot(self, places: Tensor, state: State) -> None:
        """One more force call of the relaxations at these places."""
        structures = state.structures
        said = state.evaluation
        positions = np.split(structures.positions.numpy(), _cuts(structures))
        forces = largest_force(structures, said).tolist()
        columns = (state.calls.tolist(), positions, structures.cells.numpy(), said.energies.tolist(), forces)
        for place, *told in zip(places.tolist(), *columns, strict=True):
            self._films[place].add(shot(*told))

    def relaxed(
        self, outcomes: Tensor, calls: Tensor, returns: Tensor | None = None, lengths: Tensor | None = None
    ) -> list[AssessedRelaxation]:
        """How all of them ended; `calls` is the cap where one did not converge."""
        found = []
        for place, (outcome, film) in enumerate(zip(outcomes.tolist(), self._films, strict=True)):
            last: Any = film.frames[-1]
            found.append(
                AssessedRelaxation(
                    numbers=self._numbers[place],
                    periodic=self._periodic[place],
                    outcome=Outcome(outcome).name.lower(),
                    force_calls=int(calls[place]),
                    energy_ev=last.energy_ev if outcome == Outcome.CONVERGED else None,
                    film=film,
                    reward=None if returns is None else float(returns[place]),
                    length=None if lengths is None else int(lengths[place]),
                )
            )
        return found


def _cuts(structures: Structures) -> list[int]:
    return structures.counts.cumsum(0)[:-1].tolist()


@dataclass(frozen=True, eq=False)
class RelaxationRecord:
    """All starts of one assessment, in the order of the baselines."""

    fmax_ev_per_angstrom: float
    cap: int  # force calls charged for a failure
    relaxed: Sequence[AssessedRelaxation]

    def as_plain(self) -> dict[str, Any]:
        return {
            "fmax_ev_per_angstrom": self.fmax_ev_per_angstrom,
            "cap": self.cap,
            "structures": {
                "label": [one.label for one in self.relaxed],
                "formula": [Symbols(one.numbers).formula.format("metal") for one in self.relaxed],
                "n_atoms": [len(one.numbers) for one in self.relaxed],
                "outcome": [one.outcome for one in self.relaxed],
                "force_calls": [one.force_calls for one in self.relaxed],
                "energy_ev": [finite(one.energy_ev) for one in self.relaxed],
            },
            "worst": [{"place": place, **_film(self.relaxed[place], MOST_NUMBERS // WORST)} for place in self.worst()],
        }

    def worst(self) -> list[int]:
        """Places of those with most force calls; what did not converge stands before what took as long."""
        key = [(one.force_calls, not one.converged) for one in self.relaxed]
        return sorted(range(len(key)), key=lambda place: key[place], reverse=True)[:WORST]


def _film(relaxed: AssessedRelaxation, room: int) -> dict[str, Any]:
    """Whole thousandths of an Å; first and last shot at least."""
    fits = max(2, room // max(1, 3 * len(relaxed.numbers)))
    taken = relaxed.shots
    every = sorted({round(place) for place in np.linspace(0, len(taken) - 1, min(fits, len(taken)))})
    shots = [taken[place] for place in every]
    cells = [[round(float(value), 4) for value in shot.cell.ravel()] for shot in shots]
    return {
        "numbers": relaxed.numbers.tolist(),
        "periodic": relaxed.periodic,
        "call": [shot.call for shot in shots],
        "energy_ev": [finite(shot.energy_ev) for shot in shots],
        "fmax_ev_per_angstrom": [finite(shot.fmax_ev_per_angstrom) for shot in shots],
        "positions_milliangstrom": [
            np.rint(shot.positions * MILLI).astype(np.int64).ravel().tolist() for shot in shots
        ],
        "cells_angstrom": cells if any(cell != cells[0] for cell in cells) else cells[:1],
    }


# ---- Assessments

FMAX = 0.05  # eV/Å
CAP = 200  # force calls
COMPARED = ("BFGS", "FIRE")
BASELINES = "baselines.json"

Stop: TypeAlias = Callable[[], bool]
Relax: TypeAlias = Callable[[Potential, Structures, Stop | None], Sequence[AssessedRelaxation]]
"""One relaxation of each structure, in their order; what does not converge is charged the cap."""


@dataclass(frozen=True, eq=False)
class AssessedStarts:
    """AssessedStarts of one kind, and the potential that they are relaxed on."""

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

    relaxed: Sequence[AssessedRelaxation]
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

    def by_kind(self) -> dict[str, list[AssessedRelaxation]]:
        """In the order in which the kinds come."""
        found: dict[str, list[AssessedRelaxation]] = {}
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
        starts: Callable[[], Sequence[AssessedStarts]] | Sequence[AssessedStarts],
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
    def starts(self) -> list[AssessedStarts]:
        return list(self._given() if callable(self._given) else self._given)

    @property
    def n_starts(self) -> int:
        return sum(len(group.structures) for group in self.starts)

    def __call__(self, relax: Relax, stop: Stop | None = None) -> Assessed:
        """One relaxation from each start, those of one potential side by side; `stop` is asked on the way."""
        found: dict[int, list[AssessedRelaxation]] = {}
        for potential in {id(group.potential): group.potential for group in self.starts}.values():
            places = [place for place, group in enumerate(self.starts) if group.potential is potential]
            groups = [self.starts[place] for place in places]
            ended = iter(relax(potential, Structures.concatenate([group.structures for group in groups]), stop))
            for place, group in zip(places, groups, strict=True):
                found[place] = [replace(next(ended), label=group.kind) for _ in range(len(group.structures))]
        relaxed = [one for place in sorted(found) for one in found[place]]
        return Assessed(relaxed, self.baselines, self.fmax, self.cap)

    def compare(self, folder: Path) -> None:
        """Measure the baselines once and keep them in the folder; a resumed run reads them."""
        file = folder / BASELINES
        if not file.exists():
            write_json(file, {name: self.measure(name).as_plain() for name in self.compared})
        self.baselines = read_baselines(file)

    def measure(self, name: str) -> Calls:
        """What an optimizer of ASE with its defaults needs from every start, or our classical optimizer ("core")."""
        if name == CORE:
            return self(under_safeguard(new_stepper, self.fmax, self.cap)).calls
        [contestant] = classical_contestants(name, without_gpmin=False, free_cell=True)
        scores = []
        for group in self.starts:
            for atoms, free in zip(group.structures.to_ase(), group.structures.cell_free.tolist(), strict=True):
                conditions = Conditions(group.potential, self.fmax, self.cap, free)
                scores.append(relax_one(contestant, atoms, conditions))
        return Calls(tuple(score.charged for score in scores), tuple(score.energy_ev for score in scores))


def read_baselines(file: Path) -> dict[str, float]:
    """Mean force calls by optimizer, as the run wrote them down at its start."""
    try:
        plain = json_of(file)
        return {name: float(plain[name]["mean_force_calls"]) for name in plain}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FileError(f"{file} cannot be read ({shown(error)}); remove it, and the run measures again") from error


def under_safeguard(make_stepper: Callable[[], Stepper], fmax: float = FMAX, cap: int = CAP) -> Relax:
    """Relaxations as `relaxion.relax_batch` makes them, each with a new stepper; `stop` is asked at each force call."""

    def relax(potential: Potential, structures: Structures, stop: Stop | None) -> list[AssessedRelaxation]:
        settings = batch.BatchSettings(fmax=fmax, max_force_calls=cap, record=True)
        relaxer = batch.BatchRelaxer(potential, settings, lambda _: ("", make_stepper()))
        starts = structures.to_ase()
        for place, (atoms, free) in enumerate(zip(starts, structures.cell_free.tolist(), strict=True)):
            relaxer.add(atoms, place, cell=free)
        found: dict[int, AssessedRelaxation] = {}
        while relaxer.n_running or relaxer.has_finished:
            if stop is not None and stop():
                raise AssessmentStopped
            found |= {one.tag: _seen(starts[one.tag], one, cap) for one in relaxer.advance()}
        return [found[place] for place in range(len(starts))]

    return relax


def _seen(start: Atoms, ended: batch_relaxation.Relaxed, cap: int) -> AssessedRelaxation:
    shots = (_shot(call, visit) for call, visit in enumerate(ended.visited, start=1))
    return AssessedRelaxation(
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


PART = "kept"  # names in checkpoints and files of agents
POLICY = "policy."
NUMBERS = ("step", "validation_force_calls_mean", "force_calls_mean", "force_calls_median", "success_rate")


@dataclass(frozen=True, eq=False)
class Kept:
    """Numbers and weights of one policy."""

    step: int
    validation_force_calls_mean: float  # what it was chosen by
    force_calls_mean: float  # this and the others: from the starts that results are made of
    force_calls_median: float
    success_rate: float
    weights: Mapping[str, Tensor] = field(repr=False)

    def result(self) -> dict[str, float]:
        """For result.json."""
        return {f"kept_{name}": getattr(self, name) for name in NUMBERS}


class KeptPolicy:
    """Ties go to the earlier one."""

    def __init__(self) -> None:
        self.best: Kept | None = None

    def offer(self, step: int, validated: Assessed, assessed: Assessed, weights: Mapping[str, Tensor]) -> None:
        """The policy of this step, as validation starts and the starts of the results found it."""
        calls = float(validated.force_calls.mean())
        if self.best is None or calls < self.best.validation_force_calls_mean:
            median = float(np.median(assessed.force_calls))
            copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
            mean = float(assessed.force_calls.mean())
            self.best = Kept(step, calls, mean, median, assessed.success_rate, copies)

    def beside_best(self, validated: Assessed) -> float:
        """Force calls in units of the fewest there were."""
        return 1.0 if self.best is None else float(validated.force_calls.mean()) / self.best.validation_force_calls_mean

    def scalars(self) -> dict[str, float]:
        """For the line of an assessment."""
        if self.best is None:
            return {}
        return {
            "eval/kept_step": float(self.best.step),
            "eval/kept_validation_force_calls_mean": self.best.validation_force_calls_mean,
        }

    def snapshot(self) -> dict[str, Tensor]:
        if self.best is None:
            return {}
        numbers = torch.tensor([float(getattr(self.best, name)) for name in NUMBERS], dtype=torch.float64)
        return {"numbers": numbers} | {f"{POLICY}{name}": tensor for name, tensor in self.best.weights.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is kept in checkpoints of releases that kept nothing."""
        self.best = None
        if tensors:
            step, *others = tensors["numbers"].tolist()
            self.best = Kept(int(step), *others, weights=policy_weights(tensors))


def policy_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what was kept, or of a whole agent."""
    return {name.removeprefix(POLICY): tensor for name, tensor in tensors.items() if name.startswith(POLICY)}
