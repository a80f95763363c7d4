"""The guard: steps of a learned metric while they are good, steps of the classical core where they are not.

Checking costs no force call. Before a call the step is compared with that of the springs (angle, length) and screened
for close pairs; after it the forces found are compared with those predicted. The secants of the last steps correct the
metric, each the more the shorter its step was (`secants.believed`). After a bad step, one that was rejected or led
nowhere, the core takes the next ones: one, then three, then seven, until the metric has done well again. Points are
accepted or rejected as in the core, with FIRE behind both: limit points are stationary whatever the network says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from relaxion.optimizer.classical import QuasiNewton, QuasiNewtonSettings
from relaxion.optimizer.hessian.base import LocalModel, Secant, Solve, believed, corrected, missed
from relaxion.optimizer.hessian.learned import Metric, MetricSource, Past
from relaxion.optimizer.point import Array, Point, Proposal, dot
from relaxion.optimizer.safeguard import DEFAULT, StepControl

POLICY = "policy"  # the method of its proposals


@dataclass(frozen=True)
class Feedback:
    """What the last point said of the step that led there, as the guard sees it."""

    energy_ratio: float = 1.0
    """Energy change met over that expected; 1 at the start."""
    log_curvature_ratio: float = 0.0
    """Logarithm of the curvature met over that of the metric which made the step."""
    alignment: float = 0.0
    """Cosine between the last step and the forces found; below 0 it went too far."""
    log_force_ratio: float = 0.0
    """log10 of the largest force found over the one before."""
    back_off: float = 0.0
    """Share of the step that trust radius and screen took away."""
    rejected: bool = False
    returned: bool = False
    """It led back to where one was before."""
    by_policy: bool = False
    """Who made the step."""
    points: int = 1
    """Points seen so far."""


@dataclass(frozen=True)
class GuardSettings:
    """When to use the policy's step. Tuned on structures outside every benchmark (docs/decisions.md).

    A step is bad if it is rejected, or useless: taken in full, the largest force hardly fell, and the curvature met
    differs much from the metric's. Where no secants correct the metric it is also bad if it lowers the energy by less
    than a share of the predicted change.
    """

    full_step: float = 0.1
    """A step was taken in full if trust radius and screen took away less than this share."""
    hardly: float = 0.2
    """Decades by which the largest force must fall; less is hardly."""
    another: float = 3.0
    """Ratio of the curvature met and the metric's, either way, that is much."""
    least_kept: float = 0.25
    """Share of the predicted change of the energy."""
    most_core_steps: int = 15
    """Largest number of steps that the classical optimizer takes after several bad steps in a row."""
    smallest_cosine: float = 0.0
    """Smallest cosine between the policy's step and the springs' step; below it the classical optimizer steps."""
    largest_ratio: float = 30.0
    """Largest ratio of the two steps' lengths, either way, likewise."""
    molecules_bonus: float = 0.7
    """Where there are molecules their internal coordinates are taken unless the policy misses less than this share of
    what they miss."""
    softest: float = 0.2
    """eV/Å²: no step is longer than if everything were as soft as this, so that small forces lead to small steps."""
    another_scale: float = 1.5
    """The metric is scaled by the curvature met in the last two steps, both taken in full, where both times it was at
    least this many times larger, or smaller, than its own: the metric may come from a softer potential."""


@dataclass(frozen=True)
class Scaled:
    """A metric times a factor."""

    metric: Metric
    factor: float
    knows_curvature = True

    def apply(self, step: Array) -> Array:
        return self.factor * self.metric.apply(step)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        return self.metric.solve(forces, extra_floor / self.factor) / self.factor


