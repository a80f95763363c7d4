"""assessment.json: start by start, the ten hardest with films, small whatever the structures, beside the baselines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from relaxion.errors import RelaxionWarning
from relaxion.train.judge.assessment import MOST_NUMBERS, AssessedRelaxation, RelaxationRecord, film_of, shot
from relaxion.train.runs.loop import train
from relaxion.train.runs.run_folder import leave_record
from relaxion.train.tasks.control import AssessedReturns
from relaxion.train.tasks.relax_settings import RelaxRunSettings

SMALL = {
    "task": "relax", "agent": "td3", "structures": "alloys:Al-Cu-Ni:2-4", "n_pooled": 40, "steps": 64,
    "n_structures": 8,
    "max_force_calls": 30, "channels": 4, "n_layers": 1, "cutoff_angstrom": 3.5, "batch_size": 8, "warmup_steps": 24,
    "replay_capacity": 400, "updates_per_round": 2, "log_interval_steps": 16, "assessment_interval_steps": 32,
    "assessment_starts": 12, "checkpoint_interval_steps": 32,
}  # fmt: skip


def relaxed(calls: int, outcome: str = "converged", n_atoms: int = 2) -> AssessedRelaxation:
    shots = [shot(n, np.full((n_atoms, 3), 0.001 * n), np.eye(3), 0.0, 1.0 / n) for n in range(1, calls + 1)]
    return AssessedRelaxation(np.full(n_atoms, 29), True, outcome, calls, 0.5, film_of(shots, n_atoms))


def test_the_hardest_come_first_and_failures_before_slow_successes() -> None:
    ways = [relaxed(calls) for calls in range(1, 13)] + [relaxed(12, "step_limit")]
    record = RelaxationRecord(0.05, 12, ways)
    assert record.worst()[:3] == [12, 11, 10]
    assert len(record.worst()) == 10
    plain = record.as_plain()
    assert [film["place"] for film in plain["worst"]] == record.worst()
    assert plain["structures"]["outcome"][12] == "step_limit"
    assert plain["worst"][1]["positions_milliangstrom"][-1] == [12] * 6
    assert len(plain["worst"][0]["cells_angstrom"]) == 1


def test_large_structures_get_fewer_shots() -> None:
    record = RelaxationRecord(0.05, 60, [relaxed(60, n_atoms=2000)] * 10)
    numbers = sum(len(row) for film in record.as_plain()["worst"] for row in film["positions_milliangstrom"])
    assert numbers <= MOST_NUMBERS
    assert record.as_plain()["worst"][0]["call"][-1] == 60


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    assessed = AssessedReturns(torch.tensor([1.0, torch.nan]), torch.tensor([3, 4]))
    leave_record(tmp_path / "assessment.json", assessed, 7)
    written = json.loads((tmp_path / "assessment.json").read_text())
    assert (written["step"], written["returns"], written["lengths"]) == (7, [1.0, None], [3, 4])


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    assessed = AssessedReturns(torch.tensor([1.0]), torch.tensor([1]))
    with pytest.warns(RelaxionWarning, match="was not stored"):
        leave_record(tmp_path / "absent" / "assessment.json", assessed, 7)


def test_a_run_says_of_each_start_what_the_means_say_of_all(tmp_path: Path) -> None:
    train(RelaxRunSettings.read(SMALL), tmp_path / "run")
    result, record, baselines = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("result", "assessment", "baselines")
    )
    found = record["structures"]
    assert record["step"] == result["steps"]
    assert np.mean(found["force_calls"]) == pytest.approx(result["final_force_calls_mean"])
    assert np.mean([o == "converged" for o in found["outcome"]]) == pytest.approx(result["final_success_rate"])
    for name in ("BFGS", "FIRE"):
        assert np.mean(baselines[name]["force_calls"]) == pytest.approx(result[f"force_calls_{name.lower()}"])
        assert len(baselines[name]["energy_ev"]) == 12
        assert sum(energy is None for energy in baselines[name]["energy_ev"]) == baselines[name]["failures"]
    for film in record["worst"]:
        place = film["place"]
        assert len(film["numbers"]) == found["n_atoms"][place]
        assert len(film["positions_milliangstrom"]) == len(film["call"]) == len(film["energy_ev"])
        if found["outcome"][place] == "converged":
            assert film["call"][-1] == found["force_calls"][place]
            assert film["energy_ev"][-1] == found["energy_ev"][place]
            assert film["fmax_ev_per_angstrom"][-1] <= record["fmax_ev_per_angstrom"]
