"""What a model card says of an assessment, worked out by hand. The whole way is in tests/cli/test_package.py."""

from __future__ import annotations

from ase.symbols import Symbols

from relaxion.structures import Outcome
from relaxion.train.judge.assessment import Assessed, AssessedRelaxation, film_of
from relaxion.train.runs.packaging import failures_in_words

FORMULAS = ["AlCu", "Al2", "Cu3", "AlCu2", "Al3", "Cu2", "Al2Cu"]
DONE, LIMIT, STALLED = Outcome.CONVERGED, Outcome.STEP_LIMIT, Outcome.STALLED


def assessed(calls: list[int], outcomes: list[Outcome], kinds: list[str] | None = None) -> Assessed:
    relaxed = [
        AssessedRelaxation(Symbols.fromsymbols(formula).numbers, True, end.name.lower(), n, None, film_of((), 2), kind)
        for formula, n, end, kind in zip(FORMULAS, calls, outcomes, kinds or [""] * len(calls), strict=False)
    ]
    return Assessed(relaxed, {}, cap=30)


def test_some_fail() -> None:
    found = assessed([4, 30, 9, 30], [DONE, LIMIT, DONE, STALLED])
    assert failures_in_words(found) == [
        "2 of 4 held-out starts did not converge within 30 force calls (stalled 1, step limit 1): Al2, AlCu2.",
        "Of those that converged the slowest took 9 force calls: Cu3.",
    ]


def test_none_fails_and_all_fail() -> None:
    assert failures_in_words(assessed([4, 3], [DONE, DONE])) == [
        "None of the 2 held-out starts failed.",
        "Of those that converged the slowest took 4 force calls: AlCu.",
    ]
    assert failures_in_words(assessed([30] * 7, [LIMIT] * 7)) == [
        "7 of 7 held-out starts did not converge within 30 force calls (step limit 7): AlCu, Al2, Cu3, AlCu2, Al3 "
        "and others."
    ]


def test_kinds_are_told_apart() -> None:
    found = assessed([4, 30, 30, 9], [DONE, LIMIT, LIMIT, DONE], ["slab", "slab", "alloy", "slab"])
    assert failures_in_words(found)[1:3] == ["1 of 3 starts of kind slab.", "1 of 1 starts of kind alloy."]
