"""The one stepper: judges the points just evaluated and proposes the next ones, for many structures at once.

Each structure has a `Stepper` that remembers its way: quasi-Newton steps, guarded steps of a policy where it has one,
and damped FIRE behind both. What is costly is made for all of them together (`models.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from relaxion.optimizer.classical import QuasiNewton
from relaxion.optimizer.hessian.base import Base, KnownPairs, LocalModel, Secant, models_at
from relaxion.optimizer.point import Array, Geometry, Point, Proposal
from relaxion.optimizer.step import Fire

LARGEST = 1e100  # beyond it squares are infinite
FIRE_STEPS = 20  # at least so many before the quasi-Newton method is trusted again
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
        bases.append(steppers[number].asks(base, places[number] if places and base is points[number] else None))
    for number, model in zip(asked, models_at(bases, known), strict=True):
        steppers[number].model = begun[number][0], model
    return [stepper.step(base, by_fire) for stepper, (base, by_fire) in zip(steppers, begun, strict=True)]


class Stepper:
    """The memory of one relaxation; switches to FIRE when the quasi-Newton method is lost."""

    def __init__(self, method: QuasiNewton) -> None:
        """`method`: the classical core, or a guard with a policy."""
        self.method = method
        self.fire = Fire(method.settings.region.largest)
        self.fire_steps_left = 0
        self.fire_reason = ""
        self.fire_steps = 0  # proposals made by FIRE
        self.calls = 0  # points judged
        self.not_finite: list[str] = []  # what was not, in the last answers in a row
        self.last: Proposal | None = None
        self.model: tuple[Point, LocalModel] | None = None  # after a rejected point the same base is asked again

    @property
    def fallback_used(self) -> int:
        """Steps made by the core or FIRE in place of the policy, or by FIRE in place of the core."""
        return self.fire_steps + self.method.core_steps

    @property
    def policy_steps(self) -> int:
        """Steps made by the policy."""
        return self.method.policy_steps

    @property
    def hopeless(self) -> str:
        """Why going on makes no sense; empty where it does."""
        if len(self.not_finite) < MOST_NOT_FINITE:
            return ""
        return f"{self.not_finite[0]} and {len(self.not_finite) - 1} more calls in a row, though steps were shortened"

    def reset(self) -> None:
        """Forget everything learned, for instance because somebody else moved the atoms."""
        self.method.reset()
        self.fire.reset()
        self.fire_steps_left, self.fire_reason = 0, ""
        self.last, self.model = None, None

    def judge(self, point: Point) -> tuple[Point, bool]:
        """Take in what was found; where the next step begins, and whether FIRE makes it."""
        self.calls += 1
        self.not_finite = [] if point.finite else [*self.not_finite, f"{point.not_finite} at call {self.calls}"]
        # FIRE knows its last finite point; the quasi-Newton method, fresh after FIRE, would have none to go back to
        if self.fire_steps_left > 0 or (not point.finite and self.method.last is None):
            return point, True
        base = self.method.judged(point)
        if reason := self.method.region.lost:
            self.reset()
            self.fire_steps_left, self.fire_reason = FIRE_STEPS, reason
            return base, True
        return base, False

    def lacks(self, base: Point) -> bool:
        """Whether a model must be made there."""
        return self.model is None or self.model[0] is not base

    def asks(self, base: Point, place: int | None) -> Base:
        """What it wants to know of a base; `place`: among the structures just evaluated, if it is one of them."""
        method = self.method
        topology = method.valence.topology
        valence = method.settings.valence if method.sees_molecules else None
        steps = len(method.secants)
        return Base(base, method.settings.springs, method.source, method.past, place, valence, topology, steps)

    def step(self, base: Point, by_fire: bool) -> Proposal:
        """The next proposal, from where `judge` said."""
        if by_fire:
            self.fire_steps_left -= 1
            self.fire_steps += 1
            self.last = replace(self.fire.propose(base), reason=self.fire_reason)
        else:
            assert self.model is not None
            self.method.last = self.last = self.method.step_from(base, self.model[1])
        return self.last

    def snapshot(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped; plain numbers, lists and arrays."""
        newton, fire = self.method, self.fire
        return {
            **newton.region.plain(),
            "secants": [{"step": secant.step, "drop": secant.drop} for secant in newton.secants],
            "last": None if self.last is None else _proposal_to_plain(self.last),
            "more": newton.more(),
            "calls": self.calls,
            "not_finite": self.not_finite,
            "fire_steps_left": self.fire_steps_left,
            "fire_reason": self.fire_reason,
            "fallback_used": self.fire_steps,
            "fire": {
                "velocities": fire.velocities,
                "time_step": fire.time_step,
                "mixing": fire.mixing,
                "downhill": fire.downhill,
                "last_finite": None if fire.last_finite is None else asdict(fire.last_finite),
            },
        }

    def check_rows(self, number: int) -> None:
        """A ValueError where what was restored is not finite or belongs to another number of coordinates."""
        newton, fire = self.method, self.fire
        points = [self.last.base] if self.last is not None else []
        points += [fire.last_finite] if fire.last_finite is not None else []
        arrays = [*newton.arrays(), *(array for point in points for array in (point.coordinates, point.forces))]
        arrays += [self.last.step] if self.last is not None else []
        arrays += [fire.velocities] if fire.velocities is not None else []
        for array in arrays:
            if array.shape != (number, 3) or not (np.abs(array) < LARGEST).all():  # NaN is not smaller either
                raise ValueError(f"{number} rows of sensible numbers were expected, found an array of {array.shape}")
        for point in points:
            if point.geometry is not None:
                _check_geometry(point.geometry, number)
        region = newton.region
        numbers = [region.radius, fire.time_step, fire.mixing, *region.recent_energies, *(p.energy for p in points)]
        if not (np.abs(numbers) < LARGEST).all() or region.radius <= 0 or fire.time_step <= 0:
            raise ValueError("an impossible trust radius, time step or energy")

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite of `snapshot`. Raises KeyError, TypeError or ValueError when the content is foreign."""
        newton, fire = self.method, self.fire
        newton.region.restore(plain)
        newton.secants = [Secant(_rows(secant["step"]), _rows(secant["drop"])) for secant in plain["secants"]]
        self.last = None if plain["last"] is None else _proposal_from_plain(plain["last"])
        newton.last = None if self.last is None or self.last.method == "fire" else self.last
        if newton.last is not None and not newton.region.recent_energies:
            raise ValueError("recent_energies is empty although a step was taken")
        newton.take_more(plain.get("more", {}))
        self.calls, self.not_finite = int(plain["calls"]), [str(words) for words in plain["not_finite"]]
        self.fire_steps_left, self.fire_reason = int(plain["fire_steps_left"]), str(plain["fire_reason"])
        self.fire_steps = int(plain["fallback_used"])
        saved = plain["fire"]
        fire.velocities = None if saved["velocities"] is None else _rows(saved["velocities"])
        fire.time_step, fire.mixing = float(saved["time_step"]), float(saved["mixing"])
        fire.downhill = int(saved["downhill"])
        fire.last_finite = None if saved["last_finite"] is None else _point_from_plain(saved["last_finite"])


def _check_geometry(geometry: Geometry, n_rows: int) -> None:
    fits = geometry.cell.shape == (3, 3) and geometry.periodic.shape == (3,) and geometry.free.shape == (n_rows, 3)
    if not fits or geometry.numbers.shape != (geometry.n_atoms,):
        raise ValueError("a geometry whose parts do not belong together")
    if not ((np.abs(geometry.positions) < LARGEST).all() and (np.abs(geometry.cell) < LARGEST).all()):
        raise ValueError("an impossible geometry")


def _rows(values: Any) -> Array:
    """Coordinates, forces or vectors from a file."""
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError(f"expected rows of three numbers, found shape {rows.shape}")
    return rows


def _proposal_to_plain(proposal: Proposal) -> dict[str, Any]:
    plain = asdict(replace(proposal, wanted=None))
    return {name: value for name, value in plain.items() if name not in ("wanted", "control")} | {
        "knobs": plain["control"]
    }


def _proposal_from_plain(plain: dict[str, Any]) -> Proposal:
    base = _point_from_plain(plain["base"])
    return Proposal(
        base,
        _rows(plain["step"]),
        float(plain["expected_change"]),
        str(plain["method"]),
        str(plain["reason"]),
        trust=float(plain["trust"]),
        control={str(name): float(value) for name, value in plain["knobs"].items()},
    )


def _point_from_plain(plain: dict[str, Any]) -> Point:
    saved = plain["geometry"]
    geometry = saved and Geometry(
        positions=_rows(saved["positions"]),
        cell=_rows(saved["cell"]),
        periodic=np.asarray(saved["periodic"], dtype=bool),
        numbers=np.asarray(saved["numbers"], dtype=np.int64),
        free=np.asarray(saved["free"], dtype=bool),
        cell_factor=float(saved["cell_factor"]),
        ase_cell_factor=float(saved["ase_cell_factor"]),
        drawn=bool(saved["drawn"]),
    )
    return Point(_rows(plain["coordinates"]), _rows(plain["forces"]), float(plain["energy"]), geometry)
