"""What a model card says of an assessment, worked out by hand. The whole way is in tests/cli/test_package.py."""

from __future__ import annotations

import torch
from relaxion.training.atom_assessment import AtomAssessed

from relaxion.structures import Outcome
from relaxion.training.packaging import failures_in_words, policy_result

FORMULAS = ["AlCu", "Al2", "Cu3", "AlCu2", "Al3", "Cu2", "Al2Cu"]
DONE, LIMIT, STALLED = Outcome.CONVERGED, Outcome.STEP_LIMIT, Outcome.STALLED


def assessed(calls: list[int], outcomes: list[Outcome]) -> AtomAssessed:
    numbers = torch.tensor(calls)
    return AtomAssessed(numbers.double(), numbers, numbers, torch.tensor([int(o) for o in outcomes]), {})


def test_some_fail() -> None:
    found = assessed([4, 30, 9, 30], [DONE, LIMIT, DONE, STALLED])
    assert failures_in_words(FORMULAS[:4], found, 30) == [
        "2 of 4 held-apart starts did not converge within 30 force calls (stalled 1, step limit 1): Al2, AlCu2.",
        "Of those that converged the slowest took 9 force calls: Cu3.",
    ]


def test_none_fails_and_all_fail() -> None:
    assert failures_in_words(FORMULAS[:2], assessed([4, 3], [DONE, DONE]), 30) == [
        "None of the 2 held-apart starts failed.",
        "Of those that converged the slowest took 4 force calls: AlCu.",
    ]
    assert failures_in_words(FORMULAS, assessed([30] * 7, [LIMIT] * 7), 30) == [
        "7 of 7 held-apart starts did not converge within 30 force calls (step limit 7): AlCu, Al2, Cu3, AlCu2, Al3 "
        "and others."
    ]


def test_the_policys_row() -> None:
    row = policy_result(assessed([4, 30, 9, 5], [DONE, LIMIT, DONE, DONE]))
    assert (row.optimizer, row.mean_force_calls, row.largest_force_calls) == ("policy", 12.0, 30.0)
    assert row.success_rate == 0.75
