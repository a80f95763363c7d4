"""One optimizer, one structure, one potential: run it and report how it went, the same way for everybody.

Ours with any policy, our classical optimizer, and everything ASE ships can be measured. The calculator counts, judges
and keeps the time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import Filter, FrechetCellFilter
from ase.neighborlist import natural_cutoffs, neighbor_list
from ase.optimize.cellawarebfgs import CellAwareBFGS
from ase.optimize.optimize import DEFAULT_MAX_STEPS, Optimizer
from ase.units import GPa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from relaxion.errors import SettingsError
from relaxion.optimizer.choice import Chooser
from relaxion.optimizer.point import Film, Frame, bare_atoms, frame_of, quiet_filters
from relaxion.optimizer.saddles import EndCheck
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import (
    Answered,
    CalculatorFailed,
    CallLimitReached,
    CountingCalculator,
    error_in_words,
)
from relaxion.relaxer import Relaxer
from relaxion.settings import nearest, strain_mask
from relaxion.structures.structures import forget_symmetry

OURS = "relaxion"
CORE = "core"
# Those whose best is quoted: in a survey of all on all sets, each was best or near it somewhere, or is widely used.
QUOTED = ("BFGS", "LBFGS", "BFGSLineSearch", "GoodOldQuasiNewton", "RFO", "FIRE", "FIRE2", "MDMin", "GPMin", "CG")
QUOTED_WITH_CELL = ("CellAwareBFGS",)
ALIASES = ("QuasiNewton", "SciPyFminCG")  # of BFGSLineSearch and CG
MOST_GPMIN_ROWS = 6000  # of the dense matrix it factorises at every step; at more, it gives up
ARGUMENTS: dict[str, dict[str, Any]] = {"Sella": {"order": 0}}  # which by default looks for saddles

Build = Callable[[Atoms | Filter], Optimizer]


@dataclass(frozen=True)
class Contestant:
    """One optimizer with its settings, ready to be put on atoms."""

    name: str
    build: Build
    classical: bool = True  # neither ours nor our core

    def steps(self, n_rows: int, cap: int) -> int:
        """Most steps on so many rows of coordinates."""
        return min(cap, MOST_GPMIN_ROWS // (3 * n_rows + 1)) if self.name == "GPMin" else cap


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Everything in ase.optimize, ASE's preconditioned ones, SciPy's, and Sella where it is installed."""
    import ase.optimize
    from ase.optimize.precon import PreconFIRE, PreconLBFGS
    from ase.optimize.sciopt import SciPyFminBFGS, SciPyFminCG

    classes = {name: thing for name, thing in vars(ase.optimize).items() if inspect.isclass(thing)}
    found = {name: kind for name, kind in classes.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    found |= {"CG": SciPyFminCG, "SciPyFminCG": SciPyFminCG, "SciPyFminBFGS": SciPyFminBFGS}
    found |= {"PreconLBFGS": PreconLBFGS, "PreconFIRE": PreconFIRE}
    if find_spec("sella") is not None:
        found["Sella"] = import_module("sella").Sella
    return found


def chosen_optimizers(text: str, option: str = "") -> dict[str, type[Optimizer]]:
    """From `BFGS,FIRE`; upper and lower case are the same. `option` is where the text came from, if that has a name."""
    known = known_optimizers()
    spelling = {name.lower(): name for name in known}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word.lower() not in spelling:
            where = f"{option}: " if option else ""
            raise SettingsError(f"{where}ASE has no optimizer '{word}'; {nearest(word, known)}")
    return {spelling[word.lower()]: known[spelling[word.lower()]] for word in words}


def classical_contestants(text: str, *, without_gpmin: bool, free_cell: bool) -> list[Contestant]:
    """From `BFGS,FIRE`, `all`, `none`, or nothing for those of the published tables."""
    if text.strip().lower() == "none":
        return []
    everybody = text.strip().lower() == "all"
    names = [name for name in known_optimizers() if name not in ALIASES] if everybody else [*QUOTED, *QUOTED_WITH_CELL]
    chosen_by_us = everybody or not text.strip()
    asked = chosen_optimizers(",".join(names) if chosen_by_us else text)
    sit_out = {"GPMin"} if without_gpmin else set()
    sit_out |= set() if free_cell else set(QUOTED_WITH_CELL)
    found = []
    for name, kind in asked.items():
        if not (chosen_by_us and name in sit_out):
            usual = partial(kind, logfile=None, **ARGUMENTS.get(name, {}))
            found.append(Contestant(name, _cell_aware if kind is CellAwareBFGS else usual))
    return found


class _CellAware(CellAwareBFGS):
    """It has a tolerance of its own for stresses: here the one that corresponds to fmax."""

    def run(self, fmax: float = 0.05, steps: int = DEFAULT_MAX_STEPS) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        filtered: Any = self.atoms
        atoms = filtered.atoms
        return super().run(fmax=fmax, smax=fmax * len(atoms) / atoms.get_volume(), steps=steps)


def _cell_aware(target: Atoms | Filter) -> Optimizer:
    """It insists on a filter that does not scale the cell."""
    if isinstance(target, Atoms):
        raise SettingsError("CellAwareBFGS is for free cells; let the cell relax too, or take another optimizer")
    own: Any = FrechetCellFilter(target.atoms, exp_cell_factor=1.0)  # pyright: ignore[reportArgumentType]
    return _CellAware(own, logfile=None)  # pyright: ignore[reportArgumentType]


def our_contestants(policy: str | None, *, allow_unseen: bool = False) -> list[Contestant]:
    """Ours as asked, and our classical optimizer beside it; one of them where they are the same thing."""
    core = Contestant(CORE, partial(Relaxer, logfile=None, policy=None), classical=False)
    if policy is None:
        return [core]
    check_policy(policy)
    return [Contestant(OURS, partial(_ours, policy, allow_unseen), classical=False), core]


def _ours(policy: str, allow_unseen: bool, target: Atoms | Filter) -> Optimizer:
    """Decided here, and not by the relaxer, so that a set of fifty starts does not log the same line fifty times."""
    choice = PolicyChoice.of(policy, bare_atoms(target), allow_unseen=allow_unseen)
    return Relaxer(target, logfile=None, policy=choice.policy, allow_unseen=allow_unseen)


@dataclass(frozen=True)
class PolicyChoice:
    """Who relaxes one structure: with "auto" it may be a policy for one and the classical optimizer for the next."""

    policy: str | None  # the relaxer's `policy=`; None where its elements leave only the classical optimizer
    allow_unseen: bool
    note: str  # why the classical optimizer, where somebody may have expected a policy
    device: str | None = None  # where its network computes

    @classmethod
    def of(
        cls,
        policy: str,
        atoms: Atoms,
        *,
        allow_unseen: bool = False,
        calculator: object = None,
        device: str | None = None,
    ) -> PolicyChoice:
        asked = policy_argument(policy)
        chooser = Chooser(asked, allow_unseen=allow_unseen, calculator=calculator or atoms.calc)
        decision = chooser.decide_for(atoms)
        return cls(None if decision.loaded is None else asked, allow_unseen, decision.note, device)


def policy_argument(text: str) -> str | None:
    """A word of the command line as the relaxer's `policy=`: `none` is the classical optimizer, else the word."""
    return None if text.strip().lower() == "none" else text


def check_policy(policy: str | None) -> None:
    """Refuse a policy that is not known or cannot be read, before anything is relaxed."""
    Chooser(policy)


OnCall = Callable[[int, float, float], None]  # force calls so far, energy eV, fmax eV/Å


@dataclass(frozen=True)
class RelaxationTask:
    """What is the same for all optimizers of one structure."""

    start: Atoms
    potential: Potential
    fmax: float  # eV/Å
    steps: int
    free_cell: bool
    call_limit: int | None = None  # the calculator answers so many force calls; None: no end
    record: bool = False  # keep what a page shows: every reading, and the frames of a film
    pressure_gpa: float = 0.0  # of a free cell
    cell_mask: str = ""  # components of a free cell that may change, some of xx,yy,zz,yz,xz,xy; empty: all
    leave_saddles: bool = False  # ours: look for negative curvature at the end, and relax on where there is some


@dataclass(frozen=True)
class Reading:
    """What one force call said; None where it was not finite."""

    call: int
    energy_ev: float | None
    fmax_ev_per_angstrom: float | None
    accepted: bool = True
    method: str = ""
    reason: str = ""  # why that method, in the safeguard's words
    pressure_volume_ev: float = 0.0

    @property
    def enthalpy_ev(self) -> float | None:
        """What a relaxation minimises; the energy where there is no pressure."""
        return None if self.energy_ev is None else self.energy_ev + self.pressure_volume_ev


@dataclass(frozen=True)
class Run:
    """How one optimizer fared."""

    outcome: str  # a label of relaxion.Outcome with underscores, or "interrupted", or "error"
    force_calls: int
    energy_ev: float | None  # of `final`, as the next; belongs to the forces; None: not evaluated, or not finite
    fmax_ev_per_angstrom: float | None
    wall_time_seconds: float
    policy_used: str | None = None  # of ours: the policy's name, or "classical"
    policy_steps: int = 0  # of ours: made by the policy itself
    fallback_used: int = 0
    model_used: str = ""  # of ours: the cheaper potential that planned; and why it was left, where it was
    model_calls: int = 0  # of it
    model_steps: int = 0  # planned by it
    reason: str = ""  # of ours: why it stopped before its time, in words
    first_fmax: float | None = None
    error: str | None = None
    final: Atoms | None = None  # what was reached, with its energy and forces; always finite
    readings: tuple[Reading, ...] = ()  # of every force call, where recorded; as the next
    frames: tuple[Frame, ...] = ()
    pressure_gpa: float = 0.0  # of a free cell
    pressure_volume_ev: float = 0.0  # pressure × volume of `final`
    end_check: EndCheck = field(default_factory=EndCheck)  # of ours: whether `final` is a minimum

    @property
    def enthalpy_ev(self) -> float | None:
        """What a relaxation minimises, and minima are compared by; the energy where there is no pressure."""
        return None if self.energy_ev is None else self.energy_ev + self.pressure_volume_ev

    @property
    def converged(self) -> bool:
        return self.outcome == "converged"


class Stage:
    """The atoms, their counting calculator and the clock of one run."""

    def __init__(self, task: RelaxationTask, on_call: OnCall) -> None:
        self.task = task
        self.counter = CountingCalculator(
            task.potential, stress=task.free_cell, limit=task.call_limit, pressure=task.pressure_gpa * GPa
        )
        self.atoms = task.start.copy()
        self.atoms.calc = self.counter
        self.target = self._target(self.atoms)
        self.fmax_history: list[float] = []
        self._on_call = on_call
        self.readings: list[Reading] = []
        self.film = Film()
        self.counter.on_answer = self._record if task.record else None
        self._began = time.perf_counter()

    def _target(self, atoms: Atoms) -> Atoms | Filter:
        task = self.task
        if not task.free_cell:
            return atoms
        mask: Any = strain_mask(task.cell_mask)
        return FrechetCellFilter(atoms, mask=mask, scalar_pressure=task.pressure_gpa * GPa)

    def watch(self, optimizer: Any) -> None:
        """Follow the optimizer, at no cost in force calls."""
        optimizer.attach(self._look)

    def _look(self) -> None:
        self.fmax_history.append(largest_force(self.target))
        if self.counter.last is not None:
            self._on_call(self.counter.calls, self.counter.last.energy, self.fmax_history[-1])

    def _record(self, point: Answered) -> None:
        energy, fmax = (point.energy, self._reached(point)[1]) if point.finite else (None, None)
        self.readings.append(Reading(self.counter.calls, energy, fmax, pressure_volume_ev=point.pressure_volume))
        before = self.counter.calls - 1
        self.film.add(frame_of(point.atoms, before + 1, before or None))

    def finish(self, outcome: str, *, error: str | None = None, last_stands: bool = True) -> Run:
        """What the calculator has counted, and what was reached: the last point, or the lowest if that does not stand.

        Points and answers as the calculator remembers them: an interrupted or failed call leaves the atoms where
        nobody looked.
        """
        seconds = time.perf_counter() - self._began
        point = self.counter.last if last_stands else self.counter.lowest
        point = point if point is not None and point.finite else None
        final, fmax = (None, None) if point is None else self._reached(point)
        return Run(
            outcome=outcome,
            force_calls=self.counter.calls,
            energy_ev=None if point is None else point.energy,
            fmax_ev_per_angstrom=fmax,
            wall_time_seconds=seconds,
            first_fmax=self.fmax_history[0] if self.fmax_history else None,
            error=error,
            final=final,
            readings=tuple(self.readings),
            frames=tuple(self.film.frames),
            pressure_gpa=self.task.pressure_gpa,
            pressure_volume_ev=0.0 if point is None else point.pressure_volume,
        )

    def _reached(self, point: Answered) -> tuple[Atoms, float]:
        final = self.task.start.copy()
        target = self._target(final)  # now: a cell filter measures from the cell it is given first
        final.set_cell(point.atoms.cell, apply_constraint=False)
        final.positions[:] = point.atoms.positions
        final.calc = SinglePointCalculator(final, **point.answer)
        fmax = largest_force(target)
        forget_symmetry(final)
        return final, fmax


def finite(value: float | None) -> float | None:
    """None for NaN and infinity."""
    return float(value) if value is not None and np.isfinite(value) else None


def largest_force(target: Atoms | Filter) -> float:
    """What ASE compares with fmax: constraints and, with a free cell, its three rows included."""
    rows = np.asarray(target.get_forces()).reshape(-1, 3)
    return float(np.sqrt((rows**2).sum(axis=1).max()))


LINK = 3  # sums of covalent radii; generous: even Lennard-Jones "hydrogens" sit at 1.8, loose packings below 2.5


@dataclass(frozen=True)
class Conditions:
    """What is the same for all contestants and all starts."""

    potential: Potential
    fmax: float = 0.05  # eV/Å
    cap: int = 500  # force calls; the calculator answers no more, and a failure is charged so many
    free_cell: bool = False


@dataclass(frozen=True)
class Score:
    """How one contestant fared on one start."""

    converged: bool  # by the forces where the atoms stand, whatever the optimizer says; and still in one piece
    spent: int  # force calls
    charged: int  # the same, or the cap where it failed
    energy_ev: float | None  # where it converged
    n_atoms: int
    seconds: float  # all in all
    calculator_seconds: float  # inside the calculator
    overhead_seconds: float  # what the optimizer took for itself; processor time, so that other work does not count
    error: str | None = None
    final: Atoms | None = None  # where it converged


OnScore = Callable[[str, int, Score], None]  # contestant, place of the start, score


def contest(
    contestants: Sequence[Contestant], starts: Sequence[Atoms], conditions: Conditions, on_score: OnScore | None = None
) -> Iterator[dict[str, Score]]:
    """Start by start, so that whatever has been done at any moment is a fair comparison."""
    for index, start in enumerate(starts):
        scores = {}
        for contestant in contestants:
            scores[contestant.name] = relax_one(contestant, start, conditions)
            if on_score is not None:
                on_score(contestant.name, index, scores[contestant.name])
        yield scores


def relax_one(contestant: Contestant, start: Atoms, conditions: Conditions) -> Score:
    """One contestant on one start."""
    cap = conditions.cap
    task = RelaxationTask(start, conditions.potential, conditions.fmax, cap, conditions.free_cell, call_limit=cap)
    stage = Stage(task, on_call=lambda *_: None)
    began = time.perf_counter()
    busy = time.process_time()
    error = _run(contestant, stage, cap)
    seconds = time.perf_counter() - began
    busy_seconds = time.process_time() - busy
    waited = stage.counter.seconds
    computed = stage.counter.busy_seconds
    energy = _energy_where_converged(stage) if error is None else None
    if energy is not None and (error := fell_apart(start, stage.atoms)) is not None:
        energy = None
    return Score(
        converged=energy is not None,
        spent=stage.counter.calls,
        charged=cap if energy is None else stage.counter.calls,
        energy_ev=energy,
        n_atoms=len(start),
        seconds=seconds,
        calculator_seconds=waited,
        overhead_seconds=max(busy_seconds - computed, 0.0),
        error=error,
        final=None if energy is None else bare(stage.atoms),
    )


def bare(atoms: Atoms) -> Atoms:
    """Where the atoms are, and nothing else."""
    return Atoms(atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc)


def _run(contestant: Contestant, stage: Stage, cap: int) -> str | None:
    """Run it as a user would; what went wrong, if anything did."""
    n_rows = len(stage.atoms) + (3 if stage.task.free_cell else 0)
    try:
        with contestant.build(stage.target) as optimizer, quiet_filters():
            optimizer.run(fmax=stage.task.fmax, steps=contestant.steps(n_rows, cap))
    except CallLimitReached:
        return None  # the forces will tell
    except Exception as error:  # noqa: BLE001 - optimizers report failure by exceptions of many kinds
        return error_in_words(error)
    return None


def _energy_where_converged(stage: Stage) -> float | None:
    """None if forces are too large where the atoms stand. Atoms left at a place not asked about cost one more call."""
    try:
        fmax: Any = largest_force(stage.target)
        return float(stage.atoms.get_potential_energy()) if fmax < stage.task.fmax else None
    except (CallLimitReached, CalculatorFailed):
        return None


def pieces(atoms: Atoms) -> int:
    """Groups of atoms that are linked; 1 for a crystal, which has nowhere to fly to."""
    if atoms.pbc.all():
        return 1
    first, second = neighbor_list("ij", atoms, natural_cutoffs(atoms, mult=LINK))
    links = coo_array((np.ones(len(first)), (first, second)), shape=(len(atoms), len(atoms)))
    return int(connected_components(links, directed=False, return_labels=False))


def fell_apart(start: Atoms, end: Atoms) -> str | None:
    """A sentence if one piece has become several: where atoms have flown apart forces vanish too."""
    now = pieces(end)
    return f"the structure fell apart into {now} pieces" if now > 1 and pieces(start) == 1 else None
