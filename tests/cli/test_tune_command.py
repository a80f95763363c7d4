"""`relaxion tune` as users meet it: two processes, a driver that is killed, a table, a recipe that trains."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxion.train.runs.loop import train
from relaxion.train.tasks.settings import settings_from_recipe

CHILD = "import sys; from relaxion.apps.cli.app import main; sys.exit(main())"
SET = {
    "widths": "[8,8]", "warmup_steps": 100, "assessment_starts": 1, "assessment_interval_steps": 0,
    "checkpoint_interval_steps": 50, "log_interval_steps": 50,
}  # fmt: skip
WORDS = [
    "tune", "pendulum", "--steps", "600", "--seed", "5", "--vary", "policy_learning_rate=1e-4:1e-2:log", "--vary",
    "batch_size=8|16", *(word for key, value in SET.items() for word in ("--set", f"{key}={value}")),
]  # fmt: skip


def command(out: Path, trials: int, *more: str) -> list[str]:
    return [sys.executable, "-c", CHILD, *WORDS, "--out", str(out), "--trials", str(trials), *more]


def done(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def workers(out: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_text(errors="replace")
        except OSError:
            continue
        if str(out / "trials") in line:
            found.append(line)
    return found


def check_killed(tmp_path: Path, *more: str) -> None:
    """A driver killed in the middle of a trial: its workers end, and the next one goes on as if nothing had been."""
    out = tmp_path / "sweep"
    driver = subprocess.Popen(command(out, 2, *more), stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: "\n" in _text(out / "trials" / "0000" / "metrics.jsonl") or driver.poll() is not None)
    driver.send_signal(signal.SIGKILL)
    said = driver.communicate()[1]
    assert driver.returncode == -signal.SIGKILL, said
    assert not (out / "trials" / "0000" / "result.json").exists()
    wait_for(lambda: not workers(out), 30)

    ended = done(*command(out, 2, "--json", *more))
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    with (out / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert facts["value"] == max(float(row["value"]) for row in rows)
    straight = train(settings_from_recipe(out / "trials" / "0000.toml", None, {}), tmp_path / "straight")
    told = json.loads(_text(out / "trials" / "0000" / "result.json"))
    assert told["weights_sha256"] == straight.weights_sha256
    assert float(rows[0]["value"]) == straight.final_return_mean
    assert settings_from_recipe(out / "best.toml", None, {}).training.steps == 600


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_killed_sweep_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    check_killed(tmp_path, "--workers", "local:2")
    other = done(*command(tmp_path / "sweep", 2, "--vary", "n_steps=1|2"))
    assert other.returncode == 1
    assert "n_steps (was None, now '1|2')" in other.stderr


@pytest.mark.slow
def test_on_ray(tmp_path: Path) -> None:
    check_killed(tmp_path, "--workers", "ray:2")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--vary", "n_step=1|2"], "did you mean 'n_steps'"),
        (["--workers", "slurm:2"], "expected N, local:N"),
        (["--sampler", "magic"], "no sampler 'magic'"),
    ],
)
def test_wrong_words(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from relaxion.apps.cli import app as cli

    monkeypatch.setattr(sys, "argv", ["relaxion", *WORDS, "--out", str(tmp_path / "sweep"), "--trials", "2", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "sweep").exists()
