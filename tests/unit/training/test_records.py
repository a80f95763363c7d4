"""metrics.jsonl: valid JSON whatever the numbers, cut back on resume, times that go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxion.errors import CheckpointError
from relaxion.train.runs.run_folder import Clock, Records
from training_runs import without_times


def steps(path: Path) -> list[int]:
    return [json.loads(line)["time/total_timesteps"] for line in path.read_text().splitlines()]


def write(records: Records, *numbers: int) -> None:
    for number in numbers:
        records.write({"time/total_timesteps": number})


def test_a_resume_cuts_back_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Records(path)
    write(first, 1, 2)
    position = first.position()
    write(first, 3, 4)
    first.close()
    second = Records(path, position=position)
    write(second, 30)
    second.close()
    assert steps(path) == [1, 2, 30]
    with pytest.raises(CheckpointError, match="it was cut"):
        Records(path, position=1000)


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    records = Records(tmp_path / "metrics.jsonl")
    records.write({"time/total_timesteps": 1, "train/critic_loss": float("nan"), "train/q_mean": float("inf")})
    records.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"time/total_timesteps": 1, "train/critic_loss": None, "train/q_mean": None}


def test_times_are_apart() -> None:
    clock = Clock(100.0, 50)
    times = clock.scalars(60)
    assert times["time/time_elapsed"] >= 100
    assert times["time/fps"] > 0
    assert without_times(json.dumps({"time/total_timesteps": 60} | times)) == {"time/total_timesteps": 60}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
@pytest.mark.parametrize(("resumed_at", "expected"), [(0, [4]), (2, [1, 2, 4])])
def test_tensorboard_keeps_what_was_saved(resumed_at: int, expected: list[int], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"

    def points() -> list[int]:
        read = accumulator.EventAccumulator(str(board))
        read.Reload()
        return [event.step for event in read.Scalars("time/total_timesteps")]

    first = Records(path, tensorboard=board)
    assert not board.exists()  # before the first record
    write(first, 1, 2)
    first.position()
    assert points() == [1, 2]  # a kill from here on loses nothing that a checkpoint counts on
    write(first, 3)
    first.close()
    second = Records(path, tensorboard=board, resumed_at=resumed_at)
    write(second, 4)
    second.close()
    assert points() == expected
