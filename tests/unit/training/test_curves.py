"""Learning curves: true steps on x, broken and resumed files read right, nothing global touched (R9.5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxion.errors import FileError, RelaxionWarning, RunError
from relaxion.train.runs import curves
from relaxion.train.runs.curves import (
    FORCE_CALLS,
    STEPS,
    SUCCESS,
    figure,
    grouped,
    leave_curve,
    mean_and_range,
    read_lines,
    read_run,
    write_curve,
)
from relaxion.train.runs.loop import train
from relaxion.train.runs.recipe import read_settings
from relaxion.train.tasks.settings import RunSettings

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> Path:
    folder.mkdir()
    values = {"agent": "td3", "task": "relax", "seed": 0, "structures": "b2:AlFe", "potential": "eam", **settings}
    (folder / "settings.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def structure_lines(first: float, *, n: int = 5, interval: int = 100) -> list[dict[str, Any]]:
    return [
        {
            STEPS: interval * number,
            FORCE_CALLS: first / number,
            SUCCESS: number / n,
            "eval/force_calls_bfgs": 5.8,
            "eval/force_calls_fire": 21.8,
        }
        for number in range(1, n + 1)
    ]


def test_half_a_line_and_foreign_lines_are_passed_over() -> None:
    content = (
        b'{"time/total_timesteps": 10, "a": 1}\n\nnonsense\n[1]\n{"b": 2}\n{"time/total_timesteps": 20, "a": 2}\n{"tim'
    )
    assert read_lines(content) == [{STEPS: 10, "a": 1}, {STEPS: 20, "a": 2}]


def test_lines_written_again_after_a_resume_replace_the_old_ones() -> None:
    steps = [10, 20, 30, 40, 20, 30]
    content = "\n".join(json.dumps({STEPS: step, "a": number}) for number, step in enumerate(steps)).encode()
    assert [(line[STEPS], line["a"]) for line in read_lines(content)] == [(10, 0), (20, 4), (30, 5)]


def test_lines_of_one_step_are_one() -> None:
    content = b'{"time/total_timesteps": 10, "a": 1}\n{"time/total_timesteps": 10, "b": 2}\n'
    assert read_lines(content) == [{STEPS: 10, "a": 1, "b": 2}]


def test_points_leave_out_what_was_not_finite(tmp_path: Path) -> None:
    lines = [{STEPS: 10, FORCE_CALLS: 3.0}, {STEPS: 20, FORCE_CALLS: None}, {STEPS: 30}, {STEPS: 40, FORCE_CALLS: 2.0}]
    steps, values = read_run(make_run(tmp_path / "run", lines)).points(FORCE_CALLS)
    assert (steps.tolist(), values.tolist()) == ([10, 40], [3, 2])


def test_the_final_assessment_is_the_last_point(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", structure_lines(50))
    (folder / "result.json").write_text(json.dumps({"steps": 555, "final_force_calls_mean": 7.5}))
    steps, values = read_run(folder).points(FORCE_CALLS)
    assert (steps[-1], values[-1]) == (555, 7.5)
    (folder / "result.json").write_text('{"steps": 5')
    assert read_run(folder).points(FORCE_CALLS)[0][-1] == 500


def test_mean_and_range_of_seeds_where_all_have_something_to_say() -> None:
    one = np.array([100.0, 200, 300]), np.array([3.0, 2, 1])
    other = np.array([100.0, 200, 300, 400]), np.array([5.0, 4, 5, 9])
    grid, mean, lowest, highest = mean_and_range([one, other])
    assert grid.tolist() == [100, 200, 300]
    assert (mean.tolist(), lowest.tolist(), highest.tolist()) == ([4, 3, 3], [3, 2, 1], [5, 4, 5])


def test_seeds_share_a_curve_and_labels_say_what_differs(tmp_path: Path) -> None:
    settings = [
        {"seed": 0, "steps": 10},
        {"seed": 1, "steps": 20},
        {"seed": 0, "batch_size": 64},
        {"seed": 0, "agent": "sac"},
    ]
    runs = [make_run(tmp_path / str(k), structure_lines(50), **own) for k, own in enumerate(settings)]
    groups = grouped([read_run(run) for run in runs])
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    assert [group.label for group in groups] == [
        "TD3, batch_size –, 2 seeds: mean and range",
        "TD3, batch_size 64, seed 0",
        "SAC, seed 0",
    ]


def test_what_is_drawn_for_structures(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(k), structure_lines(50 + 10 * k), seed=k) for k in range(3)]
    drawn = figure([read_run(run) for run in runs])
    calls, success = drawn.axes
    by_label = {str(line.get_label()): line for line in calls.get_lines()}
    mean = by_label["TD3, 3 seeds: mean and range"]
    assert mean.get_xdata() == pytest.approx([100, 200, 300, 400, 500])
    assert mean.get_ydata() == pytest.approx([60 / number for number in range(1, 6)])
    assert by_label["BFGS 5.8"].get_ydata() == pytest.approx([5.8, 5.8])
    assert by_label["FIRE 21.8"].get_ydata() == pytest.approx([21.8, 21.8])
    assert success.get_lines()[-1].get_ydata() == pytest.approx([20, 40, 60, 80, 100])
    assert "force calls" in calls.get_ylabel()
    assert "%" in success.get_ylabel()
    assert success.get_xlabel().startswith("environment steps")


def test_what_is_drawn_for_vectors(tmp_path: Path) -> None:
    lines = [{STEPS: 10 * k, "rollout/ep_rew_mean": -float(k)} for k in range(1, 4)]
    explored = make_run(tmp_path / "explored", lines, task="Pendulum-v1")
    axes = figure([read_run(explored)]).axes[0]
    assert axes.get_ylabel() == "mean return, exploring"
    assert axes.get_lines()[0].get_ydata() == pytest.approx([-1, -2, -3])
    assessed = make_run(tmp_path / "assessed", [*lines, {STEPS: 40, "eval/mean_reward": 5.0}], task="Pendulum-v1")
    axes = figure([read_run(assessed)]).axes[0]
    assert (axes.get_ylabel(), axes.get_title(loc="left")) == ("mean return", "Pendulum-v1")
    assert axes.get_lines()[0].get_ydata() == pytest.approx([5])


def test_a_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", structure_lines(50))
    write_curve([run], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curve.png", "run"]
    leave_curve(run)
    assert (run / "learning_curve.png").read_bytes().startswith(PNG)


def test_a_resumed_run_has_the_curve_of_a_straight_one(tmp_path: Path) -> None:
    """R9.5: total steps on x, no point twice, none lost."""

    def settings(steps: int) -> RunSettings:
        small = {"task": "Pendulum-v1", "widths": [4], "warmup_steps": 8, "batch_size": 8, "assessment_starts": 1}
        return read_settings({**small, "steps": steps, "log_interval_steps": 10, "assessment_interval_steps": 15})

    train(settings(40), tmp_path / "resumed")
    train(settings(70), tmp_path / "resumed", resume=True)
    train(settings(70), tmp_path / "straight")
    drawn = [figure([read_run(tmp_path / name)]).axes[0].get_lines()[0] for name in ("resumed", "straight")]
    assert drawn[0].get_xdata() == pytest.approx([0, 15, 30, 45, 60, 70])
    for resumed, straight in zip(drawn[0].get_data(), drawn[1].get_data(), strict=True):
        assert np.array_equal(resumed, straight)


def test_mistakes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", structure_lines(50))
    with pytest.raises(RunError, match="nothing holds no run with metrics"):
        write_curve([tmp_path / "nothing"], tmp_path / "curve.png")
    with pytest.raises(RunError, match="has no metrics yet"):
        write_curve([make_run(tmp_path / "new", [])], tmp_path / "curve.png")
    with pytest.raises(RunError, match="has nothing to draw yet"):
        write_curve([make_run(tmp_path / "early", [{STEPS: 5, "time/fps": 3}])], tmp_path / "curve.png")
    vector = make_run(tmp_path / "vector", [{STEPS: 5, "eval/mean_reward": 3.0}])
    with pytest.raises(RunError, match="cannot share a figure"):
        write_curve([run, vector], tmp_path / "curve.png")
    with pytest.raises(FileError, match="cannot be written"):
        write_curve([run], tmp_path / "missing" / "curve.png")


def test_a_run_is_good_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", structure_lines(50))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(RelaxionWarning, match="no learning curve was drawn"):
        leave_curve(run)
    assert not (run / "learning_curve.png").exists()


def test_nothing_global_changes_and_matplotlib_comes_late(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", structure_lines(50))
    code = f"""
import sys
from pathlib import Path
from relaxion.train.runs.curves import write_curve
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
write_curve([Path({str(run)!r})], Path({str(tmp_path / "curve.png")!r}))
assert matplotlib.rcParams.copy() == before and matplotlib.get_backend(auto_select=False) is None
print("matplotlib.pyplot" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_colours_are_told_apart_by_everybody() -> None:
    """Distances between all pairs as the colour-blind see them (Machado et al. 2009, full deficiency)."""
    blindness = {
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    colours = np.array([[int(word[k : k + 2], 16) / 255 for k in (1, 3, 5)] for word in curves.COLOURS])
    for matrix in blindness.values():
        seen = (colours**2.2 @ np.array(matrix).T).clip(0, 1) ** (1 / 2.2)
        gaps = np.linalg.norm(seen[:, None] - seen[None], axis=2)[np.triu_indices(len(colours), 1)]
        assert gaps.min() > 0.1
    assert len(set(curves.MARKERS)) == len(curves.MARKERS) == len(curves.COLOURS)
