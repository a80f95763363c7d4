"""`relaxion train` from outside: result, overrides, exit codes, one sentence for every mistake."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from documentation.pieces import filled

SMALL = [
    "widths=[8, 8]", "batch_size=8", "warmup_steps=20", "replay_capacity=500", "assessment_starts=1",
    "checkpoint_interval_steps=40", "log_interval_steps=10", "assessment_interval_steps=0",
]  # fmt: skip
KEYS = {
    "agent", "task", "seed", "steps", "final_return_mean", "final_return_worst", "episodes", "wall_time_seconds",
    "weights_sha256",
}  # fmt: skip


def words(*more: str, steps: int = 60, agent: str = "sac", out: str = "run") -> list[str]:
    small = [word for setting in SMALL for word in ("--set", setting)]
    return ["train", "pendulum", "--agent", agent, "--steps", str(steps), "--out", out, *small, *more]


@pytest.mark.parametrize("agent", ["ddpg", "td3", "d4pg", "sac"])
def test_result(relaxion: Callable[..., Any], agent: str) -> None:
    answer = relaxion(*words("--seed", "3", "--json", agent=agent))
    assert answer.code == 0, answer.err
    result = answer.objects[0]
    assert set(result) == KEYS
    assert (result["agent"], result["task"], result["seed"], result["steps"]) == (agent, "Pendulum-v1", 3, 60)
    assert json.loads(Path("run/result.json").read_text()) == result


def test_one_line_says_where_the_run_is(relaxion: Callable[..., Any]) -> None:
    answer = relaxion(*words())
    assert answer.out.startswith("sac on Pendulum-v1, seed 0: mean return -")
    assert answer.out.endswith("-> run/\n")


def test_a_run_folder_is_a_recipe_and_can_be_lengthened(relaxion: Callable[..., Any]) -> None:
    relaxion(*words())
    longer = relaxion("train", "run", "--steps", "90", "--resume", "--json")
    assert longer.code == 0, longer.err
    straight = relaxion(*words("--json", steps=90, out="straight"))
    assert longer.objects[0]["weights_sha256"] == straight.objects[0]["weights_sha256"]


def test_a_folder_that_is_no_run_takes_nothing(relaxion: Callable[..., Any]) -> None:
    Path("pendulum").mkdir()
    Path("pendulum/settings.toml").write_text('colour = "blue"')
    without_out = [word for word in words("--json") if word not in ("--out", "run")]
    answer = relaxion(*without_out)
    assert answer.code == 0, answer.err
    assert Path("runs/pendulum-sac-0/result.json").exists()
    assert [file.name for file in Path("pendulum").iterdir()] == ["settings.toml"]


def test_from_weights(relaxion: Callable[..., Any]) -> None:
    relaxion(*words())
    answer = relaxion(*words("--from", "run", "--json", out="new"))
    assert answer.code == 0, answer.err
    assert answer.objects[0]["steps"] == 60


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("train", "pendulun"), 2, "did you mean 'pendulum'"),
        (("train", "pendulum", "--agent", "sacc"), 2, "did you mean 'sac'"),
        (("train", "pendulum", "--set", "batchsize=3"), 2, "did you mean 'batch_size'"),
        (("train", "pendulum", "--agent", "sac", "--set", "agent=td3"), 2, "two agents asked for"),
        (("train", "."), 2, "the folder '.' holds no run"),
        (("train", "pendulum", "--set", "batch_size"), 2, "--set takes key=value"),
        (("train", "pendulum", "--set", "replay_capacity=50"), 2, "replay_capacity 50 is below batch_size 128"),
        (("train", "pendulum", "--set", "warmup_steps=5"), 2, "warmup_steps 5 is below batch_size 128"),
        (("train", "pendulum", "--set", "task=CartPole-v1"), 2, "need a Box of real actions"),
        (("train", "pendulum", "--set", "task=Nothing-v1"), 2, "no Gymnasium task 'Nothing-v1'"),
        (("train", "pendulum", "--resume"), 1, "no checkpoint to resume from"),
        (("train", "pendulum", "--from", "nothing"), 1, "nothing is neither a run, nor"),
    ],
)
def test_mistakes(relaxion: Callable[..., Any], arguments: tuple[str, ...], code: int, sentence: str) -> None:
    answer = relaxion(*arguments)
    assert answer.code == code
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""
    assert not Path("runs").exists()


def test_without_a_recipe_all_are_listed(relaxion: Callable[..., Any]) -> None:
    answer = relaxion("train")
    assert answer.code == 0, answer.err
    assert "alfe-cubic" in answer.out
    assert "half cheetah" in answer.out
    assert "universal-data" not in answer.out  # of kinds, named by others
    assert not Path("runs").exists()


def test_an_earlier_run_is_kept(relaxion: Callable[..., Any]) -> None:
    relaxion(*words())
    before = Path("run/result.json").read_text()
    answer = relaxion(*words("--seed", "1"))
    assert answer.code == 1
    assert "not empty; --resume continues" in answer.err
    differing = relaxion(*words("--seed", "1", "--resume"))
    assert differing.code == 1
    assert "seed (was 0, now 1)" in differing.err
    assert Path("run/result.json").read_text() == before
    assert relaxion(*words("--seed", "1", "--force")).code == 0


def test_returns_outside_the_support_are_told(relaxion: Callable[..., Any]) -> None:
    answer = relaxion(*words("--set", "lowest_value=-1", "--set", "warmup_steps=210", "-q", agent="d4pg", steps=205))
    assert answer.code == 0
    assert answer.err.startswith("relaxion: warning: ")
    assert "outside the support" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_from_outside(relaxion: Callable[..., Any], number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()", *words(steps=100_000)]
    child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not _has_lines(Path("run/metrics.jsonl"), 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=600)
    assert child.returncode == code, said
    assert "--resume continues" in said
    step = int(said.split("stopped at step ")[1].split(",")[0])
    resumed = relaxion(*words("--resume", "--json", steps=step + 5))
    assert resumed.code == 0, resumed.err
    straight = relaxion(*words("--json", steps=step + 5, out="straight"))
    assert resumed.objects[0]["weights_sha256"] == straight.objects[0]["weights_sha256"]


def _has_lines(file: Path, count: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= count


def test_recipes_are_listed_without_torch() -> None:
    code = (
        "import sys; from relaxion.apps.cli.app import app; app(['train'], standalone_mode=False); print(*sys.modules)"
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "pendulum" in said
    assert not {"torch", "ase"} & set(said.splitlines()[-1].split())
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 1.0


def test_of_many_settings_the_nearest_are_named(relaxion: Callable[..., Any]) -> None:
    answer = relaxion("train", "emt-metals", "--set", "zzzz=3")
    assert answer.code == 2
    named = answer.err.split(" are ")[1].split(";")[0].split(", ")
    assert len(named) == 3
    page = Path(__file__).parents[2] / answer.err.split(";")[1].split()[0]
    listed = filled(page.parents[2], page.read_text())
    assert all(f"`{name}`" in listed for name in named)
