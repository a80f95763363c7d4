"""One structure of a batch on its way: what it is told at each force call, how it moves, what comes of it.

`relaxion.batch` asks the potential and the steppers for many of these at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import Filter, FrechetCellFilter
from ase.units import GPa

from relaxion.database import RelaxationDatabase
from relaxion.errors import PotentialError
from relaxion.optimizer.point import (
    SHORTEST_MOTION,
    STEPS_WITHOUT_MOTION,
    Array,
    Point,
    Proposal,
    longest,
    place,
    read_coordinates,
    read_point,
)
from relaxion.optimizer.records import Remembered
from relaxion.optimizer.saddles import Check, EndCheck, SaddleSearch, kinds_of, undone
from relaxion.optimizer.step import Stepper
from relaxion.optimizer.two_levels import CheapModel, TwoLevels
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import CountingCalculator, error_in_words
from relaxion.settings import strain_mask
from relaxion.structures.state import Outcome
from relaxion.structures.structures import forget_symmetry

if TYPE_CHECKING:
    from relaxion.batch import BatchSettings

ERROR = "error"  # the end of a structure whose potential raised, or answered with nonsense
TIME_LIMIT = "time limit"


@dataclass(frozen=True, eq=False)
class Answer:
    """What the potential said of one structure."""

    energy: float
    forces: Array
    stress: Array | None  # ASE's six components, eV/Å³; None: nobody asked

    def results(self) -> dict[str, Any]:
        plain = {"energy": self.energy, "free_energy": self.energy, "forces": self.forces}
        return plain if self.stress is None else {**plain, "stress": self.stress}


@dataclass(frozen=True, eq=False)
class Visit:
    """One force call: where, what was said there, and whether the next step began there."""

    point: Point
    answer: Answer
    accepted: bool


@dataclass(frozen=True, eq=False)
class Relaxed:
    """How one structure of many fared."""

    atoms: Atoms  # what was reached, with its energy and forces; the start where nothing was
    outcome: Outcome  # RUNNING: it was ended from outside, see `error`
    force_calls: int
    energy_ev: float | None  # of `atoms`, as the next two; None: never evaluated, or not finite
    enthalpy_ev: float | None  # energy + pressure × volume: what was minimised
    fmax_ev_per_angstrom: float | None
    policy_used: str  # the policy's name, or "classical"
    fallback_used: int  # steps made by the core in place of the policy, or by FIRE in place of the core
    seconds: float  # its share of the time
    error: str | None = None  # a sentence, where potential or time limit ended it
    tag: Any = None  # whatever was given to `add`
    visited: tuple[Visit, ...] = ()  # every evaluated point in order, where recorded
    policy_steps: int = 0  # made by the policy itself
    reason: str = ""  # why it stopped before its time, in words
    model_used: str = ""  # the cheaper potential that planned; and why it was left, where it was
    model_calls: int = 0  # of it
    end_check: EndCheck = field(default_factory=EndCheck)  # whether the end is a minimum

    @property
    def converged(self) -> bool:
        return self.outcome is Outcome.CONVERGED

    @property
    def label(self) -> str:
        """The outcome in words; "error" or "time limit" where it was ended from outside."""
        if self.error is None:
            return self.outcome.label
        return TIME_LIMIT if self.error.startswith(TIME_LIMIT) else ERROR


class Told:
    """A calculator, as far as ASE's atoms and filters ask one, that says what it was told."""

    answer: Answer

    def get_forces(self, _atoms: Atoms) -> Array:
        return self.answer.forces.copy()

    def get_potential_energy(self, _atoms: Atoms, force_consistent: bool = False) -> float:
        del force_consistent
        return self.answer.energy

    def get_stress(self, _atoms: Atoms) -> Array:
        assert self.answer.stress is not None
        return self.answer.stress.copy()


