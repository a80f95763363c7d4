"""The trust region: which points are accepted, how far the next step may go, and that it runs no atoms together.

Lengths are those that atoms feel (`Point.reach`). When a point is accepted, how the radius grows and shrinks, and how
near two atoms may come, is decided here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from relaxion.optimizer.hessian.base import Candidate, downhill, quasi_newton
from relaxion.optimizer.hessian.springs import Bonds
from relaxion.optimizer.point import Array, Point, Proposal, dot, longest
from relaxion.structures.minimum_distance import first_touch

CERTAIN_CHANGE = 0.05  # eV; smaller differences of energies are not believed against the forces
RETURNED = 0.25  # of the last step: so near a place left before, the steps undo each other
PLACES = 8  # that are remembered
MOST_REJECTIONS = 6  # in a row, then another method takes over
SHORTEST_BOND = 0.55  # of the sum of covalent radii; shorter bonds hardly exist, and forces there mislead
SMALLEST = 1e-3  # Å; with a smaller radius the method has lost its way
REFERENCE_POINTS = 3  # a point must not lie above the highest of so many accepted ones (non-monotone acceptance)
SHIFTS = 6  # tried until a shifted step fits the radius
NEARLY = 0.85  # of the radius is near enough
SMALLEST_SHARE = 0.1  # of the step is always taken: a call that teaches is better than standing still


@dataclass(frozen=True)
class TrustRegionSettings:
    """Lengths in Å. Tuned on structures apart from every benchmark (docs/decisions.md)."""

    first: float = 0.3
    """Longest displacement of an atom in the first step."""
    largest: float = 0.6
    """The radius never grows beyond this (ASE's maxstep)."""


class TrustRegion:
    """`judge` accepts or rejects a point and adapts the radius; `propose` makes the next step of a Hessian."""

    def __init__(self, settings: TrustRegionSettings) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.radius = min(self.settings.first, self.settings.largest)  # Å
        self.recent_energies: list[float] = []  # of accepted points, eV
        self.rejections = 0  # in a row
        self.places: list[Array] = []  # where the last bases were, the newest last
        self.returned = False  # the last step led back to one of them
        self.change = 0.0  # eV, of the last step, as it is believed
        self.contradiction = ""  # the first energy that contradicts the forces, in words

    def plain(self) -> dict[str, Any]:
        """For a restart file."""
        return {
            "trust": self.radius,
            "rejections": self.rejections,
            "recent_energies": self.recent_energies,
            "places": self.places,
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        self.radius = float(plain["trust"])
        self.rejections = int(plain["rejections"])
        self.recent_energies = [float(energy) for energy in plain["recent_energies"]]
        self.places = [np.asarray(place, dtype=np.float64) for place in plain["places"]]

    @property
    def lost(self) -> str:
        """Why another method should take over; empty where none should."""
        if self.rejections >= MOST_REJECTIONS:
            return f"{self.rejections} points rejected in a row"
        if self.radius < min(SMALLEST, self.settings.largest / 300):
            return f"the trust radius fell to {self.radius:.2g} Å"
        return ""

    def begin(self, point: Point) -> None:
        """The next step begins at this point."""
        self.recent_energies = [*self.recent_energies, point.energy][-REFERENCE_POINTS:]
        self.places = [*self.places, point.coordinates][-PLACES:]

    def judge(self, point: Point, last: Proposal) -> bool:
        """Whether the point that the last proposal led to is accepted; the radius follows."""
        step = point.coordinates - last.base.coordinates
        length = point.reach(step)
        self.returned = False
        if not point.finite:
            return self._reject(length)
        self.change = energy_change(last.base, point, step)
        if contradicts(last, point, step):
            self._forget_energies(last.base, point, step)
        elif point.energy > max(self.recent_energies) + noise(point.energy) and self.change > 0:
            return self._reject(length)
        self.rejections = 0
        self._adapt(last, length, overshoot(last.base, point, step))
        self._break_cycles(point, length)
        return True

    def _reject(self, length: float) -> bool:
        self.rejections += 1
        self.radius = length / 4
        return False

    def _forget_energies(self, base: Point, point: Point, step: Array) -> None:
        """The energy jumped without work being done: those before cannot be compared with it."""
        self.change = work(base, point, step)
        self.recent_energies = []
        self.contradiction = self.contradiction or (
            f"the energy changed by {point.energy - base.energy:+.3g} eV in one step, but the forces did work for "
            f"{self.change:+.3g} eV: energies before and after that step are not compared"
        )

    def _adapt(self, last: Proposal, length: float, overshot: bool) -> None:
        kept = self.change / last.expected_change
        if overshot or kept < 0.25:
            # a policy's radius may be a multiple of ours: half of its step is half of that multiple
            own = length * min(1.0, self.radius / last.trust)
            self.radius = min(max(0.5 * own, 0.02), self.settings.largest)
        elif kept > 0.5 and length > 0.8 * self.radius:
            self.radius = min(2 * self.radius, self.settings.largest)

    def _break_cycles(self, point: Point, length: float) -> None:
        """Steps that lead back to where one was before are too long, however well each of them went."""
        ways = (point.reach(point.coordinates - place) for place in self.places[:-1])
        self.returned = any(way < RETURNED * length for way in ways)
        if self.returned:
            self.radius = min(self.radius, length / 4)

    def propose(self, base: Point, bonds: Bonds | None, candidate: Candidate) -> Proposal:
        """The candidate's step inside its radius, shortened where it would bring two atoms too near."""
        secants = list(candidate.secants)
        shift = candidate.shift
        step = quasi_newton(base.forces, secants, candidate.hessian.solve, shift)
        uphill = not downhill(step, base.forces)
        if uphill:
            secants = []
            step = quasi_newton(base.forces, secants, candidate.hessian.solve, shift)
        added = 0.0
        if candidate.curve is not None:
            step, added = self._shifted(base, step, replace(candidate, secants=secants))
        step = candidate.scale * step
        share = min(1.0, candidate.radius / max(base.reach(step), 1e-12))
        # a quadratic model: t·f·s - t²/2·(f·s - λ·s²) for the share t of the step s with a shift of λ
        expected = -dot(base.forces, step) * share * (1 - share / 2) - added * share**2 * dot(step, step) / 2
        proposal = Proposal(
            base, share * step, min(expected, -1e-16), candidate.method, candidate.reason, step, candidate.radius,
            candidate.control, uphill and len(candidate.secants) > 0,
        )  # fmt: skip
        proposal = screened(proposal, bonds)
        if candidate.curve is None:
            return proposal
        return screened(replace(proposal, step=candidate.curve(proposal.step)), bonds)

    def _shifted(self, base: Point, step: Array, candidate: Candidate) -> tuple[Array, float]:
        """The step of (B + λ·1) inside the radius with as little λ as that takes, and λ (eV/Å²).

        Stiff coordinates relax in full, soft ones as far as they may; a shortened step would leave all of them
        unrelaxed. 1/length is nearly linear in λ, so that a few trials are enough.
        """
        radius = candidate.radius
        forces = base.forces
        low = shift = high = length_high = 0.0
        length_low = length = base.reach(step)
        for _ in range(SHIFTS):
            if length <= radius and (shift == 0 or length > NEARLY * radius):
                break
            if length > radius:
                low = shift
                length_low = length
            else:
                high = shift
                length_high = length
            if high == 0:
                shift = low + dot(forces, step) / dot(step, step) * (length / radius - 1)
            else:
                share = (1 / radius - 1 / length_low) / (1 / length_high - 1 / length_low)
                shift = low + float(np.clip(share, 0.1, 0.9)) * (high - low)
            step = quasi_newton(forces, candidate.secants, candidate.hessian.solve, shift)
            length = base.reach(step)
        return step, shift


def screened(proposal: Proposal, bonds: Bonds | None) -> Proposal:
    """The same proposal, shortened where it would bring a pair too near; a pair already too near may only part."""
    geometry = proposal.base.geometry
    if geometry is None or bonds is None or len(bonds.first) == 0:
        return proposal
    limits = SHORTEST_BOND * bonds.natural_lengths
    room = float((bonds.lengths - limits).min())
    if not geometry.cell_factor and 2 * longest(proposal.step) < room:  # the usual case, at a tenth of the cost
        return proposal
    changes = torch.from_numpy(bonds.changes(proposal.step, geometry))
    touches = first_touch(torch.from_numpy(bonds.vectors), changes, torch.from_numpy(limits))
    share = max(float(touches.min()), SMALLEST_SHARE)
    if share >= 1:
        return proposal
    # a quadratic model along the step, with the full step as its minimum, expects 2t - t² of the whole change
    return replace(proposal, step=share * proposal.step, expected_change=proposal.expected_change * share * (2 - share))


def noise(energy: float) -> float:
    """Below this an energy difference says nothing: machine-learned energies are float32."""
    return 1e-6 + 4e-7 * abs(energy)


def energy_change(before: Point, after: Point, step: Array) -> float:
    """Energy difference, or the trapezoid of the forces where the difference may be no more than noise.

    Energies of self-consistent codes err by meV, and jump where plane waves come and go with the cell; the forces along
    a step do not, and for steps that change the energy by so little the trapezoid is as good.
    """
    change = after.energy - before.energy
    if abs(change) > max(CERTAIN_CHANGE, noise(after.energy)):
        return change
    return work(before, after, step)


def work(before: Point, after: Point, step: Array) -> float:
    """The change of the energy as forces and stress before and after the step have it, eV."""
    return -0.5 * dot(before.forces + after.forces, step)


def contradicts(last: Proposal, after: Point, step: Array) -> bool:
    """Whether the energy rose by far more than forces and stress allow.

    Forces vary along a step, the more the longer it is. So what the model expected of the step, and the work at either
    end, is allowed for; only a rise is looked for, since a step may well fall over an edge.
    """
    before = last.base
    excess = after.energy - before.energy - work(before, after, step)
    allowed = abs(last.expected_change) + abs(dot(before.forces, step)) / 2 + abs(dot(after.forces, step)) / 2
    return excess > CERTAIN_CHANGE + noise(after.energy) + allowed


def overshoot(before: Point, after: Point, step: Array) -> bool:
    """Whether the force along the step has turned round by more than half."""
    return dot(after.forces, step) < -0.5 * dot(before.forces, step)
