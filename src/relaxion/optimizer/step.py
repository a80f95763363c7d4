"""The one stepper: judges the points just evaluated and proposes the next ones, for many structures at once.

Each structure has a `Stepper` with its trust region, its secants, its safeguard and damped FIRE behind them. What is
costly, the Hessians at the new points, is made for all of them together (`hessian/models.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from relaxion.optimizer.classical import INTERNAL, PLAIN_MEMORY, ClassicalSettings
from relaxion.optimizer.hessian.base import Base, Hessians, KnownPairs, PolicyModel, Secant, Secants, hessians_at
from relaxion.optimizer.hessian.internal import InternalSecants
from relaxion.optimizer.point import Geometry, Point, Proposal, dot, rows_of_three
from relaxion.optimizer.safeguard import Safeguard, StepRule
from relaxion.optimizer.trust_region import TrustRegion

FIRST_TIME_STEP = 0.1
LARGEST_TIME_STEP = 0.5
LONGEST_STEP = 0.1  # Å, half of ASE's: whoever comes here is in trouble
STEPS_BEFORE_SPEEDING_UP = 5
FIRST_MIXING = 0.1


class Fire:
    """Moves like a ball that is stopped whenever it rolls uphill."""

    def __init__(self, longest_step: float = LONGEST_STEP) -> None:
        self.longest_step = min(longest_step, LONGEST_STEP)
        self.velocities: np.ndarray | None = None
        self.time_step = FIRST_TIME_STEP
        self.mixing = FIRST_MIXING
        self.downhill = 0
        self.last_finite: Point | None = None

    def propose(self, point: Point) -> Proposal:
        """One step of FIRE; back to the last finite point, and slower, where forces are not finite."""
        if not point.finite:
            if self.last_finite is None:
                raise ValueError("FIRE cannot start where forces are not finite")
            point = self.last_finite
            self.velocities = None
            self.time_step = 0.25 * self.time_step
        self.last_finite = point
        velocities = self._velocities(point)
        self.velocities = velocities + self.time_step * point.forces
        step = self.time_step * self.velocities
        step *= min(1.0, self.longest_step / max(point.reach(step), 1e-12))
        return Proposal(point, step, min(-dot(point.forces, step), -1e-16), "fire", trust=self.longest_step)

    def _velocities(self, point: Point) -> np.ndarray:
        if self.velocities is None:
            return np.zeros_like(point.forces)
        if dot(point.forces, self.velocities) <= 0:
            self.time_step = 0.5 * self.time_step
            self.mixing = FIRST_MIXING
            self.downhill = 0
            return np.zeros_like(point.forces)
        speed = np.linalg.norm(self.velocities)
        force = np.linalg.norm(point.forces)
        mixed = (1 - self.mixing) * self.velocities + self.mixing * speed / force * point.forces
        self.downhill += 1
        if self.downhill > STEPS_BEFORE_SPEEDING_UP:
            self.time_step = min(1.1 * self.time_step, LARGEST_TIME_STEP)
            self.mixing *= 0.99
        return mixed

    def plain(self) -> dict[str, Any]:
        """For a restart file."""
        names = ("velocities", "time_step", "mixing", "downhill")
        last = None if self.last_finite is None else asdict(self.last_finite)
        return {name: getattr(self, name) for name in names} | {"last_finite": last}

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        self.velocities = None if plain["velocities"] is None else rows_of_three(plain["velocities"])
        self.time_step = float(plain["time_step"])
        self.mixing = float(plain["mixing"])
        self.downhill = int(plain["downhill"])
        self.last_finite = None if plain["last_finite"] is None else Point.restored(plain["last_finite"])
        if not 0 < self.time_step <= LARGEST_TIME_STEP or not 0 <= self.mixing <= 1:
            raise ValueError("an impossible time step or mixing")


FIRE = "fire"
LARGEST = 1e100  # beyond it squares are infinite
FIRE_STEPS = 20  # at least so many before the quasi-Newton method is trusted again
BLOCKED = 0.1  # of a step along internal coordinates is left by the minimum distance: springs part what is crowded
MOST_NOT_FINITE = 4  # answers in a row; each step is a quarter of the one before, so it is not the step


def propose(
    steppers: Sequence[Stepper],
    points: Sequence[Point],
    known: KnownPairs | None = None,
    places: Sequence[int] | None = None,
) -> list[Proposal]:
    """The next place to look at for each structure, having seen `points`.

    `known`: pairs of the structures just evaluated; `places`: where each point is among those.
    """
    begun = [stepper.judge(point) for stepper, point in zip(steppers, points, strict=True)]
    asked = [number for number, (base, by_fire) in enumerate(begun) if not by_fire and steppers[number].lacks(base)]
    bases = []
    for number in asked:
        base = begun[number][0]
        place = places[number] if places and base is points[number] else None
        bases.append(steppers[number].base(base, place))
    models = [steppers[number].safeguard.models for number in asked]
    for number, hessians in zip(asked, hessians_at(bases, models, known), strict=True):
        steppers[number].known = begun[number][0], hessians
    return [stepper.step(base, by_fire) for stepper, (base, by_fire) in zip(steppers, begun, strict=True)]


class Stepper:
    """The memory of one relaxation; switches to FIRE when quasi-Newton steps have lost their way."""

    def __init__(
        self, settings: ClassicalSettings | None = None, policy: PolicyModel | None = None, rule: StepRule | None = None
    ) -> None:
        """`policy`, `rule`: a learned model and how steps are made of it; None: the classical optimizer alone."""
        self.settings = settings or ClassicalSettings()
        self.safeguard = Safeguard(self.settings, policy, rule)
        self.fire_steps = 0  # proposals made by FIRE
        self.calls = 0  # points judged
        self.not_finite: list[str] = []  # what was not, in the last answers in a row
        self.reset()

    @property
    def fallback_used(self) -> int:
        """Steps made by the classical optimizer or FIRE in place of the policy, or by FIRE where there is none."""
        return self.fire_steps + self.safeguard.classical_steps

    @property
    def policy_steps(self) -> int:
        """Steps made by the policy."""
        return self.safeguard.policy_steps

    @property
    def hopeless(self) -> str:
        """Why going on makes no sense; empty where it does."""
        if len(self.not_finite) < MOST_NOT_FINITE:
            return ""
        return f"{self.not_finite[0]} and {len(self.not_finite) - 1} more calls in a row, though steps were shortened"

    def reset(self) -> None:
        """Forget everything learned, for instance because somebody else moved the atoms."""
        self.region = TrustRegion(self.settings.region)
        self.secants = Secants(PLAIN_MEMORY)
        self.safeguard.reset()
        self.fire: Fire | None = None  # while it steps, or has stepped last
        self.fire_steps_left = 0
        self.fire_reason = ""
        self.last: Proposal | None = None
        self.known: tuple[Point, Hessians] | None = None  # after a rejected point the same base is asked again

    def judge(self, point: Point) -> tuple[Point, bool]:
        """Take in what was found; where the next step begins, and whether FIRE makes it."""
        self.calls += 1
        self.not_finite = [] if point.finite else [*self.not_finite, f"{point.not_finite} at call {self.calls}"]
        last = None if self.last is None or self.last.method == FIRE else self.last
        # FIRE has a finite point to go back to; quasi-Newton steps, fresh after FIRE, have none
        if self.fire_steps_left > 0 or (not point.finite and last is None):
            return point, True
        base = point
        if last is not None:
            accepted = self.region.judge(point, last)
            if point.finite:
                self.secants.learn(last.base, point)
            self.safeguard.watch(point, last, self.region, accepted=accepted)
            base = point if accepted else last.base
        if base is point:
            self.region.begin(point)
        if reason := self.region.lost:
            self.reset()
            self.fire_steps_left = FIRE_STEPS
            self.fire_reason = reason
            return base, True
        return base, False

    def lacks(self, base: Point) -> bool:
        """Whether Hessians must be made there."""
        return self.known is None or self.known[0] is not base

    def base(self, point: Point, place: int | None) -> Base:
        """A base for which Hessians are to be made; `place`: among the structures just evaluated, if it is one."""
        steps = len(self.secants.recent)
        return Base(point, self.safeguard.past, steps, self.secants.topology, place)

    def step(self, base: Point, by_fire: bool) -> Proposal:
        """The next proposal, from where `judge` decided."""
        if by_fire:
            self.fire_steps_left -= 1
            self.fire_steps += 1
            self.fire = self.fire or Fire(self.settings.region.largest)
            self.last = replace(self.fire.propose(base), reason=self.fire_reason)
        else:
            assert self.known is not None
            self.last = self.step_from(base, self.known[1])
        return self.last

    def step_from(self, base: Point, hessians: Hessians) -> Proposal:
        """The step of the first candidate that is not blocked."""
        proposal = None
        for candidate in self.safeguard.candidates(base, hessians, self.secants, self.region):
            proposal = self.region.propose(base, hessians.bonds, candidate)
            if proposal.uphill and candidate.method == INTERNAL and self.secants.internal is not None:
                self.secants.internal.pairs = []
            elif proposal.uphill and candidate.method != self.safeguard.method:
                self.secants.recent = []
            wanted = proposal.step if proposal.wanted is None else proposal.wanted
            stopped = base.reach(proposal.step) <= BLOCKED * base.reach(wanted)
            blocked = candidate.method == INTERNAL and stopped
            if candidate.method not in (self.safeguard.method, INTERNAL) or blocked:
                self.secants.internal = None
            if not blocked:
                self.safeguard.took(base, hessians, candidate, proposal)
                return proposal
        raise AssertionError("a multiple of 1 is never blocked")

    def snapshot(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped; plain numbers, lists and arrays."""
        internal = self.secants.internal
        known = {} if internal is None or internal.topology is None else {"internal": internal.plain()}
        return {
            **self.region.plain(),
            "secants": [{"step": secant.step, "drop": secant.drop} for secant in self.secants.recent],
            "last": None if self.last is None else _proposal_to_plain(self.last),
            "more": known | self.safeguard.plain(),
            "calls": self.calls,
            "not_finite": self.not_finite,
            "fire_steps_left": self.fire_steps_left,
            "fire_reason": self.fire_reason,
            "fallback_used": self.fire_steps,
            "fire": None if self.fire is None else self.fire.plain(),
        }

    def check_rows(self, number: int) -> None:
        """A ValueError where what was restored is not finite or belongs to another number of coordinates."""
        points = [] if self.last is None else [self.last.base]
        arrays = [*self.secants.arrays(), *self.region.places, *self.safeguard.arrays()]
        if self.last is not None:
            arrays.append(self.last.step)
        if self.fire is not None:
            points += [] if self.fire.last_finite is None else [self.fire.last_finite]
            arrays += [] if self.fire.velocities is None else [self.fire.velocities]
        arrays += [array for point in points for array in (point.coordinates, point.forces)]
        for array in arrays:
            if array.shape != (number, 3) or not (np.abs(array) < LARGEST).all():  # NaN is not smaller either
                raise ValueError(f"{number} rows of sensible numbers were expected, found an array of {array.shape}")
        for point in points:
            if point.geometry is not None:
                _check_geometry(point.geometry, number)
        numbers = [self.region.radius, *self.region.recent_energies, *(point.energy for point in points)]
        if not (np.abs(numbers) < LARGEST).all() or self.region.radius <= 0:
            raise ValueError("an impossible trust radius or energy")

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite of `snapshot`. Raises KeyError, TypeError or ValueError when the content is foreign."""
        self.region.restore(plain)
        self.secants.recent = [
            Secant(rows_of_three(secant["step"]), rows_of_three(secant["drop"])) for secant in plain["secants"]
        ]
        self.last = None if plain["last"] is None else _proposal_from_plain(plain["last"])
        by_newton = self.last is not None and self.last.method != FIRE
        if by_newton and not self.region.recent_energies:
            raise ValueError("recent_energies is empty although a step was taken")
        more = plain.get("more", {})
        internal = more.get("internal", more.get("valence"))  # files of 0.2 have the second word
        if internal is not None and self.last is not None and by_newton:
            self.secants.internal = InternalSecants.restored(internal, self.last.base)
        self.safeguard.restore(more)
        self.calls = int(plain["calls"])
        self.not_finite = [str(words) for words in plain["not_finite"]]
        self.fire_steps_left = int(plain["fire_steps_left"])
        self.fire_reason = str(plain["fire_reason"])
        self.fire_steps = int(plain["fallback_used"])
        self.fire = None
        if plain["fire"] is not None:
            self.fire = Fire(self.settings.region.largest)
            self.fire.restore(plain["fire"])


def _check_geometry(geometry: Geometry, n_rows: int) -> None:
    fits = geometry.cell.shape == (3, 3) and geometry.periodic.shape == (3,) and geometry.free.shape == (n_rows, 3)
    if not fits or geometry.numbers.shape != (geometry.n_atoms,):
        raise ValueError("a geometry whose parts do not belong together")
    if not ((np.abs(geometry.positions) < LARGEST).all() and (np.abs(geometry.cell) < LARGEST).all()):
        raise ValueError("an impossible geometry")


def _proposal_to_plain(proposal: Proposal) -> dict[str, Any]:
    plain = asdict(replace(proposal, wanted=None))
    return {name: value for name, value in plain.items() if name not in ("wanted", "control", "uphill")} | {
        "knobs": plain["control"]
    }


def _proposal_from_plain(plain: dict[str, Any]) -> Proposal:
    base = Point.restored(plain["base"])
    return Proposal(
        base,
        rows_of_three(plain["step"]),
        float(plain["expected_change"]),
        INTERNAL if plain["method"] == "valence" else str(plain["method"]),
        str(plain["reason"]),
        trust=float(plain["trust"]),
        control={str(name): float(value) for name, value in plain["knobs"].items()},
    )