class Relaxation:
    """One structure on its way."""

    def __init__(
        self,
        atoms: Atoms,
        tag: Any,
        settings: BatchSettings,
        potential: Potential,
        policy_used: str,
        stepper: Stepper,
        *,
        together: bool,
        model: Potential | None = None,
    ) -> None:
        """`model`: a cheaper potential that plans."""
        self.start = atoms
        self.tag = tag
        self.settings = settings
        self.atoms = atoms.copy()
        self._told = Told() if together else None
        stress = settings.cell
        self._counter = None if together else CountingCalculator(potential, stress=stress)
        self.atoms.calc = self._told or self._counter
        self.target: Atoms | Filter = self.atoms
        if settings.cell:
            mask: Any = strain_mask(settings.cell_mask)
            self.target = FrechetCellFilter(self.atoms, mask=mask, scalar_pressure=settings.pressure_gpa * GPa)
        self.policy_used = policy_used
        self._alone = stepper
        self.levels = None if model is None else self._planned(model, potential)
        self.calls = 0
        self.seconds = 0.0
        self._motionless = 0
        self.moved = True  # since the last force call; constraints may undo a step
        self._coordinates: Array | None = None  # as the target has them now, where they are known
        self._base: tuple[Point, Answer] | None = None  # where the next step begins, and what was said there
        self.result: Relaxed | None = None
        self._visited: list[Visit] = []
        self._remembered: Remembered | None = None
        self._base_call: int | None = None  # the force call at which the next step begins
        self._saddles = SaddleSearch(kinds_of(atoms)) if settings.leave_saddles else None
        self._check: Check | None = None  # of the end, while it goes on
        self._end_found: tuple[Point, Answer] | None = None  # the end that is checked

    @property
    def stepper(self) -> Stepper:
        """Who makes the next step."""
        return self._alone if self.levels is None else self.levels.stepper

    def _planned(self, model: Potential, potential: Potential) -> TwoLevels:
        """Relaxed in the cheaper potential first."""
        levels = TwoLevels(CheapModel(self.target, model, self._alone.settings.region.largest, potential), self._alone)
        levels.begin(self.settings.fmax)
        return levels

    def remember(self, database: RelaxationDatabase, potential: Potential) -> None:
        """Keep all of it from now on."""
        key = self.tag if isinstance(self.tag, str) else ""
        self._remembered = Remembered(database, self.target, self.policy_used, potential, key)
        self._remembered.fmax = self.settings.fmax

    @property
    def told(self) -> Answer:
        if self._told is not None:
            return self._told.answer
        assert self._counter is not None
        results = self._counter.results
        return Answer(results["free_energy"], results["forces"], results.get("stress"))

    @told.setter
    def told(self, answer: Answer) -> None:
        assert self._told is not None
        self._told.answer = answer

    def look(self) -> Point | None:
        """The point just evaluated; None where the structure is done with it."""
        if self.result is not None:
            return None
        try:
            point = read_point(self.target, self._coordinates)
        except PotentialError as error:  # of a calculator that is asked only now
            self.failed(error)
            if self.result is not None or self._check is not None:
                return None
            point = read_point(self.target, self._coordinates)
        self.calls += self.moved
        if self.settings.record and self.moved:
            self._visited.append(Visit(point, self.told, accepted=True))
        if self._remembered is not None and self.moved:
            told = self.told
            self._remembered.answered(self.calls, self._base_call, told.energy, told.forces, told.stress)
        if self._check is not None:
            self._look_around(point)
            return None
        if point.largest_force < self.settings.fmax and math.isfinite(point.energy):
            self._converged(point)
            return None
        other = self.levels is not None and self.levels.has_other
        if self.stepper.last is None and not point.finite and not other:
            self._end(Outcome.NON_FINITE, point, None, reason=f"not finite: {point.not_finite} at call 1, the start")
        return None if self.result is not None else point

    def _converged(self, point: Point) -> None:
        """The end, which is checked where the settings ask for it."""
        if self._saddles is None:
            self._end(Outcome.CONVERGED, point, self.told)
            return
        if self.levels is not None:
            self.levels.plan_no_more()
        self._end_found = point, self.told
        self._base = self._end_found
        self._base_call = self.calls
        self._check = self._saddles.check(point, self.stepper, self.settings.max_force_calls - self.calls)
        self._look_around(None)

    def _look_around(self, found: Point | str | None) -> None:
        """The next place to look at, or the end, or a step from it."""
        assert self._check is not None
        assert self._end_found is not None
        if self._visited and found is not None:
            self._visited[-1] = replace(self._visited[-1], accepted=False)
        while True:
            try:
                look = next(self._check) if found is None else self._check.send(found)
            except StopIteration as end:
                self._check = None
                self._after_check(end.value)
                return
            self._place(look)
            assert self._coordinates is not None
            found = undone(look, self._coordinates)
            if not found:
                return

    def _after_check(self, proposal: Proposal | None) -> None:
        assert self._end_found is not None
        if proposal is not None:
            self._place(proposal)
            return
        point, answer = self._end_found
        place(self.target, point.coordinates)
        self._end(Outcome.CONVERGED, point, answer)

    def _place(self, proposal: Proposal) -> None:
        place(self.target, proposal.base.coordinates + proposal.step)
        self._coordinates = read_coordinates(self.target)
        self.moved = True

    def move(self, point: Point, proposal: Proposal) -> None:
        """The next step, or the end where there is none."""
        base = self._judged(point, proposal)
        if self._visited and proposal.base is not point:
            self._visited[-1] = replace(self._visited[-1], accepted=False)
        if self.stepper.hopeless:
            self._settle(*base, outcome=Outcome.NON_FINITE, reason=f"not finite: {self.stepper.hopeless}")
            return
        if self.calls >= self.settings.max_force_calls:
            self._settle(*base)
            return
        place(self.target, proposal.base.coordinates + proposal.step)
        self._coordinates = read_coordinates(self.target)
        length = longest(self._coordinates - point.coordinates)
        self.moved = length > 0
        short = length < SHORTEST_MOTION
        self._motionless = self._motionless + 1 if short else 0
        if self._motionless >= STEPS_WITHOUT_MOTION:
            reason = f"{self._motionless} moves in a row had no effect: constraints undo them"
            self._settle(*base, outcome=Outcome.STALLED, reason=reason)

    def _judged(self, point: Point, proposal: Proposal) -> tuple[Point, Answer]:
        if proposal.base is point or self._base is None:
            self._base = (point, self.told)
            self._base_call = self.calls
        return self._base

    def _settle(self, base: Point, answer: Answer, outcome: Outcome = Outcome.STEP_LIMIT, reason: str = "") -> None:
        """Leave the atoms at the better point, as the relaxer does."""
        place(self.target, base.coordinates)
        self._end(outcome, base, answer, reason=reason)

    def spend(self, seconds: float) -> None:
        self.seconds += seconds
        limit = self.settings.time_limit_seconds
        if self.result is None and limit is not None and self.seconds > limit:
            self.fail(f"{TIME_LIMIT} of {limit:g} s exceeded after {self.calls} force calls")

    def failed(self, error: Exception) -> None:
        """Where a model led the potential to a place without an answer, another one is tried; else this is the end."""
        if self._check is not None or self.levels is None or not self.levels.goes_back(error):
            self.fail(error_in_words(error))
            return
        nothing = Answer(math.nan, np.full((len(self.atoms), 3), math.nan), np.full(6, math.nan))
        if self._counter is None:
            self.told = nothing
        else:
            self._counter.results = nothing.results()

    def fail(self, sentence: str) -> None:
        """Ended from outside; what was reached so far is kept. In a check that is the end."""
        if self._check is not None:
            self._look_around(f"the check failed ({sentence})")
            return
        if self._base is not None:
            place(self.target, self._base[0].coordinates)
        self._end(Outcome.RUNNING, *(self._base or (None, None)), error=sentence)

    def _end(
        self,
        outcome: Outcome,
        point: Point | None,
        answer: Answer | None,
        error: str | None = None,
        reason: str = "",
    ) -> None:
        if self._remembered is not None:
            self._remembered.end(outcome)
        final = self.start.copy() if point is None else self.atoms
        final.calc = None
        if answer is not None:
            final.calc = SinglePointCalculator(final, **answer.results())
            forget_symmetry(final)
        self.result = Relaxed(
            atoms=final,
            outcome=outcome,
            force_calls=self.calls,
            energy_ev=None if answer is None else answer.energy,
            enthalpy_ev=None if answer is None or point is None else point.energy,
            fmax_ev_per_angstrom=None if answer is None or point is None else point.largest_force,
            policy_used=self.policy_used,
            fallback_used=self._alone.fallback_used if self.levels is None else self.levels.fallback_used,
            seconds=self.seconds,
            error=error,
            tag=self.tag,
            visited=tuple(self._visited),
            policy_steps=self._alone.policy_steps,
            reason=reason,
            model_used="" if self.levels is None else self.levels.model.used,
            model_calls=0 if self.levels is None else self.levels.model.calls,
            end_check=EndCheck() if self._saddles is None else self._saddles.found,
        )