class Guard(QuasiNewton):
    """A QuasiNewton whose steps come from a learned metric wherever it can be believed."""

    def __init__(
        self,
        settings: QuasiNewtonSettings,
        source: MetricSource,
        rule: StepControl | None = None,
        guard: GuardSettings | None = None,
        *,
        sees_molecules: bool = False,
    ) -> None:
        """`sees_molecules`: some atoms belong to molecules, which the policy may not know."""
        self.source: MetricSource | None = source
        self.rule = rule or DEFAULT
        self.sees_molecules = sees_molecules
        self.guard = guard or GuardSettings()
        self.policy_steps = 0  # made by the metric
        self.core_steps = 0  # left to the classical core because of mistrust
        self.bad_steps = 0  # in a row; not forgotten when FIRE has helped out
        super().__init__(settings)

    def reset(self) -> None:
        super().reset()
        self.feedback = Feedback()
        self.core_steps_left = 0  # before the metric is asked again
        self._applied: Array | None = None  # B·step of the last proposal, by the metric at its base
        self._scale = 1.0  # of that metric
        self._alone = False  # no secants can correct that metric
        self.curvatures: list[float] = []  # of the last two steps, met over the metric's own, logarithms
        self.past = Past()  # of the present base

    def leave(self) -> None:
        """The policy is not asked any more."""
        self.source = None

    def more(self) -> dict[str, Any]:
        past = {"calls": self.past.calls, "coordinates": self.past.coordinates, "forces": self.past.forces}
        own = {"lesson": asdict(self.feedback), "steps": self._counts(), "applied": self._applied, "past": past}
        own["left"] = self.source is None
        return super().more() | own | {"scale": self._scale, "curvatures": self.curvatures, "alone": self._alone}

    def _counts(self) -> list[int]:
        return [self.policy_steps, self.core_steps, self.bad_steps, self.core_steps_left]

    def take_more(self, plain: dict[str, Any]) -> None:
        if not plain:  # written by the core alone
            return
        self.feedback = Feedback(**{str(name): _kept_kind(name, value) for name, value in plain["lesson"].items()})
        counts = (int(number) for number in plain["steps"])
        self.policy_steps, self.core_steps, self.bad_steps, self.core_steps_left = counts
        self._applied = _array(plain["applied"])
        self._scale, self._alone = float(plain.get("scale", 1.0)), bool(plain.get("alone", False))  # younger than files
        self.curvatures = [float(number) for number in plain.get("curvatures", [])]
        super().take_more(plain)
        if plain["left"]:
            self.leave()
        past = plain["past"]
        self.past = Past(int(past["calls"]), _array(past["coordinates"]), _array(past["forces"]))

    def arrays(self) -> list[Array]:
        own = (self._applied, self.past.coordinates, self.past.forces)
        return [*super().arrays(), *(array for array in own if array is not None)]

    def judged(self, point: Point) -> Point:
        last = self.last
        base = super().judged(point)
        if last is not None:
            self.feedback = self._feedback(point, last, rejected=base is not point)
            self._learn_scale(point)
            if base is point:
                self.past = Past(self.feedback.points, last.base.coordinates, last.base.forces)
            if last.method == POLICY:
                self._judge_policy()
        return base

    def _learn_scale(self, point: Point) -> None:
        """From steps taken in full: far from a minimum, where they are cut, curvatures say nothing of the metric."""
        if self.feedback.rejected or self.feedback.back_off >= self.guard.full_step:
            self.curvatures = []
        elif point.finite and self._applied is not None:
            own = self.feedback.log_curvature_ratio + float(np.log(self._scale))
            self.curvatures = [*self.curvatures, own][-2:]

    def _judge_policy(self) -> None:
        """How the metric's last step went decides whether it makes the next."""
        if self._was_bad():
            self.bad_steps += 1
            self.core_steps_left = min(2**self.bad_steps - 1, self.guard.most_core_steps)
        else:
            self.bad_steps = max(0, self.bad_steps - 1)

    def _was_bad(self) -> bool:
        feedback, guard = self.feedback, self.guard
        full, useless = feedback.back_off < guard.full_step, feedback.log_force_ratio > -guard.hardly
        wrong = bool(abs(feedback.log_curvature_ratio) > np.log(guard.another))
        short_of = self._alone and feedback.energy_ratio < guard.least_kept
        return feedback.rejected or feedback.returned or (full and useless and wrong) or short_of

    def _feedback(self, point: Point, last: Proposal, *, rejected: bool) -> Feedback:
        points = self.feedback.points + 1
        if not point.finite:
            return Feedback(energy_ratio=-2.0, rejected=True, by_policy=last.method == POLICY, points=points)
        step, drop = point.coordinates - last.base.coordinates, last.base.forces - point.forces
        size = float(np.linalg.norm(step)) + 1e-12
        ratio = 0.0
        if self._applied is not None:
            met, expected = dot(step, drop), max(dot(step, self._applied), 1e-12)
            ratio = float(np.log(np.clip(met / expected, 0.05, 20.0)))
        return Feedback(
            energy_ratio=float(np.clip(self.region.change / last.expected_change, -2.0, 3.0)),
            log_curvature_ratio=ratio,
            alignment=dot(step, point.forces) / (size * (float(np.linalg.norm(point.forces)) + 1e-12)),
            log_force_ratio=_log10(point.largest_force) - _log10(last.base.largest_force),
            back_off=self.feedback.back_off,
            rejected=rejected,
            returned=self.region.returned,
            by_policy=last.method == POLICY,
            points=points,
        )

    def step_from(self, base: Point, model: LocalModel) -> Proposal:
        """The metric's step where it can be believed, else the core's."""
        if model.metric is None or model.springs is None:
            return self._by_core(base, model, model.no_metric or "the policy does not apply here")
        if reason := self._left_to_molecules(model):
            return self._by_core(base, model, reason)
        self._scale = self._scale_met() if model.metric.knows_curvature else 1.0
        metric = model.metric if self._scale == 1 else Scaled(model.metric, self._scale)
        step = metric.solve(base.forces)
        judged = self.secants[-self.settings.judged_secants :]
        error = missed(judged, metric.apply)
        springs_step = model.springs.solve(base.forces)
        if not np.isfinite(step).all():
            return self._by_core(base, model, "the policy's step is not finite")
        if reason := self._mistrust(base, step, springs_step):
            return self._by_core(base, model, reason)
        return self._by_policy(base, model, metric, step, self.rule, error)

    def _left_to_molecules(self, model: LocalModel) -> str:
        """Why internal coordinates make the step where there are molecules; empty where the policy does.

        They make the first; afterwards whoever misses less of what the last steps met makes the next.
        """
        if model.valence is None or model.metric is None:
            return ""
        judged = self.secants[-self.settings.judged_secants :]
        if not judged:
            return "molecules: internal coordinates make the first step"
        ours, theirs = missed(judged, model.metric.apply), missed(judged, model.valence.apply)
        if self.guard.molecules_bonus * theirs <= ours:
            return f"internal coordinates miss {theirs:.2f} of the last steps, the policy {ours:.2f}"
        return ""

    def _by_policy(
        self, base: Point, model: LocalModel, metric: Metric, step: Array, control: StepControl, error: float
    ) -> Proposal:
        """The step that the control makes of the metric."""
        plain = step
        solve: Solve = metric.solve
        if control.floor > 0:
            solve = lambda forces: metric.solve(forces, control.floor)  # noqa: E731
            step = solve(base.forces)
        secants = list[Secant]()
        self._alone = control.secant_weight == 0 or not metric.knows_curvature
        if not self._alone:
            newest = self.secants[-control.n_secants :]
            secants = believed(newest, metric.apply, control.secant_weight, control.secant_length, base.reach)
        if secants:
            stiffer = [Secant(own.step, own.drop + control.floor * own.step) for own in secants]
            step = corrected(base.forces, stiffer if control.floor > 0 else secants, solve)
        uphill = dot(step, base.forces) <= 1e-3 * np.linalg.norm(step) * np.linalg.norm(base.forces)
        if uphill or not np.isfinite(step).all():
            step = plain
        trust = min(self.region.radius * float(np.exp(control.log_trust)), self.settings.region.largest)
        trust = min(trust, base.largest_force / self.guard.softest)
        wanted = float(np.exp(control.log_scale)) * step
        reason = f"error {error:.2f}, corrected by {len(secants)} secants" if self.secants else "first step"
        proposal = self.region.limited(base, model.bonds, wanted, POLICY, trust, reason)
        self._applied = metric.apply(proposal.step)
        back_off = 1 - base.reach(proposal.step) / max(base.reach(wanted), 1e-12)
        self.feedback = replace(self.feedback, back_off=float(np.clip(back_off, 0.0, 1.0)))
        self.policy_steps += 1
        return replace(proposal, control=control.as_factors())

    def _by_core(self, base: Point, model: LocalModel, reason: str) -> Proposal:
        proposal = super().step_from(base, model)
        self._applied, self._scale = None, 1.0
        if model.metric is not None and proposal.method != "valence":
            self._applied = model.metric.apply(proposal.step)
        self.core_steps += 1
        return replace(proposal, reason=reason)

    def _scale_met(self) -> float:
        """What makes the metric right for the last two steps; 1 where they disagree, or it was right enough."""
        if len(self.curvatures) < 2 or self.curvatures[0] * self.curvatures[1] <= 0:
            return 1.0
        mean = float(np.mean(self.curvatures))
        return float(np.exp(mean)) if abs(mean) > np.log(self.guard.another_scale) else 1.0

    def _mistrust(self, base: Point, step: Array, springs_step: Array) -> str:
        """Why the metric is not believed here; empty where it is."""
        if self.core_steps_left > 0:
            self.core_steps_left -= 1
            return f"bad steps of the policy so far: {self.bad_steps}"
        if dot(step, base.forces) <= 0:
            return "the policy's step does not go downhill"
        cosine, log_ratio = _compared(step, springs_step)
        if cosine < self.guard.smallest_cosine:
            return f"the policy's step points elsewhere than the springs' (cosine {cosine:.2f})"
        if abs(log_ratio) > np.log(self.guard.largest_ratio):
            return f"the policy's step is {np.exp(log_ratio):.2g} times as long as the springs'"
        return ""


def _compared(step: Array, other: Array) -> tuple[float, float]:
    """Cosine between two steps and the logarithm of the ratio of their lengths."""
    first, second = float(np.linalg.norm(step)), float(np.linalg.norm(other))
    if not (np.isfinite(first) and first > 0 and second > 0):
        return 0.0, 0.0
    return dot(step, other) / (first * second), float(np.log(first / second))


def _kept_kind(name: str, value: Any) -> Any:
    """As `Feedback` has it; a TypeError or ValueError where it cannot be."""
    kind = type(getattr(Feedback(), name, None))
    return kind(value) if kind in (bool, int, float) else value


def _array(values: Any) -> Array | None:
    return None if values is None else np.asarray(values, dtype=np.float64)


def _log10(force: float) -> float:
    return float(np.log10(max(force, 1e-6)))
