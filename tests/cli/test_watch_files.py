"""Following a run: new lines only, half lines wait, a resume takes back what it cut, ten million lines take seconds."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from relaxion.apps.report import run as run_module
from relaxion.apps.report.run import (
    FINISHED,
    MOST_POINTS,
    RUNNING,
    STOPPED,
    WAITING,
    Curve,
    History,
    Tail,
    WatchedRun,
    check_run,
    watched,
)
from relaxion.errors import FileError, RunError

CALLS = "eval/force_calls_mean"


def line(step: int, **more: float) -> str:
    return json.dumps({"time/total_timesteps": step, CALLS: 100.0 - step, **more}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.toml").write_text('task = "relax"\nagent = "td3"\nseed = 3\nsteps = 100\n')
    (run / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))
    return run


def append(folder: Path, text: str, name: str = "metrics.jsonl") -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def steps(run: WatchedRun) -> list[int]:
    return run.history.points(CALLS)[0]


def test_new_lines_come_and_nothing_is_read_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedRun(folder)
    assert run.poll()
    assert steps(run) == [1, 2, 3, 4, 5]
    assert not run.poll()
    told = []
    monkeypatch.setattr(run, "_tell_line", lambda text: told.append(text))
    append(folder, line(6))
    assert run.poll()
    assert [json.loads(text)["time/total_timesteps"] for text in told] == [6]


def test_half_a_line_waits_for_its_other_half(folder: Path) -> None:
    run = WatchedRun(folder)
    run.poll()
    whole = line(6)
    append(folder, whole[:17])
    run.poll()
    assert (steps(run)[-1], run.unreadable) == (5, 0)
    assert run.cut_line
    append(folder, whole[17:])
    run.poll()
    assert (steps(run)[-1], run.unreadable, run.cut_line) == (6, 0, False)


def test_a_resume_takes_back_what_it_cut(folder: Path) -> None:
    run = WatchedRun(folder)
    run.poll()
    for step in (6, 7, 8):
        append(folder, line(step))
        run.poll()
    kept = sum(len(line(step)) for step in range(1, 7))
    os.truncate(folder / "metrics.jsonl", kept)
    run.poll()
    assert steps(run)[-1] == 6
    append(folder, line(7, **{CALLS: 1.0}))
    run.poll()
    assert run.history.points(CALLS) == ([1, 2, 3, 4, 5, 6, 7], [99.0, 98.0, 97.0, 96.0, 95.0, 94.0, 1.0])


def test_a_resume_between_two_looks_that_has_grown_past_the_old_end(folder: Path) -> None:
    run = WatchedRun(folder)
    run.poll()
    append(folder, line(6))
    run.poll()
    os.truncate(folder / "metrics.jsonl", sum(len(line(step)) for step in range(1, 6)))
    append(folder, "".join(line(step, fresh=1.0) for step in (6, 7, 8)))
    run.poll()
    assert steps(run) == list(range(1, 9))
    assert run.history.newest("fresh") == 1.0
    assert run.unreadable == 0


def test_a_file_that_is_replaced_or_removed_begins_anew(folder: Path) -> None:
    run = WatchedRun(folder)
    run.poll()
    (folder / "metrics.jsonl").unlink()
    assert run.poll()
    assert steps(run) == []
    (folder / "metrics.jsonl").write_text(line(40))
    run.poll()
    assert steps(run) == [40]


def test_steps_that_go_back_replace_what_was_there(folder: Path) -> None:
    run = WatchedRun(folder)
    append(folder, line(3, **{CALLS: 7.0}))
    run.poll()
    assert run.history.points(CALLS) == ([1, 2, 3], [99.0, 98.0, 7.0])


def test_lines_of_anything_else_are_counted_and_left_out(folder: Path) -> None:
    append(folder, 'nonsense\n[1, 2]\n{"a": 1}\n{"time/total_timesteps": "x"}\n\n{"time/total_timesteps": NaN}\n\xff\n')
    run = WatchedRun(folder)
    run.poll()
    assert steps(run) == [1, 2, 3, 4, 5]
    assert run.unreadable == 6


def test_a_line_without_end_is_passed_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CHUNK", 1000)
    append(folder, "x" * 5000 + "\n" + line(9))
    run = WatchedRun(folder)
    run.poll()
    assert steps(run)[-1] == 9


def test_alarms_come_and_go_with_a_resume(folder: Path) -> None:
    run = WatchedRun(folder)
    events = [
        {"step": 2, "alarm": "wall", "event": "begins", "sentence": "blocked against a wall: …"},
        {"step": 3, "advice": "worse_than_bfgs", "event": "begins", "sentence": "needs more"},
        {"step": 4, "alarm": "wall", "event": "ends", "sentence": "no longer"},
    ]
    lines = [json.dumps(event) + "\n" for event in events]
    for text in lines:
        append(folder, text, "alarms.jsonl")
        run.poll()
    assert run.standing() == {"worse_than_bfgs": "needs more"}
    os.truncate(folder / "alarms.jsonl", len(lines[0]))
    run.poll()
    assert run.standing() == {"wall": "blocked against a wall: …"}


def test_what_a_run_is_doing(folder: Path) -> None:
    run = WatchedRun(folder)
    run.poll()
    assert run.status == STOPPED
    (folder / ".lock").write_text(f"relaxion {os.getpid()}\n")
    run.poll()
    assert run.status == RUNNING
    (folder / "result.json").write_text(json.dumps({"steps": 9, "final_force_calls_mean": 4.5}))
    run.poll()
    assert (run.status, run.history.points(CALLS)[0][-1], run.history.newest(CALLS)) == (FINISHED, 9, 4.5)
    (folder / "result.json").unlink()
    run.poll()
    assert run.status == RUNNING


def test_a_run_removed_file_by_file_is_waited_for_again(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({"steps": 9, "final_force_calls_mean": 4.5}))
    run = WatchedRun(folder)
    run.poll()
    for name, status in (("metrics.jsonl", FINISHED), ("result.json", WAITING)):
        (folder / name).unlink()
        run.poll()
        assert run.status == status
    assert steps(run) == []


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('agent = "sac"\n')
    run = WatchedRun(tmp_path)
    run.poll()
    assert run.status == WAITING
    append(tmp_path, line(1))
    run.poll()
    assert steps(run) == [1]


def test_damaged_small_files_are_named(folder: Path) -> None:
    (folder / "result.json").write_text("{")
    (folder / "assessment.json").write_text('{"format": "other"}')
    (folder / "settings.toml").write_text("= =")
    run = WatchedRun(folder)
    run.poll()
    assert run.result is None
    assert run.assessment is None
    assert set(run.problems) == {"result.json", "assessment.json", "settings.toml"}


def test_what_is_no_run_is_refused_with_what_it_is(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    for path, words, kind in (
        (tmp_path / "absent", "does not exist", FileError),
        (folder / "settings.toml", "is a file", FileError),
        (tmp_path / "empty", "is empty", RunError),
        (tmp_path / "other", "holds no run", RunError),
        (tmp_path, "holds 1 runs; name one", RunError),
    ):
        with pytest.raises(kind, match=words):
            check_run(path)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "metrics.jsonl").touch()
    first, second = watched([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert first.label != second.label
    assert first.label.endswith("a/run")


def test_a_curve_stays_small_and_keeps_its_ends() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, float(step))
    found, values = curve.points()
    assert MOST_POINTS // 2 <= len(found) <= MOST_POINTS
    assert found == [int(value) for value in values]
    assert found == sorted(found)
    assert (found[-1], found[0] < 1000) == (99_999, True)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps[:-1]) <= 2 * min(gaps[:-1]), "as dense at the beginning as at the end"
    curve.cut(50_000)
    assert curve.points()[0][-1] <= 50_000
    assert len(curve.points(10)[0]) == 10


def test_numbers_that_cannot_be_drawn_are_left_out() -> None:
    history = History()
    assert history.add({"time/total_timesteps": 1, "a": None, "b": "x", "c": 1e308, "d": True, "e": 2})
    assert set(history.names("")) == {"d", "e"}
    assert not history.add({"time/total_timesteps": -1})
    assert not history.add({"time/total_timesteps": True})


def test_ten_million_lines_take_seconds(tmp_path: Path) -> None:
    """By looking here and there; assessments, which are rare, are not missed."""
    block = "".join(f'{{"time/total_timesteps":{{0}}{k:03d},"train/critic_loss":0.5}}\n' for k in range(1000))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for thousand in range(10_000):
            text = block.replace("{0}", str(1000 + thousand))
            if thousand % 100 == 0:
                text += f'{{"time/total_timesteps":{1000 + thousand}999,"{CALLS}":{thousand + 1}}}\n'
            file.write(text)
    run = WatchedRun(tmp_path)
    while run.poll(seconds=1.0):
        pass
    assert run.history.step == 10_999_999
    assert run.history.points(CALLS)[1] == [float(k) for k in range(1, 10_001, 100)]
    assert run.thinned
    append(tmp_path, line(11_000_000))
    began = time.process_time()
    run.poll()
    assert run.history.step == 11_000_000
    assert time.process_time() - began < 0.2, "only the new line is read"
    (tmp_path / "metrics.jsonl").unlink()  # half a gigabyte that pytest would keep


def test_the_tail_never_reads_the_whole_file_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "CHUNK", 200)
    tail = Tail(folder / "metrics.jsonl")
    for step in range(6, 400):
        append(folder, line(step))
        while (piece := tail.read()) is not None:
            tail.keep(json.loads(piece.lines[-1])["time/total_timesteps"])
    assert len(tail.places) <= run_module.MOST_PLACES
    size = (folder / "metrics.jsonl").stat().st_size
    os.truncate(folder / "metrics.jsonl", size - 3 * len(line(399)))
    piece = tail.read()
    assert piece is not None
    assert piece.back_to is not None
    assert 380 < piece.back_to < 399
