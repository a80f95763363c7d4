"""The classical chain: quasi-Newton steps, and damped FIRE behind them. It needs no weights and knows no elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relaxion.optimize.fire import Fire
from relaxion.optimize.point import Array, Point, Proposal
from relaxion.optimize.quasi_newton import QuasiNewton, QuasiNewtonSettings, Secant
from relaxion.optimize.springs import Geometry

LARGEST = 1e100  # beyond it squares are infinite
FIRE_STEPS = 20  # at least so many before the quasi-Newton method is trusted again


class Stepper:
    """Takes a point, answers with the next proposal; switches to FIRE when the quasi-Newton method is lost."""

    def __init__(
        self, settings: QuasiNewtonSettings, *, fallback: bool = True, quasi_newton: QuasiNewton | None = None
    ) -> None:
        """`quasi_newton`: in place of the core's own, for instance a Guard."""
        self.quasi_newton = quasi_newton or QuasiNewton(settings)
        self.fire = Fire(settings.largest_trust)
        self.fallback = fallback
        self.fire_steps_left = 0
        self.fire_reason = ""
        self.fallback_used = 0  # proposals made by FIRE
        self.last: Proposal | None = None

    def reset(self) -> None:
        """Forget everything learned, for instance because somebody else moved the atoms."""
        self.quasi_newton.reset()
        self.fire.reset()
        self.fire_steps_left, self.fire_reason = 0, ""
        self.last = None

    def propose(self, point: Point) -> Proposal:
        """The next place to look at, having seen `point`."""
        # FIRE knows its last finite point; the quasi-Newton method, fresh after FIRE, would have none to go back to
        lost_by_fire = not point.finite and self.quasi_newton.last is None
        fire = self.fire_steps_left > 0 or lost_by_fire
        self.last = self._fire(point) if fire else self._quasi_newton(point)
        return self.last

    def _quasi_newton(self, point: Point) -> Proposal:
        proposal = self.quasi_newton.propose(point)
        if not (reason := self.quasi_newton.lost):
            return proposal
        best = proposal.base
        self.reset()
        if not self.fallback:
            return self.quasi_newton.propose(best)
        self.fire_steps_left, self.fire_reason = FIRE_STEPS, reason
        return self._fire(best)

    def _fire(self, point: Point) -> Proposal:
        self.fire_steps_left -= 1
        self.fallback_used += 1
        return replace(self.fire.propose(point), reason=self.fire_reason)

    def snapshot(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped; plain numbers, lists and arrays."""
        newton, fire = self.quasi_newton, self.fire
        return {
            "trust": newton.trust,
            "rejections": newton.rejections,
            "recent_energies": newton.recent_energies,
            "secants": [{"step": secant.step, "drop": secant.drop} for secant in newton.secants],
            "last": None if self.last is None else _proposal_to_plain(self.last),
            "more": newton.more(),
            "fire_steps_left": self.fire_steps_left,
            "fire_reason": self.fire_reason,
            "fallback_used": self.fallback_used,
            "fire": {
                "velocities": fire.velocities,
                "time_step": fire.time_step,
                "mixing": fire.mixing,
                "downhill": fire.downhill,
                "last_finite": None if fire.last_finite is None else _point_to_plain(fire.last_finite),
            },
        }

    def check_rows(self, number: int) -> None:
        """A ValueError where what was restored is not finite or belongs to another number of coordinates."""
        newton, fire = self.quasi_newton, self.fire
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
        numbers = [newton.trust, fire.time_step, fire.mixing, *newton.recent_energies, *(p.energy for p in points)]
        if not (np.abs(numbers) < LARGEST).all() or newton.trust <= 0 or fire.time_step <= 0:
            raise ValueError("a trust radius, time step or energy that cannot be")

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite of `snapshot`. Raises KeyError, TypeError or ValueError when the content is foreign."""
        newton, fire = self.quasi_newton, self.fire
        newton.trust = float(plain["trust"])
        newton.rejections = int(plain["rejections"])
        newton.recent_energies = [float(energy) for energy in plain["recent_energies"]]
        newton.secants = [Secant(_rows(secant["step"]), _rows(secant["drop"])) for secant in plain["secants"]]
        self.last = None if plain["last"] is None else _proposal_from_plain(plain["last"])
        newton.last = None if self.last is None or self.last.method == "fire" else self.last
        if newton.last is not None and not newton.recent_energies:
            raise ValueError("recent_energies is empty although a step was taken")
        newton.take_more(plain.get("more", {}))
        self.fire_steps_left, self.fire_reason = int(plain["fire_steps_left"]), str(plain["fire_reason"])
        self.fallback_used = int(plain["fallback_used"])
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
        raise ValueError("a geometry that cannot be")


def _rows(values: Any) -> Array:
    """Coordinates, forces or vectors from a file."""
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError(f"expected rows of three numbers, found shape {rows.shape}")
    return rows


def _proposal_to_plain(proposal: Proposal) -> dict[str, Any]:
    return {
        "base": _point_to_plain(proposal.base),
        "step": proposal.step,
        "expected_change": proposal.expected_change,
        "method": proposal.method,
        "reason": proposal.reason,
        "trust": proposal.trust,
        "knobs": dict(proposal.knobs),
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
        knobs={str(name): float(value) for name, value in plain["knobs"].items()},
    )


def _point_to_plain(point: Point) -> dict[str, Any]:
    geometry = point.geometry
    return {
        "coordinates": point.coordinates,
        "forces": point.forces,
        "energy": point.energy,
        "geometry": None
        if geometry is None
        else {
            "positions": geometry.positions,
            "cell": geometry.cell,
            "periodic": geometry.periodic,
            "numbers": geometry.numbers,
            "free": geometry.free,
            "cell_factor": geometry.cell_factor,
        },
    }


def _point_from_plain(plain: dict[str, Any]) -> Point:
    saved = plain["geometry"]
    geometry = saved and Geometry(
        positions=_rows(saved["positions"]),
        cell=_rows(saved["cell"]),
        periodic=np.asarray(saved["periodic"], dtype=bool),
        numbers=np.asarray(saved["numbers"], dtype=np.int64),
        free=np.asarray(saved["free"], dtype=bool),
        cell_factor=float(saved["cell_factor"]),
    )
    return Point(_rows(plain["coordinates"]), _rows(plain["forces"]), float(plain["energy"]), geometry)


def propose(steppers: Sequence[Stepper], points: Sequence[Point]) -> list[Proposal]:
    """The next place to look at, of many structures at once."""
    return [stepper.propose(point) for stepper, point in zip(steppers, points, strict=True)]
