"""A whole contest: who took part, under which conditions, what came out.

Means with intervals, paired ratios, same minima, break-even and performance profiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from ase import Atoms

from relaxion.train.judge.runs import CORE, OURS, Score

Array = np.ndarray
SAME_MINIMUM_EV_PER_ATOM = 1e-3
SHIFT = 1.0  # force call, added before logarithms: so that a relaxation of 1 call does not decide a mean of ratios
RESAMPLES = 2000
SEED = 0  # of the resampling; it chooses no structures
SHARE = 95  # per cent, of intervals and of the upper percentile


@dataclass(frozen=True)
class Interval:
    """A number and where it lies in 95 of 100 resamplings of the structures."""

    value: float
    low: float
    high: float

    def __format__(self, style: str) -> str:
        return f"{self.value:{style}} ({self.low:{style}}–{self.high:{style}})"


@dataclass(frozen=True)
class OptimizerSummary:
    """One contestant over all starts; failures are charged at the cap."""

    mean: Interval
    median: float
    p95: float
    worst: int
    failures: int
    seconds: float
    calculator_seconds: float
    overhead_seconds_per_call: float

    @classmethod
    def of(cls, scores: Sequence[Score]) -> OptimizerSummary:
        calls = charged(scores)
        spent = sum(score.spent for score in scores)
        return cls(
            mean=resampled(calls),
            median=float(np.median(calls)),
            p95=float(np.percentile(calls, SHARE)),
            worst=int(calls.max()),
            failures=sum(not score.converged for score in scores),
            seconds=sum(score.seconds for score in scores),
            calculator_seconds=sum(score.calculator_seconds for score in scores),
            overhead_seconds_per_call=sum(score.overhead_seconds for score in scores) / max(spent, 1),
        )


def charged(scores: Sequence[Score]) -> Array:
    """Force calls, start by start."""
    return np.array([score.charged for score in scores], dtype=np.float64)


def resampled(calls: Array, others: Array | None = None) -> Interval:
    """The mean, or with `others` the ratio of both means, paired: a structure is drawn for both or for neither."""
    value = calls.mean() if others is None else calls.mean() / others.mean()
    low, high = np.percentile(resampled_means(calls, others), [(100 - SHARE) / 2, (100 + SHARE) / 2])
    return Interval(float(value), float(low), float(high))


def resampled_means(calls: Array, others: Array | None = None) -> Array:
    """The mean, or the ratio of both means, in each resampling of the structures, (RESAMPLES,)."""
    which = np.random.default_rng(SEED).integers(len(calls), size=(RESAMPLES, len(calls)))
    means = calls[which].mean(axis=1)
    return means if others is None else means / others[which].mean(axis=1)


def best_classical(scores: Mapping[str, Sequence[Score]], classical: Sequence[str]) -> str | None:
    """The one with the fewest force calls on the whole set; None if none was asked for."""
    return min(classical, key=lambda name: charged(scores[name]).mean(), default=None)


@dataclass(frozen=True)
class Comparison:
    """Ours beside another, paired start by start."""

    other: str
    ratio: Interval  # of mean force calls
    geometric_ratio: float  # of shifted geometric means
    p95_of_paired_ratios: float
    p95_where_same: float | None  # the same where both ended in the same minimum; None: nowhere
    same_minimum_rate: float | None  # of the starts where both converged; None: nowhere
    lower_minimum_rate: float | None  # ours ended below
    break_even_seconds: float | None  # per force call, above which ours takes less time; None: never

    @classmethod
    def of(cls, ours: Sequence[Score], other: Sequence[Score], name: str) -> Comparison:
        calls = charged(ours)
        others = charged(other)
        every = energy_gaps(ours, other)
        gaps = every[np.isfinite(every)]
        same = np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM
        return cls(
            other=name,
            ratio=resampled(calls, others),
            geometric_ratio=float(np.exp(np.log((calls + SHIFT) / (others + SHIFT)).mean())),
            p95_of_paired_ratios=float(np.percentile(calls / others, SHARE)),
            p95_where_same=p95_where_same(calls, others, every),
            same_minimum_rate=float(same.mean()) if len(gaps) else None,
            lower_minimum_rate=float((gaps < -SAME_MINIMUM_EV_PER_ATOM).mean()) if len(gaps) else None,
            break_even_seconds=break_even_seconds(ours, other),
        )


def energy_gaps(ours: Sequence[Score], other: Sequence[Score]) -> Array:
    """Ours minus the other's, eV per atom, start by start; not a number unless both converged."""
    first, second = (np.array([score.energy_ev for score in scores], dtype=np.float64) for scores in (ours, other))
    return (first - second) / [score.n_atoms for score in ours]


