"""Numbers of a contest: means with intervals, paired ratios, same minima, break-even, performance profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaxion.bench.contest import Score

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
class Summary:
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
    def of(cls, scores: Sequence[Score]) -> Summary:
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
    which = np.random.default_rng(SEED).integers(len(calls), size=(RESAMPLES, len(calls)))
    means = calls[which].mean(axis=1)
    value = calls.mean()
    if others is not None:
        means, value = means / others[which].mean(axis=1), value / others.mean()
    low, high = np.percentile(means, [(100 - SHARE) / 2, (100 + SHARE) / 2])
    return Interval(float(value), float(low), float(high))


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
    same_minimum_rate: float | None  # of the starts where both converged; None: nowhere
    lower_minimum_rate: float | None  # ours ended below
    break_even_seconds: float | None  # per force call, above which ours takes less time; None: never

    @classmethod
    def of(cls, ours: Sequence[Score], other: Sequence[Score], name: str) -> Comparison:
        calls, others = charged(ours), charged(other)
        gaps = energy_gaps(ours, other)
        same = np.abs(gaps) <= SAME_MINIMUM_EV_PER_ATOM
        return cls(
            other=name,
            ratio=resampled(calls, others),
            geometric_ratio=float(np.exp(np.log((calls + SHIFT) / (others + SHIFT)).mean())),
            p95_of_paired_ratios=float(np.percentile(calls / others, SHARE)),
            same_minimum_rate=float(same.mean()) if len(gaps) else None,
            lower_minimum_rate=float((gaps < -SAME_MINIMUM_EV_PER_ATOM).mean()) if len(gaps) else None,
            break_even_seconds=break_even_seconds(ours, other),
        )


def energy_gaps(ours: Sequence[Score], other: Sequence[Score]) -> Array:
    """Ours minus the other's, eV per atom, where both converged."""
    return np.array(
        [
            (a.energy_ev - b.energy_ev) / a.n_atoms
            for a, b in zip(ours, other, strict=True)
            if a.energy_ev is not None and b.energy_ev is not None
        ]
    )


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
