"""Damped FIRE (Bitzek et al. 2006): forces only, short steps. Slow and hard to confuse: the last line of defence."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from relaxion.optimizer.point import Point, Proposal, dot, rows_of_three

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
            point, self.velocities, self.time_step = self.last_finite, None, 0.25 * self.time_step
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
            self.time_step, self.mixing, self.downhill = 0.5 * self.time_step, FIRST_MIXING, 0
            return np.zeros_like(point.forces)
        speed, force = np.linalg.norm(self.velocities), np.linalg.norm(point.forces)
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
