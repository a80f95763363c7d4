"""The classical core: curvature-scaled limited-memory quasi-Newton steps inside a trust radius.

Each point is one force call. A point that is worse than the last few accepted ones is rejected: the next proposal
starts again from the best known base, nearer, and with the curvature just learned (a rejected call still teaches).

The stiffness that the newest secants correct is either that of springs between neighbours or a plain multiple of 1,
whichever explains the newest secants better; no force call is spent on the choice. Both are scaled by measured
curvature, however large or small, so that the unit of energy hardly matters. Where the springs are wrong, or say no
more than a multiple of 1 would, this is the plain curvature-scaled L-BFGS with its longer memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relaxion.optimize.learned import MetricSource, Past
from relaxion.optimize.models import LocalModel
from relaxion.optimize.point import Array, Point, Proposal, cosine, dot, longest
from relaxion.optimize.screen import screened
from relaxion.optimize.springs import SpringSettings
from relaxion.optimize.valence.constants import ValenceSettings
from relaxion.optimize.valence.memory import ValenceMemory
from relaxion.optimize.valence.model import ValenceModel
from relaxion.optimize.valence.path import along_internals

Solve = Callable[[Array], Array]
Measure = Callable[[Array], float]

SOFTEST_SHARE = 0.2  # Powell's damping: a secant softer than this share of the stiffness is stiffened
AGEING = 0.8  # weight of a secant relative to the next newer one
MOST_REJECTIONS = 6  # in a row, then another method takes over
FLOORS = 6  # tried until a step of molecules fits the trust radius
NEARLY = 0.85  # of the trust radius is near enough
BLOCKED = 0.1  # of a step of molecules is left by the screen: springs part what is crowded, such molecules are none
CERTAIN_CHANGE = 0.05  # eV; smaller differences of energies are not believed against the forces
RETURNED = 0.25  # of the last step: so near a place left before, the steps undo each other
PLACES = 8  # that are remembered


@dataclass(frozen=True)
class QuasiNewtonSettings:
    """Lengths in Å, energies in eV. Tuned on structures apart from every benchmark (docs/decisions.md)."""

    first_trust: float = 0.3
    """Longest displacement of an atom in the first step."""
    largest_trust: float = 0.6
    """The trust radius never grows beyond this (ASE's maxstep)."""
    smallest_trust: float = 1e-3
    """Below this the core has lost its way and gives up its memory."""
    springs_memory: int = 3
    """Secants that correct the springs. Old ones harm on top of a good metric."""
    plain_memory: int = 10
    """Secants that correct the plain stiffness, which knows nothing else."""
    reference_points: int = 3
    """A point must not lie above the highest of this many accepted points (non-monotone acceptance)."""
    plain_stiffness: float = 20.0
    """eV/Å², for a first step without springs."""
    judged_secants: int = 3
    """Secants over which springs and plain stiffness are compared."""
    springs_bonus: float = 1.3
    """Springs are taken while their error is below this many times that of the plain stiffness."""
    springs_cosine: float = 0.97
    """Springs whose answers to all judged secants are this parallel to the plain ones say nothing of their own."""
    springs: SpringSettings = field(default_factory=SpringSettings)
    use_springs: bool = True
    valence: ValenceSettings | None = field(default_factory=ValenceSettings)
    """Of molecules; None: they are springs like all else."""


@dataclass(frozen=True)
class Secant:
    """What one step taught: the step, and by how much the forces dropped along it."""

    step: Array
    drop: Array  # forces before - forces after, eV/Å

    @property
    def curvature(self) -> float:
        return dot(self.step, self.drop)


class QuasiNewton:
    """`judged(point)` takes in what was found at the last proposal, `step_from` makes the next one."""

    source: MetricSource | None = None  # a policy, where one is asked
    past = Past()  # of the present base
    core_steps = 0  # made in place of a policy that was not believed
    policy_steps = 0  # made by a policy
    sees_molecules = True  # they have internal coordinates

    def __init__(self, settings: QuasiNewtonSettings) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget everything learned."""
        self.trust = min(self.settings.first_trust, self.settings.largest_trust)
        self.secants: list[Secant] = []
        self.recent_energies: list[float] = []
        self.last: Proposal | None = None
        self.rejections = 0  # in a row
        self.places: list[Array] = []  # where the last bases were, the newest last
        self.returned = False  # the last step led back to one of them
        self.change = 0.0  # eV, of the last step, as it is believed
        self.contradiction = ""  # the first energy that contradicts the forces, in words
        self.valence = ValenceMemory()

    def more(self) -> dict[str, Any]:
        """What it remembers beside secants, as plain numbers and arrays, for the restart file."""
        return {"valence": self.valence.plain()} if self.valence.topology is not None else {}

    def take_more(self, plain: dict[str, Any]) -> None:
        """The opposite of `more`; what was restored of the last step is there already."""
        if "valence" in plain and self.last is not None:
            self.valence = ValenceMemory.restored(plain["valence"], self.last.base)

    def arrays(self) -> list[Array]:
        """Everything remembered that has a row for each coordinate."""
        own = [array for secant in self.secants for array in (secant.step, secant.drop)]
        return [
            *own,
            *self.places,
            *(array for point in self.valence.points() for array in (point.coordinates, point.forces)),
        ]

    @property
    def lost(self) -> str:
        """Why another method should take over; empty where none should."""
        if self.rejections >= MOST_REJECTIONS:
            return f"{self.rejections} points rejected in a row"
        if self.trust < min(self.settings.smallest_trust, self.settings.largest_trust / 300):
            return f"the trust radius fell to {self.trust:.2g} Å"
        return ""

    def judged(self, point: Point) -> Point:
        """Take in the point reached by the last proposal; where the next step begins."""
        base = point if self.last is None else self._judge(point, self.last)
        if base is point:
            self.recent_energies = [*self.recent_energies, point.energy][-self.settings.reference_points :]
            self.places = [*self.places, point.coordinates][-PLACES:]
        return base

    def _judge(self, point: Point, last: Proposal) -> Point:
        """Learn from the point; return the base of the next step: the point, or the last base if rejected."""
        step = point.coordinates - last.base.coordinates
        length = point.reach(step)
        self.returned = False
        if not point.finite:
            self.rejections += 1
            self.trust = length / 4
            return last.base
        self._learn(Secant(step, last.base.forces - point.forces))
        if self.valence.topology is not None and point.geometry is not None:
            self.valence.learn(last.base, point)
        self.change = energy_change(last.base, point, step)
        if contradicts(last, point, step):
            self._forget_energies(last.base, point, step)
        elif point.energy > max(self.recent_energies) + noise(point.energy) and self.change > 0:
            self.rejections += 1
            self.trust = length / 4
            return last.base
        self.rejections = 0
        self._adapt_trust(self.change, last, length, overshoot(last.base, point, step))
        self._break_cycles(point, length)
        return point

    def _forget_energies(self, base: Point, point: Point, step: Array) -> None:
        """The energy jumped without work being done: those before cannot be compared with it."""
        self.change = work(base, point, step)
        self.recent_energies = []
        self.contradiction = self.contradiction or (
            f"the energy changed by {point.energy - base.energy:+.3g} eV in one step, but the forces did work for "
            f"{self.change:+.3g} eV: energies before and after that step are not compared"
        )

    def _break_cycles(self, point: Point, length: float) -> None:
        """Steps that lead back to where one was before are too long, however well each of them went."""
        ways = (point.reach(point.coordinates - place) for place in self.places[:-1])
        self.returned = any(way < RETURNED * length for way in ways)
        if self.returned:
            self.trust = min(self.trust, length / 4)

    def _learn(self, secant: Secant) -> None:
        """Keep a secant of positive curvature; others would make the metric indefinite."""
        softest = 1e-5 * dot(secant.step, secant.step)
        if secant.curvature > softest:
            self.secants = [*self.secants, secant][-self.settings.plain_memory :]

    def _adapt_trust(self, change: float, last: Proposal, length: float, overshot: bool) -> None:
        kept = change / last.expected_change
        if overshot or kept < 0.25:
            # a policy's radius may be a multiple of ours: half of its step is half of that multiple
            own = length * min(1.0, self.trust / last.trust)
            self.trust = min(max(0.5 * own, 0.02), self.settings.largest_trust)
        elif kept > 0.5 and length > 0.8 * self.trust:
            self.trust = min(2 * self.trust, self.settings.largest_trust)

    def step_from(self, base: Point, model: LocalModel) -> Proposal:
        """The step that the secants known so far suggest, inside the trust radius and screened for close pairs."""
        if model.valence is not None:
            proposal = self._along_valence(base, model, model.valence)
            if proposal.wanted is None or base.reach(proposal.step) > BLOCKED * base.reach(proposal.wanted):
                return proposal
        self.valence = ValenceMemory()
        method, solve = self._stiffness(model)
        memory = self.settings.springs_memory if method == "springs" else self.settings.plain_memory
        step = corrected(base.forces, self.secants[-memory:], solve)
        if not downhill(step, base.forces):
            self.secants = []
            step = solve(base.forces)
        return self.limited(base, model, step, method, self.trust)

    def _along_valence(self, base: Point, model: LocalModel, valence: ValenceModel) -> Proposal:
        """The same where there are molecules: their own stiffness, secants in internal coordinates, curved steps."""
        carried = [Secant(*secant) for secant in self.valence.secants(valence)]
        secants = damped(carried, valence.apply)
        if not downhill(corrected(base.forces, secants, valence.solve), base.forces):
            self.valence.pairs, secants = [], []
        step, floor = within(self.trust, base, secants, valence)
        expected = -(dot(base.forces, step) + floor * dot(step, step)) / 2
        proposal = screened(
            Proposal(base, step, min(expected, -1e-16), "valence", wanted=step, trust=self.trust), model.bonds
        )
        curved = along_internals(valence, proposal.step, self.settings.largest_trust, base.reach)
        return screened(replace(proposal, step=curved), model.bonds)

    def limited(
        self, base: Point, model: LocalModel, step: Array, method: str, trust: float, reason: str = ""
    ) -> Proposal:
        """The step inside a trust radius, screened for close pairs."""
        share = min(1.0, trust / max(base.reach(step), 1e-12))
        expected = -dot(base.forces, step) * share * (1 - share / 2)
        proposal = Proposal(base, share * step, min(expected, -1e-16), method, reason, step, trust)
        return screened(proposal, model.bonds)

    def _stiffness(self, model: LocalModel) -> tuple[str, Solve]:
        """The inverse stiffness to be corrected: of springs or plain, scaled by the newest secant."""
        settings, judged = self.settings, self.secants[-self.settings.judged_secants :]
        springs = model.springs
        if not settings.use_springs or springs is None:
            return "plain", self._plain(judged)
        if not judged:
            return "springs", springs.solve
        answers = [springs.solve(secant.drop) for secant in judged]
        if not self._springs_help(judged, answers):
            return "plain", self._plain(judged)
        scale = judged[-1].curvature / dot(judged[-1].drop, answers[-1])
        return "springs", lambda forces: scale * springs.solve(forces)

    def _springs_help(self, judged: list[Secant], answers: list[Array]) -> bool:
        """Whether they say something that a multiple of 1 does not, and nothing too wrong."""
        drops = [secant.drop for secant in judged]
        if all(cosine(*pair) > self.settings.springs_cosine for pair in zip(answers, drops, strict=True)):
            return False
        return weighted_error(judged, answers) <= self.settings.springs_bonus * weighted_error(judged, drops)

    def _plain(self, judged: list[Secant]) -> Solve:
        if not judged:
            return lambda forces: forces / self.settings.plain_stiffness
        newest = judged[-1]
        scale = newest.curvature / dot(newest.drop, newest.drop)
        return lambda forces: scale * forces


def corrected(forces: Array, secants: list[Secant], solve: Solve) -> Array:
    """The two-loop recursion of L-BFGS (Nocedal 1980) with `solve` as the initial inverse stiffness."""
    right, weights = forces.copy(), []
    for secant in reversed(secants):
        weight = dot(secant.step, right) / secant.curvature
        right -= weight * secant.drop
        weights.append(weight)
    step = solve(right)
    for secant, weight in zip(secants, reversed(weights), strict=True):
        step = step + (weight - dot(secant.drop, step) / secant.curvature) * secant.step
    return step


def within(trust: float, base: Point, secants: list[Secant], model: ValenceModel) -> tuple[Array, float]:
    """The step of (B + λ·1) inside the trust radius with as little λ as that takes, and λ (eV/Å²).

    Stiff coordinates relax in full, soft ones as far as they may; a shortened step would leave all of them unrelaxed.
    1/length is nearly linear in λ, so that a few points of it are enough.
    """
    low, floor, forces = 0.0, 0.0, base.forces
    length_low = length = base.reach(step := _shifted(forces, secants, model, floor))
    high = length_high = 0.0
    for _ in range(FLOORS):
        if length <= trust and (floor == 0 or length > NEARLY * trust):
            break
        if length > trust:
            low, length_low = floor, length
        else:
            high, length_high = floor, length
        if high == 0:
            floor = low + dot(forces, step) / dot(step, step) * (length / trust - 1)
        else:
            share = (1 / trust - 1 / length_low) / (1 / length_high - 1 / length_low)
            floor = low + float(np.clip(share, 0.1, 0.9)) * (high - low)
        length = base.reach(step := _shifted(forces, secants, model, floor))
    return step * min(1.0, trust / max(length, 1e-12)), floor


def _shifted(forces: Array, secants: list[Secant], model: ValenceModel, floor: float) -> Array:
    """The quasi-Newton step where everything, secants included, is stiffer by a floor."""
    stiffer = [Secant(secant.step, secant.drop + floor * secant.step) for secant in secants]
    return corrected(forces, stiffer, lambda right: model.solve(right, floor))


def downhill(step: Array, forces: Array) -> bool:
    """Whether a step goes along the forces, and is one at all."""
    return bool(dot(step, forces) > 1e-3 * np.linalg.norm(step) * np.linalg.norm(forces))  # False if not a number


def damped(secants: Sequence[Secant], apply: Solve) -> list[Secant]:
    """None softer than a share of the stiffness they correct (Powell 1978): the correction stays positive."""
    stiffened = (_damped(secant, apply(secant.step)) for secant in secants)
    return [secant for secant in stiffened if secant is not None]


def _damped(secant: Secant, applied: Array) -> Secant | None:
    """`applied`: B·s; None where the stiffness B has none along the step."""
    own = dot(secant.step, applied)
    if own <= 0:
        return None
    if secant.curvature >= SOFTEST_SHARE * own:
        return secant
    weight = (1 - SOFTEST_SHARE) * own / (own - secant.curvature)
    return Secant(secant.step, weight * secant.drop + (1 - weight) * applied)


def believed(
    secants: Sequence[Secant], apply: Solve, weight: float, length: float, reach: Measure = longest
) -> list[Secant]:
    """Each as a mean of what was met and what the stiffness B says, y ← w·y + (1 - w)·B·s, and damped.

    B is predicted for the way ahead, a secant was measured on the way behind: the longer its step, and the older it is,
    the less it says of the stiffness here. w = `weight` · 0.8^age / (1 + (length of s / `length`)²), the newest having
    age 0; `reach` measures lengths, `Point.reach` as atoms feel them.
    """
    result = list[Secant]()
    for age, secant in enumerate(reversed(secants) if weight > 0 else ()):
        own = weight * AGEING**age / (1 + (reach(secant.step) / length) ** 2)
        applied = apply(secant.step)
        mean = _damped(Secant(secant.step, own * secant.drop + (1 - own) * applied), applied)
        result += [] if mean is None else [mean]
    return result[::-1]


def weighted_error(secants: list[Secant], answers: list[Array]) -> float:
    """How far answers miss the steps, newest counting most: mean of |s - γ·H·y| / |s|; 0 without secants.

    γ makes the curvature right, since springs know shapes only.
    """
    total, weights, weight = 0.0, 0.0, 1.0
    for secant, answer in zip(reversed(secants), reversed(answers), strict=True):
        scale = secant.curvature / dot(secant.drop, answer)
        total += weight * float(np.linalg.norm(secant.step - scale * answer) / np.linalg.norm(secant.step))
        weights += weight
        weight *= 0.6
    return total / weights if secants else 0.0


def missed(secants: list[Secant], apply: Solve) -> float:
    """By how much a stiffness misses the drops of the forces: mean of |y - B·s| / |y|; 0 without secants."""
    misses = [np.linalg.norm(secant.drop - apply(secant.step)) / np.linalg.norm(secant.drop) for secant in secants]
    return float(np.mean(misses)) if misses else 0.0


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