def p95_where_same(calls: Array, others: Array, gaps: Array) -> float | None:
    """95th percentile of the paired ratios where both ended in the same minimum; None: nowhere.

    One that stops earlier, at a saddle point or in a higher minimum, needs fewer calls for less.
    """
    same = np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM  # not a number is not the same
    return float(np.percentile(calls[same] / others[same], SHARE)) if same.any() else None


def median_distance(ours: Sequence[Score], other: Sequence[Score]) -> float | None:
    """Median over the crystals where both converged of the root mean square distance between their atoms, Å.

    Both lie in the mean of their cells and on top of each other, as crystals are compared; None where there are none.
    """
    pairs = zip((score.final for score in ours), (score.final for score in other), strict=True)
    found = [_distance(a, b) for a, b in pairs if a is not None and b is not None and a.pbc.all()]
    return float(np.median(found)) if found else None


def _distance(first: Atoms, second: Atoms) -> float:
    moved = first.get_scaled_positions(wrap=False) - second.get_scaled_positions(wrap=False)
    moved -= moved[0]  # one atom on top of the other, so that none of the rest is taken for its image
    moved -= np.round(moved)
    moved = (moved - moved.mean(axis=0)) @ ((first.cell.array + second.cell.array) / 2)
    return float(np.sqrt((moved**2).sum(axis=1).mean()))


def break_even_seconds(ours: Sequence[Score], other: Sequence[Score]) -> float | None:
    """(overhead of ours - overhead of the other) / (calls of the other - calls of ours), over the whole set.

    0: ours wins at any price of a force call. None: at no price, because it saves no calls.
    """
    saved = charged(other).sum() - charged(ours).sum()
    extra = sum(score.overhead_seconds for score in ours) - sum(score.overhead_seconds for score in other)
    return max(extra / saved, 0.0) if saved > 0 else None


def performance_profile(scores: Mapping[str, Sequence[Score]]) -> dict[str, tuple[Array, Array]]:
    """Dolan and Moré: per contestant, the share of starts solved within τ times the fewest calls anybody needed.

    Points of a stair: (τ, share), τ rising. A failure is never solved.
    """
    costs = np.array([[s.spent if s.converged else np.inf for s in row] for row in scores.values()])
    fewest = costs.min(axis=0)
    solvable = np.isfinite(fewest)
    ratios = np.where(solvable, costs / np.where(solvable, fewest, 1.0), np.inf)
    profiles = {}
    for name, row in zip(scores, ratios, strict=True):
        solved = np.sort(row[np.isfinite(row)])
        profiles[name] = (solved, np.arange(1, len(solved) + 1) / len(row))
    return profiles


@dataclass(frozen=True)
class Circumstances:
    """Everything that is needed to do it again."""

    set_name: str
    title: str
    calculator: str
    policy: str
    fmax: float  # eV/Å
    cap: int
    free_cell: bool
    seed: int
    perturb: str | None
    command: str
    interrupted: bool = False
    policies_used: Mapping[str, int] = field(default_factory=dict)  # by ours: name or "classical" -> structures


@dataclass(frozen=True)
class ContestResult:
    """Scores by contestant, in the order of the starts."""

    circumstances: Circumstances
    scores: Mapping[str, Sequence[Score]]
    classical: Sequence[str]  # who is neither ours nor our core

    @property
    def ours(self) -> str:
        """The subject of the ratios: our relaxer with its policy, or our classical optimizer without one."""
        return OURS if OURS in self.scores else CORE

    @property
    def n_structures(self) -> int:
        return len(self.scores[self.ours])

    @property
    def best(self) -> str | None:
        return best_classical(self.scores, self.classical)

    @cached_property
    def summaries(self) -> dict[str, OptimizerSummary]:
        return {name: OptimizerSummary.of(scores) for name, scores in self.scores.items()}

    @cached_property
    def to_best(self) -> Comparison | None:
        return None if self.best is None else self.compared(self.ours, self.best)

    @cached_property
    def to_core(self) -> Comparison:
        return self.compared(self.ours, CORE)

    def compared(self, name: str, other: str) -> Comparison:
        return Comparison.of(self.scores[name], self.scores[other], other)

    def by_calls(self) -> list[str]:
        """Names, fewest force calls first."""
        return sorted(self.scores, key=lambda name: self.summaries[name].mean.value)

    def errors(self) -> dict[str, list[str]]:
        """What optimizers complained about, by name."""
        return {
            name: [score.error for score in scores if score.error]
            for name, scores in self.scores.items()
            if any(score.error for score in scores)
        }
