"""Two levels: a cheap potential plans, the expensive one is asked only where that leads.

First the structure is relaxed in the cheap potential. Then its Hessian, corrected by the secants of the expensive one,
makes the steps, under the same safeguard and trust region as every other model. Molecules turn and bend too far for one
Hessian: there each step goes to the minimum of the cheap surface, corrected in internal coordinates so that it has the
expensive forces at the present point and, by Powell's symmetric rank-two updates, nearly so at the points before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.data import covalent_radii
from ase.filters import Filter, UnitCellFilter

from relaxion.errors import RelaxionError
from relaxion.optimizer.choice import chosen
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import Base, Hessian, PolicyModel, asked_of
from relaxion.optimizer.hessian.internal import InternalSecants
from relaxion.optimizer.hessian.internal_topology import NON_METALS, bonds_in, molecular_share, topology_of
from relaxion.optimizer.hessian.learned import DirectMove
from relaxion.optimizer.hessian.potential import PotentialHessian, SurfaceCorrection, differences
from relaxion.optimizer.hessian.springs import bonds_of
from relaxion.optimizer.point import (
    Array,
    Geometry,
    Point,
    Proposal,
    bare_atoms,
    dot,
    longest,
    place,
    read_coordinates,
    read_geometry,
    read_point,
    rows_of_three,
)
from relaxion.optimizer.safeguard import StepRule
from relaxion.optimizer.step import Stepper, propose
from relaxion.optimizer.trust_region import TrustRegionSettings
from relaxion.potentials.base import AsePotential, Potential, PotentialCalculator
from relaxion.potentials.counting import CallLimitReached, details_of, error_in_words, fingerprint
from relaxion.potentials.registry import make_potential, potential
from relaxion.structures import Structures

logger = logging.getLogger(__name__)

MODEL = "model"  # the method of its steps
TIGHTER = 0.3  # of fmax: so far the cheap potential is relaxed
MOST_CALLS = 300  # of the cheap potential, in one descent
SMALL_GAIN = 0.04  # eV per atom, more than functionals differ by: where the cheap potential gains less, and
SMALL_FORCE = 1.0  # eV/Å, its forces are smaller, the start may be relaxed already, and is asked first
QUIET = 0.5  # eV/Å; the same where the cell is free and the cheap forces on atoms are smaller, whatever the gain
FARTHEST = 2.0  # Å, an atom's way in a periodic structure; farther the cheap potential has gone astray
LARGEST_GROWTH = 1.4  # of the volume, either way
BROKEN = 1.6  # sums of covalent radii: bonds of non-metals that were below 1.25 at the start
BONDED = 1.25
FAR_WORSE = 3.0  # times the cheap force at the start: an expensive force above that at the cheap minimum
DOUBTFUL = 0.5  # the same with a free cell: were the start relaxed, both forces would be about equal
AGREED = 0.5  # of the cheap force at the start: where the expensive one there is larger, the cheap minimum is next
HELPED = 0.5  # of the largest force may be left by a step to a corrected minimum; else it did not help
REACH = 0.6  # Å, of such a step
REFRESHED = 0.3  # Å; farther away the Hessian is made anew
FEW_COORDINATES = 60  # that are free: their Hessian is always made; that of more only if it takes no longer than
MOST_COORDINATES = 300  # an expensive call, and of more than these never: then only the first minimum is found
MOST_FAILURES = 2  # of the calculator, at places that the steps led to; then its error is the user's to see
MOST_SEEN = 10  # expensive points that correct the surface
HALVINGS = 20
HESSIAN_RULE = StepRule(secant_length=0.3)
SURFACE_RULE = StepRule(secant_weight=0.0)


class ModelFailed(Exception):
    """The cheap potential has no answer; the sentence says why."""


@dataclass(frozen=True)
class Descent:
    """Where the cheap potential led."""

    coordinates: Array
    first_force: float  # eV/Å, largest at its start
    first_on_atoms: float  # eV/Å, the same without the rows of a free cell
    last_force: float
    gain: float  # eV, by how much the energy fell
    calls: int
    converged: bool


class CheapModel:
    """The cheap side of one relaxation: a `PolicyModel` that plans each step, and the descent before the first."""

    method = MODEL

    def __init__(
        self,
        target: Atoms | Filter,
        model: str | BaseCalculator | Potential,
        maxstep: float,
        expensive: Potential | None = None,
    ) -> None:
        """`model`: a calculator, or the name of one. `maxstep`: Å. `expensive`: whose minimum is wanted."""
        made = make_potential(model) if isinstance(model, str) else potential(model)
        self.name = made.name
        self.target = target
        self.calls = 0  # of the cheap potential
        self.seconds = 0.0  # spent in it and in planning
        self.note = ""  # why the cheap potential is not used, or not any more
        self.first: Array | None = None  # where the first expensive call is made, while that is not judged
        self.other: Array | None = None  # where the next one is made if the first place is the worse one
        self.at_start = False  # the first place is the user's structure, the other one the cheap minimum
        self.start_force = 0.0  # eV/Å, largest cheap force at the user's structure
        self.doubted: Point | None = None  # one of the two, while the other one is asked whether it is the better one
        self.molecular = molecular_share(bare_atoms(target)) > 0  # steps go to minima, else by its Hessian
        self._calculator = PotentialCalculator(made)
        self._largest_radius = maxstep
        self.fmax = 0.05  # eV/Å, of the run
        self.call_seconds = math.inf  # of an expensive call, where somebody measures it
        self._seen: list[tuple[Array, Array]] = []  # expensive points, expensive minus cheap forces there
        self._stepper: Stepper | None = None  # whose steps are planned here
        self._plan: tuple[Array, Array] | None = None  # the newest to a minimum: where it begins, and the step
        self._matrix: tuple[Array, Array] | None = None  # the newest Hessian: where, and by the free coordinates
        self._policy: PolicyModel | None = None  # whose Hessian is another opinion
        if expensive is not None and _same(made, expensive):
            self.note = f"the model {self.name} is the calculator itself"

    @property
    def used(self) -> str:
        """Its name, and why it was left where it was."""
        return f"{self.name}: {self.note.removeprefix(f'the model {self.name} ')}" if self.note else self.name

    def covers(self, geometry: Geometry) -> bool:
        """All that its potential covers; after it failed `at` says why it plans no more."""
        del geometry
        return True

    @property
    def plans(self) -> bool:
        """Whether it plans steps, too: not of large structures, nor of molecular crystals with a free cell."""
        geometry = None if self.note else read_geometry(self.target)
        if geometry is None or not geometry.drawn:
            return False
        if self.molecular:
            return not isinstance(self.target, UnitCellFilter)
        return self._free_coordinates() <= MOST_COORDINATES

    def _free_coordinates(self) -> int:
        geometry = read_geometry(self.target)
        return 0 if geometry is None else int(geometry.free.sum())

    def stepper(self, settings: ClassicalSettings, policy: PolicyModel | None) -> Stepper:
        """Steps planned here, under the safeguard; classical ones where a plan was bad."""
        self._policy = policy
        self._stepper = Stepper(replace(settings, internal=False), self, self._rule)
        return self._stepper

    @property
    def _rule(self) -> StepRule:
        return SURFACE_RULE if self.molecular else HESSIAN_RULE

    def weigh(self) -> None:
        """Before the first Hessian: leave the steps to others where it would take longer than an expensive call."""
        number = self._free_coordinates()
        if self.note or self.molecular or self._matrix is not None or number <= FEW_COORDINATES:
            return
        seconds = 2 * number * self.seconds / max(self.calls, 1)
        if seconds > self.call_seconds:
            self.note = f"its Hessian would take {seconds:.2g} s, an expensive call takes {self.call_seconds:.2g} s"

    def begin(self) -> bool:
        """Relax in the cheap potential; whether the atoms now stand at its minimum.

        They stay where they are if that minimum is no place to ask the expensive potential at, and if the start may be
        relaxed already.
        """
        if self.note:
            return False
        atoms = bare_atoms(self.target)
        before = atoms.copy()
        before.set_constraint()
        try:
            with self._in_place():
                start = read_coordinates(self.target)
                descent = self._descend(start)
                after = atoms.copy()
        except ModelFailed as error:
            self.note = str(error)
            return False
        forces = descent.first_force, descent.last_force
        logger.info("%s: %d calls, largest force %.3g to %.3g eV/Å", self.name, descent.calls, *forces)
        self.note = astray(before, after)
        if not descent.converged:
            self.note = f"{self.name} was not relaxed after {descent.calls} calls"
        if self.note:
            return False
        small = descent.gain < SMALL_GAIN * len(atoms) and descent.first_on_atoms < SMALL_FORCE
        if isinstance(self.target, UnitCellFilter):  # relaxed structures may have another volume in each potential
            small = small or descent.first_on_atoms < QUIET
        self.at_start = small
        self.start_force = descent.first_force
        self.first, self.other = (start, descent.coordinates) if small else (descent.coordinates, start)
        place(self.target, self.first)
        return not small

    def elsewhere(self, point: Point) -> Array | None:
        """Where the next expensive call is made, if not a step away from this point; of the first two points only."""
        if self.other is None or self.first is None:
            return None
        way = self.other - self.first
        there = self.other
        self.first = self.other = None
        if self.at_start:
            # asked there because it might have been relaxed; where both potentials pull as hard, it was not
            nearly = point.largest_force < AGREED * self.start_force or self.molecular
            stays = dot(point.forces, way) <= 0 or (self.plans and nearly)
        else:
            bound = DOUBTFUL if isinstance(self.target, UnitCellFilter) else FAR_WORSE
            stays = point.finite and point.largest_force <= bound * self.start_force
        if stays:
            return None
        self.saw(point)
        self.doubted = point
        return there

    def better(self, point: Point) -> Point:
        """The lower one of start and cheap minimum, once both are asked; the model is left if that is the start."""
        doubted = self.doubted
        self.doubted = None
        if doubted is None:
            return point
        self.saw(point)
        stays = doubted.finite and not (point.finite and point.energy <= doubted.energy)
        if stays == self.at_start and not isinstance(self.target, UnitCellFilter):
            self.note = f"the minimum of {self.name} is no better than the start, which is taken instead"
        return doubted if stays else point

    def misled(self, point: Point, last: Proposal) -> bool:
        """Whether the step to a corrected minimum that led to the point was not worth it."""
        if not self.molecular or (point.finite and point.largest_force <= HELPED * last.base.largest_force):
            return False
        left = f"{point.largest_force:.3g} of {last.base.largest_force:.3g} eV/Å" if point.finite else "no forces"
        self.note = f"a planned step left {left}"
        return True

    def at(self, bases: Sequence[Base], structures: Structures) -> list[Hessian | str]:
        """The Hessian at each base (one, in truth), or the step from there to the minimum of the corrected surface."""
        return [self._planned(base) if self.molecular else self._hessian_at(base, structures) for base in bases]

    def _hessian_at(self, base: Base, structures: Structures) -> Hessian | str:
        """Of the cheap potential, as it is until the structure has moved far, and of the policy: their mean."""
        point = base.point
        assert point.geometry is not None
        if self.note:
            return self.note
        if self._matrix is None or point.reach(point.coordinates - self._matrix[0]) > REFRESHED:
            try:
                with self._in_place():
                    self._matrix = point.coordinates, differences(point, self._forces_at)
            except ModelFailed as error:
                self.note = str(error)
                return self.note
        learned = None
        if self._policy is not None and self._policy.covers(point.geometry):
            answer = asked_of(self._policy, [base], structures)[0]
            learned = None if isinstance(answer, str) else answer
        return PotentialHessian(self._matrix[1], point.geometry.free, learned)

    def _forces_at(self, coordinates: Array) -> Array:
        place(self.target, coordinates)
        return self._point().forces

    def _planned(self, base: Base) -> Hessian | str:
        if self.note:
            return self.note
        assert base.springs is not None
        point = base.point
        if self._plan is not None and np.array_equal(self._plan[0], point.coordinates):  # after a restart
            return DirectMove(point.forces, self._plan[1], base.springs)
        offset, seen = self._offset_at(point)
        try:
            with self._in_place():
                descent = self._descend(point.coordinates, self._correction(point, offset, seen))
        except ModelFailed as error:
            self.note = str(error)
            return self.note
        self._plan = point.coordinates, descent.coordinates - point.coordinates
        return DirectMove(point.forces, self._plan[1], base.springs)

    def saw(self, point: Point) -> None:
        """Ask the cheap potential at an expensive point, which corrects its surface."""
        if not self.molecular or self.note or not point.finite:
            return
        if any(np.array_equal(point.coordinates, there) for there, _ in self._seen):
            return
        try:
            with self._in_place():
                place(self.target, point.coordinates)
                self._seen.append((point.coordinates, point.forces - self._point().forces))
        except ModelFailed as error:
            self.note = str(error)

    def _offset_at(self, point: Point) -> tuple[Array, list[tuple[Array, Array]]]:
        """Expensive minus cheap forces there, and the same at the other points."""
        own = next(place for place, (there, _) in enumerate(self._seen) if np.array_equal(there, point.coordinates))
        others = [seen for place, seen in enumerate(self._seen) if place != own]
        return self._seen[own][1], others[-MOST_SEEN:]

    def _correction(self, point: Point, offset: Array, seen: list[tuple[Array, Array]]) -> SurfaceCorrection:
        assert point.geometry is not None
        topology = topology_of(point.geometry, bonds_in(point.geometry, bonds_of([point.geometry])[0], None))
        if topology is None:
            raise ModelFailed(f"{self.name} plans no steps where no bonds are left")
        before = [(_moved(point, there), found) for there, found in seen]
        assert self._stepper is not None
        secants = self._stepper.secants
        secants.internal = secants.internal or InternalSecants()  # for whoever goes on without the model
        secants.internal.topology = topology
        return SurfaceCorrection(point, offset, before, topology)

    def _descend(self, start: Array, correction: SurfaceCorrection | None = None) -> Descent:
        """Down the cheap surface; a corrected one is left when a step reaches farther than it can be right."""
        atoms = bare_atoms(self.target)
        farthest = math.inf if correction is None else self._farthest(correction.base)
        settings = ClassicalSettings(TrustRegionSettings(largest=self._largest_radius))
        stepper = chosen("auto", atoms, settings).stepper
        place(self.target, start)
        first: Point | None = None
        for calls in range(1, MOST_CALLS + 1):
            point = self._point()
            if correction is not None:
                point = correction.of(point)
            first = first or point
            ended = Descent(
                coordinates=point.coordinates,
                first_force=first.largest_force,
                first_on_atoms=longest(first.forces[: len(atoms)]),
                last_force=point.largest_force,
                gain=first.energy - point.energy,
                calls=calls,
                converged=point.largest_force < TIGHTER * self.fmax,
            )
            if ended.converged or calls == MOST_CALLS:
                return ended
            proposal = propose([stepper], [point])[0]
            way = proposal.base.coordinates + proposal.step - start
            reach = proposal.base.reach(way)
            if reach > farthest:
                return replace(ended, coordinates=_within(proposal, start, farthest), converged=True)
            place(self.target, start + way)
        raise AssertionError("the last call returns")

    def _farthest(self, base: Point) -> float:
        """As the trust region has it, Å: a curved way must not be cut straight afterwards."""
        assert self._stepper is not None
        softest = self._stepper.safeguard.softest
        return min(REACH, self._stepper.region.radius, base.largest_force / softest)

    def _point(self) -> Point:
        """What the cheap potential says where the atoms are."""
        began = time.perf_counter()
        self.calls += 1
        try:
            point = read_point(self.target)
        except Exception as error:
            raise ModelFailed(f"the model {self.name} failed ({error_in_words(error)})") from error
        finally:
            self.seconds += time.perf_counter() - began
        if not point.finite:
            raise ModelFailed(f"the model {self.name} is not finite: {point.not_finite}")
        return point

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The atoms with the cheap calculator; afterwards they are where they were."""
        atoms = bare_atoms(self.target)
        positions = atoms.positions.copy()
        cell = atoms.cell.copy()
        calculator = atoms.calc
        atoms.calc = self._calculator
        try:
            yield
        finally:
            atoms.calc = calculator
            atoms.set_cell(cell, scale_atoms=False, apply_constraint=False)
            atoms.positions[:] = positions

    def plain(self) -> dict[str, Any]:
        """For a restart file."""
        return {
            "name": self.name,
            "molecular": self.molecular,
            "calls": self.calls,
            "note": self.note,
            "first": self.first,
            "other": self.other,
            "at_start": self.at_start,
            "start_force": self.start_force,
            "doubted": None if self.doubted is None else asdict(self.doubted),
            "plan": self._plan,
            "hessian": self._matrix,
            "seen": [[at, offset] for at, offset in self._seen[-MOST_SEEN - 1 :]],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        self.calls = int(plain["calls"])
        self.molecular = bool(plain["molecular"])
        self.note = str(plain["note"])
        self.first, self.other = (
            None if rows is None else rows_of_three(rows) for rows in (plain["first"], plain["other"])
        )
        self.at_start = bool(plain["at_start"])
        self.start_force = float(plain["start_force"])
        self.doubted = None if plain["doubted"] is None else Point.restored(plain["doubted"])
        plan = plain["plan"]
        hessian = plain["hessian"]
        self._plan = None if plan is None else (rows_of_three(plan[0]), rows_of_three(plan[1]))
        self._matrix = None if hessian is None else (rows_of_three(hessian[0]), np.asarray(hessian[1], dtype=float))
        if self._matrix is not None and len({*self._matrix[1].shape, self._free_coordinates()}) != 1:
            raise ValueError("the Hessian of the model belongs to another number of free coordinates")
        self._seen = [(rows_of_three(at), rows_of_three(offset)) for at, offset in plain["seen"]]
        if self._stepper is not None:  # made for where the atoms stand now, which may look less molecular
            self._stepper.safeguard.rule = self._rule


class TwoLevels:
    """The steps of one relaxation with a cheaper potential: planned by it while that helps, then without it."""

    def __init__(self, model: CheapModel, alone: Stepper) -> None:
        """`alone`: makes the steps where the model does not."""
        self.model = model
        self.alone = alone
        self.planner = model.stepper(alone.settings, alone.safeguard.models.policy)
        self.stepper = alone
        self.failures = 0  # of the expensive calculator, after which the relaxation went on

    @property
    def has_other(self) -> bool:
        """Whether start and cheap minimum wait for the answer that chooses between them."""
        return self.model.other is not None and not self.model.at_start

    def goes_back(self, error: Exception) -> bool:
        """Whether another place is tried after the calculator failed; not where the user's own structure fails."""
        ours = self.stepper.last is not None or self.has_other or self.model.doubted is not None
        if not ours or self.failures == MOST_FAILURES or isinstance(error, CallLimitReached):
            return False
        self.failures += 1
        words = error_in_words(error)
        said = words if isinstance(error, RelaxionError) else f"the calculator failed ({words})"
        logger.warning("%s; the relaxation returns and takes another step", said)
        return True

    @property
    def fallback_used(self) -> int:
        """Steps of the classical optimizer or FIRE in place of the policy or of the model."""
        return self.alone.fallback_used + self.planner.fallback_used

    @property
    def model_steps(self) -> int:
        """Steps planned by the cheaper potential."""
        return self.planner.policy_steps

    def begin(self, fmax: float) -> str:
        """Before the first call: relax in the cheaper potential, and let it plan where it can; what came of it."""
        self.model.fmax = fmax
        began = time.perf_counter()
        moved = self.model.begin()
        seconds = time.perf_counter() - began
        where = "its minimum is the first point" if moved else "the first point is the start"
        if self.model.note:
            logger.info("%s; the relaxation continues without it", self.model.note)
            where = f"not used: {self.model.note}"
        elif self.model.plans:
            self.stepper = self.planner
        return f"{self.model.name}, {self.model.calls} calls, {seconds:.1f} s: {where}"

    def propose(self, point: Point) -> Proposal:
        """The next step; of the first points it may lead to the other one of start and cheap minimum."""
        there = self.model.elsewhere(point)
        if there is not None:
            if self.model.note:
                logger.info("%s", self.model.note)
                self.stepper = self.alone
            self.stepper.reset()
            return Proposal(replace(point), there - point.coordinates, -1e-16, MODEL)  # the point itself is left
        point = self.model.better(point)
        self.model.weigh()
        if self.model.note and self.stepper is self.planner:
            self.stepper = self.alone
        if self.stepper is self.alone:
            return propose([self.alone], [point])[0]
        last = self.planner.last
        if last is not None and self.model.misled(point, last):
            self._leave()
            base = self._better(last.base, point)
        else:
            self.model.saw(point)
            self.planner.known = None  # a rejected point corrects the surface, too
            planned = propose([self.planner], [point])[0]
            if planned.method == MODEL or not (self.model.note or self.model.molecular):
                return planned  # after a bad step springs make some, then the Hessian again
            self.model.note = self.model.note or f"no step is planned: {planned.reason}"
            self._leave()
            base = planned.base
        return propose([self.alone], [base])[0]

    def plan_no_more(self) -> None:
        """At an end that is checked: a saddle point of the expensive potential may be none of the cheap one."""
        if self.stepper is self.planner:
            self._leave()

    def _leave(self) -> None:
        """Who goes on alone keeps what the steps met."""
        self.stepper = self.alone
        self.alone.reset()
        self.alone.secants.recent = self.planner.secants.recent
        self.alone.secants.internal = self.planner.secants.internal

    def _better(self, before: Point, point: Point) -> Point:
        """Where to go on after a step that was not worth it."""
        if not point.finite:
            return before
        self.alone.secants.learn(before, point)
        return point if point.energy <= before.energy else before

    def plain(self) -> dict[str, Any]:
        """For a restart file, beside the stepper's own."""
        return self.model.plain() | {"plans": self.stepper is self.planner, "failures": self.failures}

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        self.model.restore(plain)
        self.stepper = self.planner if plain["plans"] else self.alone
        self.failures = int(plain.get("failures", 0))  # younger than the files


def _moved(point: Point, coordinates: Array) -> Point:
    """With a fixed cell coordinates are positions."""
    assert point.geometry is not None
    return replace(point, coordinates=coordinates, geometry=replace(point.geometry, positions=coordinates))


def _within(proposal: Proposal, start: Array, farthest: float) -> Array:
    """Where the last step ends if the whole way is as long as it may be: curved ways are not cut straight."""
    way = proposal.base.coordinates - start
    low = 0.0
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if proposal.base.reach(way + middle * proposal.step) > farthest:
            high = middle
        else:
            low = middle
    return start + way + low * proposal.step


def _same(first: Potential, second: Potential) -> bool:
    """Whether both are one thing. Calculators of other packages hide their networks, so only the object counts."""
    if isinstance(first, AsePotential) and isinstance(second, AsePotential):
        return first.calculator is second.calculator
    ours = not (isinstance(first, AsePotential) or isinstance(second, AsePotential))
    return first is second or (ours and fingerprint(details_of(first)) == fingerprint(details_of(second)))


def astray(before: Atoms, after: Atoms) -> str:
    """Why the expensive potential is not asked where the cheap one led; empty where it may be."""
    volume = abs(np.linalg.det(after.cell.array)) if before.cell.rank == 3 else 0.0
    growth = volume / abs(np.linalg.det(before.cell.array)) if volume else 1.0
    if not 1 / LARGEST_GROWTH < growth < LARGEST_GROWTH:
        return f"the model changed the volume by a factor of {growth:.2f}"
    strained = before.get_scaled_positions(wrap=False) @ after.cell.array if volume else before.positions
    moves = after.positions - strained
    farthest = float(np.linalg.norm(moves - moves.mean(axis=0), axis=1).max())
    if before.pbc.any() and farthest > FARTHEST:  # parts of a molecule may turn
        return f"the model moved an atom by {farthest:.2f} Å"
    return broken_bond(before, after)


def broken_bond(before: Atoms, after: Atoms) -> str:
    """Names a bond between non-metals that was there and is no more; empty where all still hold."""
    numbers = before.numbers
    light = np.flatnonzero(NON_METALS[numbers])
    for place_in, i in enumerate(light[:-1]):
        others = light[place_in + 1 :]
        natural = covalent_radii[numbers[i]] + covalent_radii[numbers[others]]
        bonded = before.get_distances(i, others, mic=True) < BONDED * natural
        lost = bonded & (after.get_distances(i, others, mic=True) > BROKEN * natural)
        if lost.any():
            j = int(others[np.flatnonzero(lost)[0]])
            return f"the model broke the bond {before.symbols[i]}{i}-{before.symbols[j]}{j}"
    return ""
