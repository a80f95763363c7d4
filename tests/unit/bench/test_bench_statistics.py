"""Numbers of a contest, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ase.build import bulk, molecule

from relaxion.train.judge.runs import Score
from relaxion.train.judge.statistics import (
    Circumstances,
    Comparison,
    ContestResult,
    Interval,
    OptimizerSummary,
    best_classical,
    break_even_seconds,
    median_distance,
    performance_profile,
    resampled,
)

CAP = 100


def score(calls: int | None, energy: float = -8.0, seconds: float = 1.0, calculator: float = 0.5) -> Score:
    """None: a failure after 7 calls."""
    done = calls is not None
    spent = calls if calls is not None else 7
    return Score(
        done, spent, spent if done else CAP, energy if done else None, 4, seconds, calculator, seconds - calculator
    )


def test_failures_are_charged_at_the_cap():
    summary = OptimizerSummary.of([score(2), score(4), score(None)])
    assert (summary.mean.value, summary.median, summary.worst, summary.failures) == (pytest.approx(106 / 3), 4, CAP, 1)
    assert summary.p95 == pytest.approx(4 + 0.9 * 96)
    assert (summary.seconds, summary.calculator_seconds) == (3.0, 1.5)
    assert summary.overhead_seconds_per_call == pytest.approx(1.5 / 13), "of calls made, not charged"


def test_ratio_is_of_means_and_paired():
    calls = np.array([2.0, 4.0, 6.0])
    same_ratio = resampled(calls, 2 * calls)
    assert same_ratio == Interval(0.5, 0.5, 0.5), "no structure says otherwise, so the interval is a point"
    spread = resampled(calls)
    assert (spread.value, spread.low, spread.high) == (
        4.0,
        pytest.approx(8 / 3, abs=0.7),
        pytest.approx(16 / 3, abs=0.7),
    )
    assert f"{spread:.1f}".startswith("4.0 (")


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        interval = resampled(generator.exponential(10, 60))
        hits += interval.low < 10 < interval.high
    assert 0.86 < hits / 200 < 0.99


def test_comparison_by_hand():
    ours = [score(3, -8.0), score(5, -8.5), score(9, -8.0), score(None)]
    other = [score(7, -8.0001), score(11, -8.0), score(4, -8.5), score(20, -9.0)]
    compared = Comparison.of(ours, other, "BFGS")
    assert compared.ratio.value == pytest.approx((3 + 5 + 9 + CAP) / 42)
    by_hand = (4 / 8 * 6 / 12 * 10 / 5 * 101 / 21) ** 0.25
    assert compared.geometric_ratio == pytest.approx(by_hand)
    assert compared.same_minimum_rate == pytest.approx(1 / 3), "1 meV per atom, where both converged"
    assert compared.lower_minimum_rate == pytest.approx(1 / 3)
    assert compared.p95_of_paired_ratios == pytest.approx(np.percentile([3 / 7, 5 / 11, 9 / 4, 5.0], 95))
    assert compared.p95_where_same == pytest.approx(3 / 7), "only the first two ended in the same minimum"


def test_no_start_where_both_converged():
    compared = Comparison.of([score(None)], [score(3)], "BFGS")
    assert (compared.same_minimum_rate, compared.lower_minimum_rate, compared.p95_where_same) == (None, None, None)


def test_break_even_is_where_the_wall_times_meet():
    ours = [score(4, seconds=2.0, calculator=0.1)] * 3  # 1.9 s of its own
    other = [score(10, seconds=0.5, calculator=0.2)] * 3  # 0.3 s
    price = break_even_seconds(ours, other)
    assert price == pytest.approx(1.6 / 6)
    assert 4 * price + 1.9 == pytest.approx(10 * price + 0.3)
    assert break_even_seconds(other, other) is None, "no calls saved"
    assert break_even_seconds(other, ours) is None
    quick = [score(4, seconds=0.1, calculator=0.1)] * 3
    assert break_even_seconds(quick, other) == 0


def test_profile_by_hand():
    profiles = performance_profile(
        {"a": [score(2), score(10), score(None)], "b": [score(4), score(5), score(None)], "c": [score(None)] * 3}
    )
    assert [list(part) for part in profiles["a"]] == [[1, 2], [1 / 3, 2 / 3]]
    assert [list(part) for part in profiles["b"]] == [[1, 2], [1 / 3, 2 / 3]]
    assert [list(part) for part in profiles["c"]] == [[], []]


def result(scores: dict[str, list[Score]]) -> ContestResult:
    told = Circumstances("s", "t", "emt", "auto", 0.05, CAP, False, 9000, None, "relaxion bench s")
    return ContestResult(told, scores, [name for name in scores if name not in ("relaxion", "core")])


def test_the_best_classical_is_neither_ours_nor_the_core():
    scores = {"relaxion": [score(1)], "core": [score(2)], "BFGS": [score(9)], "FIRE": [score(8)]}
    found = result(scores)
    assert (found.best, found.ours, found.by_calls()[0]) == ("FIRE", "relaxion", "relaxion")
    assert found.to_best is not None
    assert found.to_best.ratio.value == pytest.approx(1 / 8)
    assert found.to_core.ratio.value == pytest.approx(1 / 2)
    assert best_classical(scores, []) is None
    alone = result({"core": [score(2)]})
    assert (alone.best, alone.ours, alone.to_best) == (None, "core", None)


def test_distance_between_crystals_knows_no_shifts_and_no_images():
    first = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    second = first.copy()
    second.set_cell(second.cell * 1.02, scale_atoms=True)
    second.translate([0.3, 0.2, 0.1])
    second.wrap()
    assert median_distance([ended(first)], [ended(second)]) == pytest.approx(0.0, abs=1e-9)
    second = first.copy()
    second.positions[3, 0] += 0.8
    expected = 0.8 * np.sqrt((1 / 8) * (1 - 1 / 8))
    assert median_distance([ended(first)], [ended(second)]) == pytest.approx(expected)
    assert median_distance([ended(None)], [ended(first)]) is None
    assert median_distance([ended(molecule("CO"))], [ended(molecule("CO"))]) is None


def ended(final):
    return replace(score(3), final=final)
