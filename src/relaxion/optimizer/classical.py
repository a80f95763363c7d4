"""The classical core: curvature-scaled limited-memory quasi-Newton steps inside a trust radius.

Each point is one force call. A point that is worse than the last few accepted ones is rejected: the next proposal
starts again from the best known base, nearer, and with the curvature just learned (a rejected call still teaches).

The stiffness that the newest secants correct is either that of springs between neighbours or a plain multiple of 1,
whichever explains the newest secants better; no force call is spent on the choice. Both are scaled by measured
curvature, however large or small, so that the unit of energy hardly matters. Where the springs are wrong, or say no
more than a multiple of 1 would, this is the plain curvature-scaled L-BFGS with its longer memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relaxion.optimizer.hessian.base import LocalModel, Secant, Solve, corrected, damped, downhill, weighted_error
from relaxion.optimizer.hessian.internal.constants import ValenceSettings
from relaxion.optimizer.hessian.internal.model import ValenceMemory, ValenceModel, along_internals
from relaxion.optimizer.hessian.learned import MetricSource, Past
from relaxion.optimizer.hessian.springs import SpringSettings
from relaxion.optimizer.point import Array, Point, Proposal, cosine, dot
from relaxion.optimizer.trust_region import TrustRegion, TrustRegionSettings, screened

FLOORS = 6  # tried until a step of molecules fits the trust radius
NEARLY = 0.85  # of the trust radius is near enough
BLOCKED = 0.1  # of a step of molecules is left by the screen: springs part what is crowded, such molecules are none


@dataclass(frozen=True)
class QuasiNewtonSettings:
    """Lengths in Å, energies in eV. Tuned on structures apart from every benchmark (docs/decisions.md)."""

    region: TrustRegionSettings = field(default_factory=TrustRegionSettings)
    springs_memory: int = 3
    """Secants that correct the springs. Old ones harm on top of a good metric."""
    plain_memory: int = 10
    """Secants that correct the plain stiffness, which knows nothing else."""
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
        self.secants: list[Secant] = []
        self.last: Proposal | None = None
        self.region = TrustRegion(self.settings.region)
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
            *self.region.places,
            *(array for point in self.valence.points() for array in (point.coordinates, point.forces)),
        ]

    def judged(self, point: Point) -> Point:
        """Take in the point reached by the last proposal; where the next step begins: there, or at the last base."""
        last = self.last
        accepted = last is None or self.region.judge(point, last)
        if last is not None and point.finite:
            self._learn(Secant(point.coordinates - last.base.coordinates, last.base.forces - point.forces))
            if self.valence.topology is not None and point.geometry is not None:
                self.valence.learn(last.base, point)
        if last is not None and not accepted:
            return last.base
        self.region.begin(point)
        return point

    def _learn(self, secant: Secant) -> None:
        """Keep a secant of positive curvature; others would make the metric indefinite."""
        softest = 1e-5 * dot(secant.step, secant.step)
        if secant.curvature > softest:
            self.secants = [*self.secants, secant][-self.settings.plain_memory :]

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
        return self.region.limited(base, model.bonds, step, method, self.region.radius)

    def _along_valence(self, base: Point, model: LocalModel, valence: ValenceModel) -> Proposal:
        """The same where there are molecules: their own stiffness, secants in internal coordinates, curved steps."""
        carried = [Secant(*secant) for secant in self.valence.secants(valence)]
        secants = damped(carried, valence.apply)
        if not downhill(corrected(base.forces, secants, valence.solve), base.forces):
            self.valence.pairs, secants = [], []
        step, floor = within(self.region.radius, base, secants, valence)
        expected = -(dot(base.forces, step) + floor * dot(step, step)) / 2
        proposal = screened(
            Proposal(base, step, min(expected, -1e-16), "valence", wanted=step, trust=self.region.radius), model.bonds
        )
        curved = along_internals(valence, proposal.step, self.settings.region.largest, base.reach)
        return screened(replace(proposal, step=curved), model.bonds)

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
