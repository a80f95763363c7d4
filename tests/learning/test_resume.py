"""Killed at any moment and resumed, a run is the run that never stopped: weights and records, to the bit (R10.1)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from relaxion.train.runs.loop import train
from relaxion.train.tasks.settings import RunSettings, read_settings
from training_runs import without_times

AGENTS = ("ddpg", "td3", "d4pg", "sac")
SMALL = {
    "task": "Pendulum-v1",
    "steps": 420,  # more than two episodes
    "seed": 11,
    "widths": [16, 16],
    "batch_size": 16,
    "warmup_steps": 40,
    "replay_capacity": 300,  # the ring is full before the end
    "n_steps": 3,
    "log_interval_steps": 8,
    "assessment_interval_steps": 100,
    "assessment_starts": 2,
    "checkpoint_interval_steps": 30,
}
CHILD = "import sys; from relaxion.apps.cli.app import main; sys.exit(main())"


def settings_for(agent: str) -> RunSettings:
    noisy = {"exploration_noise_final": 0.05, "exploration_noise_steps": 300} if agent != "sac" else {}
    support = {"lowest_value": -1600.0, "highest_value": 10.0} if agent == "d4pg" else {}
    return read_settings({**SMALL, **noisy, **support, "agent": agent})


def records(out: Path) -> list[dict[str, float]]:
    return [without_times(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def lines(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def start_and_kill(recipe: Path, out: Path, at_line: int, chance: random.Random) -> None:
    """Run in a process of its own, and kill it somewhere after a line of the log."""
    resume = ["--resume"] if (out / "checkpoint.safetensors").exists() else []
    command = [sys.executable, "-c", CHILD, "train", str(recipe), "--out", str(out), *resume]
    child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while lines(out) < at_line and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.04))
    assert child.poll() is None, f"ended before it was killed: {child.communicate()[1]!r}"
    child.send_signal(signal.SIGKILL)
    child.communicate()


def fork_and_kill(settings: RunSettings, out: Path, at_line: int, chance: random.Random) -> None:
    """The same in a copy of this process, which has loaded everything already: for many kills."""
    resume = (out / "checkpoint.safetensors").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where other threads are about
        child = os.fork()
    if child == 0:
        try:
            train(settings, out, resume=resume)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 600
    while lines(out) < at_line and time.monotonic() < deadline:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "ended before it was killed"
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def check_kills(agent: str, folder: Path, n_kills: int, forked: bool = False) -> None:
    settings = settings_for(agent)
    straight = train(settings, folder / "straight")
    killed, recipe = folder / "killed", folder / "recipe.toml"
    recipe.write_text(settings.as_toml())
    chance = random.Random(time.time_ns())
    n_lines = len(records(folder / "straight"))
    for at_line in sorted(chance.sample(range(n_lines - 12), n_kills)):
        if forked:
            fork_and_kill(settings, killed, at_line, chance)
        else:
            start_and_kill(recipe, killed, at_line, chance)
        if not (killed / "checkpoint.safetensors").exists():
            assert at_line == 0  # killed before there was anything to resume from: --resume would be refused
    resumed = train(settings, killed, resume=(killed / "checkpoint.safetensors").exists())
    assert resumed.weights_sha256 == straight.weights_sha256
    assert resumed.final_return_mean == straight.final_return_mean
    assert resumed.episodes == straight.episodes == 2
    assert records(killed) == records(folder / "straight")


@pytest.mark.parametrize("agent", AGENTS)
def test_one_kill(agent: str, tmp_path: Path) -> None:
    check_kills(agent, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_many_kills(agent: str, tmp_path: Path) -> None:
    check_kills(agent, tmp_path, 20, forked=True)
