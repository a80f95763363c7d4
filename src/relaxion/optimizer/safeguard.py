"""The safeguard: which model of the Hessian makes the next step, and why.

Checking costs no force call. Before a call the policy's step is compared with that of the springs (angle, length);
after it the forces found are compared with those predicted. Recent secants correct the learned Hessian, each the more
the shorter its step was (`secants.believed`). After a bad step, one that was rejected or did not help, the classical
optimizer takes the next ones: one, then three, then seven, until the policy has done well again. Points are accepted or
rejected by the trust region whoever made the step, with FIRE behind: limit points are stationary whatever the network
answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from relaxion.errors import PolicyError
from relaxion.model.policy_file import Network
from relaxion.optimizer.classical import INTERNAL, JUDGED_SECANTS, ClassicalSettings, candidates
from relaxion.optimizer.hessian.base import (
    POLICY,
    Candidate,
    Hessian,
    Hessians,
    Models,
    Past,
    PolicyModel,
    Scaled,
    Secants,
    believed,
    missed,
)
from relaxion.optimizer.point import Array, Point, Proposal, dot
from relaxion.optimizer.trust_region import TrustRegion


@dataclass(frozen=True)
class StepRule:
    """How a step is made of a stiffness and of what the last steps met (`secants.believed`)."""

    log_scale: float = 0.0
    """Natural logarithm of a factor on the step."""
    log_trust: float = 0.0
    """Natural logarithm of a factor on the trust radius."""
    secant_weight: float = 0.9
    """Weight of the secant of a short step; 0: the Hessian alone, 1: the secant alone."""
    n_secants: int = 8
    """So many of the newest are used; each counts less than the next newer one."""
    secant_length: float = 0.1
    """Å: the secant of a step of this length has half the weight. Shorter for more exact Hessians."""
    floor: float = 0.0
    """Extra stiffness of every coordinate against its place, eV/Å²."""

    def as_factors(self) -> dict[str, float]:
        """For the history: factors in place of their logarithms."""
        return {
            "scale": float(np.exp(self.log_scale)),
            "trust_factor": float(np.exp(self.log_trust)),
            "secant_weight": self.secant_weight,
            "secant_length_angstrom": self.secant_length,
            "floor_ev_per_angstrom2": self.floor,
        }


DEFAULT = StepRule(log_trust=float(np.log(2)))
"""Where a policy file has no rule: twice the classical optimizer's trust radius. Measured in docs/decisions.md."""
INEXACT = 0.3  # Å, `secant_length` of a policy for everything

GATE = "gate"  # the role of a rule in a bundle
CONSTANT = "steady"  # among its settings: it has no network, its weights are the control itself
CONSTANTS = ("log_scale", "log_trust", "secant_weight", "n_secants", "secant_length", "floor")


def rule_of(network: Network, name: str) -> StepRule:
    """The rule of the bundle `name`."""
    if CONSTANT not in network.settings:
        raise PolicyError(
            f"the policy {name} has a learned gate, which early releases could train; those were no better than the "
            "rule that is the same at every step, and are no longer read: train the policy again, without a gate"
        )
    try:
        weights = {"secant_length": torch.tensor(INEXACT, dtype=torch.float64)} | dict(network.weights)
        values = {key: float(weights[key]) for key in CONSTANTS}
        control = StepRule(**{**values, "n_secants": int(values["n_secants"])})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the step rule of {name} cannot be rebuilt: {type(error).__name__} {error}") from error
    sound = control.n_secants >= 1 and control.secant_length > 0 and control.floor >= 0
    if not (0 <= control.secant_weight <= 1 and sound):
        raise PolicyError(f"the step rule of {name} sets parameters out of their ranges: {control}")
    if "secant_length" not in network.weights and control.secant_weight > 0:
        # of an earlier release: its weight was one of steps, which nobody uses any more
        return replace(control, secant_weight=DEFAULT.secant_weight, n_secants=DEFAULT.n_secants)
    return control


