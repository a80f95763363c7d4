"""How the policy `universal` learns from a store of relaxations (`relaxion collect`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from relaxion.optimize.trust_rule import DEFAULT, StepControl
from relaxion.settings import Settings


@dataclass(frozen=True)
class LessonRule:
    """Which states of a relaxation teach something."""

    smallest_force_ev_per_angstrom: float
    farthest_angstrom: float
    end_tolerance_ev_per_angstrom: float


class UniversalSettings(Settings):
    """Where the lessons are, which count, and how they are learned."""

    store: str = ""
    """Folder that `relaxion collect` filled; several with ':' between them."""

    molecule_share: float = Field(default=0.0, ge=0, le=1)
    """Of the lessons of an update, those from structures without any periodic direction. 1 or 0: only such, or none,
    and the policy is for such or for the others."""

    n_updates: int = Field(default=5000, ge=1)
    """Updates in all; the rate falls along half a cosine over them."""

    n_lessons: int = Field(default=64, ge=1)
    """Lessons per update."""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Of Adam, at the start."""

    final_learning_rate: float = Field(default=1e-5, gt=0)
    """At the end."""

    largest_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened: one odd structure must not throw the weights off."""

    smallest_force_ev_per_angstrom: float = Field(default=0.03, gt=0)
    """States below need no lesson: nobody steps from there, and single precision blurs the way."""

    farthest_angstrom: float = Field(default=1.0, gt=0)
    """States with an atom farther from the end teach nothing: no quadratic form knows the way."""

    end_tolerance_ev_per_angstrom: float = Field(default=5e-3, gt=0)
    """A relaxation whose last structure has no larger force has found its minimum."""

    secant_weight: float = Field(default=0.6, ge=0, le=1)
    """Of the bundle's steady gate: how far steps are corrected by the newest secants. A metric for everything is less
    exact than one for a few metals, which the same correction would harm."""

    n_secants: int = Field(default=1, ge=1)
    """So many of them."""

    def gate(self) -> StepControl:
        """How the guard's knobs stand, always: those of the usual rule, but for the secants."""
        return replace(DEFAULT, secant_weight=self.secant_weight, n_secants=self.n_secants)

    def rule(self) -> LessonRule:
        """Which states teach."""
        return LessonRule(
            self.smallest_force_ev_per_angstrom, self.farthest_angstrom, self.end_tolerance_ev_per_angstrom
        )