def constant_network(control: StepRule) -> Network:
    """What a bundle keeps of its rule."""
    weights = {name: torch.tensor(float(getattr(control, name)), dtype=torch.float64) for name in CONSTANTS}
    return Network(GATE, {CONSTANT: True}, weights, {})


@dataclass(frozen=True)
class Feedback:
    """What the last point showed of the step that led there."""

    energy_ratio: float = 1.0
    """Energy change met over that expected; 1 at the start."""
    log_curvature_ratio: float = 0.0
    """Logarithm of the curvature met over that of the learned Hessian."""
    log_force_ratio: float = 0.0
    """log10 of the largest force found over the one before."""
    back_off: float = 0.0
    """Share of the step that trust radius and minimum distance took away."""
    rejected: bool = False
    returned: bool = False
    """It led back to where one was before."""
    points: int = 1
    """Points seen so far."""


class Safeguard:
    """The models of one relaxation, and the record of the policy's steps.

    A step is bad if it is rejected, or useless: taken in full, the largest force hardly fell, and the measured
    curvature differs much from the Hessian's. Where no secants correct the Hessian it is also bad if it lowers the
    energy by less than a share of the predicted change. Tuned on structures outside every benchmark.
    """

    full_step = 0.1  # trust region and minimum distance took away less than this share
    hardly = 0.2  # decades by which the largest force must fall
    another = 3.0  # ratio of measured curvature and the Hessian's, either way, above which they differ much
    least_kept = 0.25  # share of the predicted change of the energy
    most_classical_steps = 15  # of the classical optimizer after several bad steps in a row
    smallest_cosine = 0.0  # between the policy's step and the springs'; below it the classical optimizer steps
    largest_ratio = 30.0  # of the two steps' lengths, either way, likewise
    softest = 0.2  # eV/Å²: no step is longer than if everything were as soft, so small forces lead to small steps
    # The Hessian is scaled by the curvature of the last two steps, both taken in full, if both times it was at least
    # this many times larger, or smaller, than its own: the policy may come from a softer potential.
    another_scale = 1.5

    def __init__(
        self, classical: ClassicalSettings, policy: PolicyModel | None = None, rule: StepRule | None = None
    ) -> None:
        self.classical = classical
        self.models = Models(policy, internal=classical.internal)
        self.rule = rule or DEFAULT
        self.policy_steps = 0  # made by the policy
        self.classical_steps = 0  # made by the classical optimizer in place of a policy
        self.bad_steps = 0  # of the policy, in a row; kept when FIRE has helped out
        self.reset()

    def reset(self) -> None:
        """Forget the last steps, but not how often the policy failed."""
        self.feedback = Feedback()
        self.classical_steps_left = 0  # before the policy is asked again
        self.past = Past()  # of the present base
        self.curvatures: list[float] = []  # of the last two steps, met over the policy's own, logarithms
        self._applied: Array | None = None  # B·step of the last proposal, by the policy's Hessian at its base
        self._scale = 1.0  # of that Hessian
        self._alone = False  # no secants can correct that Hessian

    @property
    def has_policy(self) -> bool:
        return self.models.policy is not None

    @property
    def method(self) -> str:
        """Of the policy's steps; of a cheaper potential's it is another."""
        return POLICY if self.models.policy is None else self.models.policy.method

    def leave_policy(self) -> None:
        """The policy is not asked any more; the classical optimizer's steps count as made in its place."""
        self._left = True
        self.models = replace(self.models, policy=None)

    _left = False

    def watch(self, point: Point, last: Proposal, region: TrustRegion, *, accepted: bool) -> None:
        """Take in what the last proposal led to, and decide whether the policy makes the next steps."""
        if not (self.has_policy or self._left):
            return
        self.feedback = self._feedback(point, last, region, rejected=not accepted)
        self._learn_scale(point)
        if accepted:
            self.past = Past(self.feedback.points, last.base.coordinates, last.base.forces)
        if last.method != self.method:
            return
        if self._was_bad():
            self.bad_steps += 1
            self.classical_steps_left = min(2**self.bad_steps - 1, self.most_classical_steps)
        else:
            self.bad_steps = max(0, self.bad_steps - 1)

    def candidates(self, base: Point, hessians: Hessians, secants: Secants, region: TrustRegion) -> Iterator[Candidate]:
        """Who may make the next step: the policy where it can be trusted, else the classical models in their order."""
        reason = ""
        if self.has_policy or self._left:
            found = self._policy_candidate(base, hessians, secants, region.radius)
            if isinstance(found, Candidate):
                yield found
                return
            reason = found
        for candidate in candidates(base, hessians, secants, self.classical, region.radius):
            yield replace(candidate, reason=reason)

    def took(self, base: Point, hessians: Hessians, candidate: Candidate, proposal: Proposal) -> None:
        """Remember the step that was made."""
        if not (self.has_policy or self._left):
            return
        if candidate.method == self.method:
            self.policy_steps += 1
            self._applied = candidate.hessian.apply(proposal.step)
            wanted = proposal.step if proposal.wanted is None else proposal.wanted
            back_off = 1 - base.reach(proposal.step) / max(base.reach(wanted), 1e-12)
            self.feedback = replace(self.feedback, back_off=float(np.clip(back_off, 0.0, 1.0)))
            return
        self.classical_steps += 1
        self._scale = 1.0
        self._applied = None
        if hessians.learned is not None and candidate.method != INTERNAL:
            self._applied = hessians.learned.apply(proposal.step)

    def _policy_candidate(self, base: Point, hessians: Hessians, secants: Secants, radius: float) -> Candidate | str:
        """The policy's Hessian, corrected by secants; or why it is not used here."""
        if hessians.learned is None or hessians.springs is None:
            return hessians.not_learned or "the policy does not apply here"
        judged = secants.recent[-JUDGED_SECANTS:]
        hessian = hessians.learned
        self._scale = self._measured_scale() if hessian.has_curvature else 1.0
        if self._scale != 1:
            hessian = Scaled(hessian, 1 / self._scale)
        step = hessian.solve(base.forces)
        if not np.isfinite(step).all():
            return "the policy's step is not finite"
        if reason := self._mistrust(base, step, hessians.springs):
            return reason
        rule = self.rule
        self._alone = rule.secant_weight == 0 or not hessian.has_curvature
        used = []
        if not self._alone:
            newest = secants.recent[-rule.n_secants :]
            used = believed(newest, hessian.apply, rule.secant_weight, rule.secant_length, base.reach)
        radius = min(radius * float(np.exp(rule.log_trust)), self.classical.region.largest)
        error = missed(judged, hessian.apply)
        return Candidate(
            method=self.method,
            hessian=hessian,
            secants=used,
            radius=min(radius, base.largest_force / self.softest),
            scale=float(np.exp(rule.log_scale)),
            shift=rule.floor,
            reason=f"error {error:.2f}, corrected by {len(used)} secants" if secants.recent else "first step",
            control=rule.as_factors(),
        )

    def _mistrust(self, base: Point, step: Array, springs: Hessian) -> str:
        """Why the policy's step is not taken here; empty where it is."""
        if self.classical_steps_left > 0:
            self.classical_steps_left -= 1
            return f"bad steps of the policy so far: {self.bad_steps}"
        if dot(step, base.forces) <= 0:
            return "the policy's step does not go downhill"
        cosine, log_ratio = _compared(step, springs.solve(base.forces))
        if cosine < self.smallest_cosine:
            return f"the policy's step points elsewhere than the springs' (cosine {cosine:.2f})"
        if abs(log_ratio) > np.log(self.largest_ratio):
            return f"the policy's step is {np.exp(log_ratio):.2g} times as long as the springs'"
        return ""

    def _measured_scale(self) -> float:
        """What makes the Hessian right for the last two steps; 1 where they disagree, or it was right enough."""
        if len(self.curvatures) < 2 or self.curvatures[0] * self.curvatures[1] <= 0:
            return 1.0
        mean = float(np.mean(self.curvatures))
        return float(np.exp(mean)) if abs(mean) > np.log(self.another_scale) else 1.0

    def _learn_scale(self, point: Point) -> None:
        """From steps taken in full: far from a minimum, where they are cut, curvatures are not the Hessian's."""
        if self.feedback.rejected or self.feedback.back_off >= self.full_step:
            self.curvatures = []
        elif point.finite and self._applied is not None:
            own = self.feedback.log_curvature_ratio + float(np.log(self._scale))
            self.curvatures = [*self.curvatures, own][-2:]

    def _was_bad(self) -> bool:
        feedback = self.feedback
        full = feedback.back_off < self.full_step
        useless = feedback.log_force_ratio > -self.hardly
        wrong = bool(abs(feedback.log_curvature_ratio) > np.log(self.another))
        short_of = self._alone and feedback.energy_ratio < self.least_kept
        return feedback.rejected or feedback.returned or (full and useless and wrong) or short_of

    def _feedback(self, point: Point, last: Proposal, region: TrustRegion, *, rejected: bool) -> Feedback:
        points = self.feedback.points + 1
        if not point.finite:
            return Feedback(energy_ratio=-2.0, rejected=True, points=points)
        ratio = 0.0
        if self._applied is not None:
            step = point.coordinates - last.base.coordinates
            met = dot(step, last.base.forces - point.forces)
            expected = max(dot(step, self._applied), 1e-12)
            ratio = float(np.log(np.clip(met / expected, 0.05, 20.0)))
        return Feedback(
            energy_ratio=float(np.clip(region.change / last.expected_change, -2.0, 3.0)),
            log_curvature_ratio=ratio,
            log_force_ratio=_log10(point.largest_force) - _log10(last.base.largest_force),
            back_off=self.feedback.back_off,
            rejected=rejected,
            returned=region.returned,
            points=points,
        )

    def plain(self) -> dict[str, Any]:
        """For a restart file; empty where there never was a policy."""
        if not (self.has_policy or self._left):
            return {}
        past = {"calls": self.past.calls, "coordinates": self.past.coordinates, "forces": self.past.forces}
        return {
            "lesson": asdict(self.feedback),
            "steps": [self.policy_steps, self.classical_steps, self.bad_steps, self.classical_steps_left],
            "applied": self._applied,
            "past": past,
            "left": self._left,
            "scale": self._scale,
            "curvatures": self.curvatures,
            "alone": self._alone,
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """The opposite. KeyError, TypeError or ValueError where the content is foreign."""
        if "steps" not in plain:  # written without a policy
            return
        saved = {str(name): value for name, value in plain["lesson"].items() if name in Feedback.__annotations__}
        self.feedback = Feedback(**{name: type(getattr(Feedback(), name))(value) for name, value in saved.items()})
        counts = (int(number) for number in plain["steps"])
        self.policy_steps, self.classical_steps, self.bad_steps, self.classical_steps_left = counts
        self._applied = _array(plain["applied"])
        self._scale = float(plain.get("scale", 1.0))  # younger than the files
        self._alone = bool(plain.get("alone", False))
        self.curvatures = [float(number) for number in plain.get("curvatures", [])]
        if plain["left"]:
            self.leave_policy()
        past = plain["past"]
        self.past = Past(int(past["calls"]), _array(past["coordinates"]), _array(past["forces"]))

    def arrays(self) -> list[Array]:
        """Everything remembered that has a row for each coordinate."""
        own = (self._applied, self.past.coordinates, self.past.forces)
        return [array for array in own if array is not None]


def _compared(step: Array, other: Array) -> tuple[float, float]:
    """Cosine between two steps and the logarithm of the ratio of their lengths."""
    first = float(np.linalg.norm(step))
    second = float(np.linalg.norm(other))
    if not (np.isfinite(first) and first > 0 and second > 0):
        return 0.0, 0.0
    return dot(step, other) / (first * second), float(np.log(first / second))


def _array(values: Any) -> Array | None:
    return None if values is None else np.asarray(values, dtype=np.float64)


def _log10(force: float) -> float:
    return float(np.log10(max(force, 1e-6)))
