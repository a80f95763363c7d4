"""Collectors on Ray: one is the local trainer to the bit, a lost one leaves no trace, nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_atom_resume import settings_for
from test_resume import CHILD, lines, records

from relaxion.errors import CheckpointError, RelaxionWarning, RunError, SettingsError
from relaxion.files import digest
from relaxion.train import collectors as collectors_trainer
from relaxion.train.collectors import DistributedRelaxTrainer, trainer_with
from relaxion.train.runs.loop import MakeTrainer, train
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import relax_task
from relaxion.train.tasks.settings import read_settings
from relaxion.workers import WorkerPlace
from relaxion.workers.on_ray import RayEngine, remove_left_behind

SHORT = {"steps": 64, "warmup_steps": 20, "assessment_interval_steps": 32}

STIFFNESS = {
    "policy": "stiffness", "n_hidden": 4, "n_radial": 4, "fit_updates": 6, "examples_per_update": 8,
    "example_relaxations": 6, "example_rounds_before": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def _ray() -> Iterator[RayEngine]:
    """One Ray for all tests here: to start it takes seconds."""
    engine = RayEngine(None, 3)
    yield engine
    engine.stop()


def trainer_of(settings: RelaxRunSettings, number: int) -> DistributedRelaxTrainer:
    return DistributedRelaxTrainer(settings, relax_task(settings), WorkerPlace("ray", number))


def on_ray(number: int) -> MakeTrainer:
    return trainer_with(WorkerPlace("ray", number))


def contents(out: Path) -> list[object]:
    texts = [(out / name).read_text() if (out / name).exists() else "" for name in ("settings.toml", "alarms.jsonl")]
    return [records(out), *texts]


@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize(
    ("agent", "policy"),
    [
        ("td3", {}),
        pytest.param("sac", {}, marks=pytest.mark.slow),
        pytest.param("td3", STIFFNESS, marks=pytest.mark.slow),
    ],
)
def test_one_collector_is_the_local_trainer_to_the_bit(agent: str, policy: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_for(agent, **SHORT, **policy)
    local = train(settings, tmp_path / "local")
    distributed = train(settings, tmp_path / "distributed", make=on_ray(1))
    assert distributed.weights_sha256 == local.weights_sha256
    assert distributed.training_force_calls == local.training_force_calls
    assert contents(tmp_path / "distributed") == contents(tmp_path / "local")
    longer = settings_for(agent, **{**SHORT, "steps": 80}, **policy)
    there, here = (train(longer, tmp_path / name, resume=True) for name in ("distributed", "local"))
    assert there.weights_sha256 == here.weights_sha256  # its checkpoint is the local trainer's, too


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_several_collectors_repeat_to_the_bit_also_through_a_resume(tmp_path: Path) -> None:
    settings = settings_for("td3", **SHORT)
    straight = train(settings, tmp_path / "straight", make=on_ray(3))
    local = train(settings, tmp_path / "local")
    assert straight.weights_sha256 != local.weights_sha256  # other structures, older weights
    assert straight.steps == local.steps

    shorter = settings_for("td3", **{**SHORT, "steps": 44})  # not a whole number of turns of all three
    train(shorter, tmp_path / "stopped", make=on_ray(3))
    resumed = train(settings, tmp_path / "stopped", resume=True, make=on_ray(3))
    assert resumed.weights_sha256 == straight.weights_sha256

    with pytest.raises(
        CheckpointError, match="this run has 3 collectors, 2 were asked for; continue with `collectors=ray:3`"
    ):
        train(settings, tmp_path / "stopped", resume=True, make=on_ray(2))
    with pytest.raises(CheckpointError, match="this run has 3 collectors; continue with `collectors=ray:3`"):
        train(settings, tmp_path / "stopped", resume=True)


def processes(trainer: DistributedRelaxTrainer) -> list[int]:
    """Of the collectors; waits until they are free."""
    import ray

    actors = [known.handle for known in trainer.team.pool.known.values()]
    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])


@pytest.mark.usefixtures("_ray")
def test_a_killed_collector_is_replaced_and_its_step_repeated() -> None:
    settings = settings_for("sac", **SHORT)
    undisturbed = trainer_of(settings, 2)
    for _ in range(12):
        undisturbed.advance()
    undisturbed.close()
    disturbed, chance = trainer_of(settings, 2), random.Random(time.time_ns())
    with pytest.warns(RelaxionWarning, match=r"collector \d was lost; a new one repeats its step") as said:  # noqa: PT031
        for turn in range(12):
            collectors = processes(disturbed) if turn in (2, 8) else []
            disturbed.advance()
            if collectors:
                os.kill(chance.choice(collectors), signal.SIGKILL)  # one has just been sent off, the other is waiting
    assert sum("was lost" in str(warning.message) for warning in said) == 2
    assert digest(disturbed.snapshot()) == digest(undisturbed.snapshot())
    disturbed.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_a_step_that_kills_every_collector_is_given_up_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # where collectors look for modules, too
    monkeypatch.setattr(collectors_trainer, "MOST_LOSSES", 2)
    trainer = trainer_of(settings_for("td3", **SHORT, potential="deadly:calculator"), 1)
    Path("armed").touch()
    with (
        pytest.warns(RelaxionWarning),
        pytest.raises(RunError, match="collector 0 was lost 2 times over the same step"),
    ):
        trainer.advance()
    trainer.close()


DEADLY = """
import os
from pathlib import Path
from ase.calculators.emt import EMT


class Deadly(EMT):
    def calculate(self, *arguments, **options):
        if Path("armed").exists():
            os._exit(1)
        super().calculate(*arguments, **options)


def calculator():
    return Deadly()
"""


def test_folders_of_killed_runs_are_removed_and_others_kept(tmp_path: Path) -> None:
    for name in ("relaxion-ray-dead/session_x_999999999", f"relaxion-ray-alive/session_x_{os.getpid()}"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "relaxion-ray-new").mkdir()
    (tmp_path / "ray").mkdir()
    remove_left_behind(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ray", "relaxion-ray-alive", "relaxion-ray-new"]


def test_local_collectors_are_those_on_ray_and_killed_ones_are_replaced(tmp_path: Path) -> None:
    settings = settings_for("td3", **SHORT)
    local = train(settings, tmp_path / "one", make=trainer_with(WorkerPlace("local", 1)))
    assert local.weights_sha256 == train(settings, tmp_path / "here").weights_sha256
    undisturbed, disturbed = (
        DistributedRelaxTrainer(settings, relax_task(settings), WorkerPlace("local", 2)) for _ in range(2)
    )
    with pytest.warns(RelaxionWarning, match=r"collector 1 was lost; a new one repeats its step"):  # noqa: PT031
        for turn in range(8):
            undisturbed.advance()
            disturbed.advance()
            if turn == 2:
                disturbed.team.pool.kill(1)
    assert digest(disturbed.snapshot()) == digest(undisturbed.snapshot())
    undisturbed.close()
    disturbed.close()


def test_vectors_are_refused_in_a_sentence() -> None:
    with pytest.raises(SettingsError, match="a step of Pendulum-v1 costs less than sending it"):
        on_ray(2)(read_settings({"task": "Pendulum-v1"}))


def test_no_cluster_where_it_should_be(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, "train", "emt-metals", "--collectors", "ray:127.0.0.1:1", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no Ray at '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_nothing_stays_behind(tmp_path: Path) -> None:
    """Ended, terminated or killed: no process and, but for the kill, no folder of Ray's."""
    settings, out = settings_for("td3", **{**SHORT, "steps": 10_000}), tmp_path / "run"
    (tmp_path / "recipe.toml").write_text(settings.as_toml())
    command = [sys.executable, "-c", CHILD, "train", str(tmp_path / "recipe.toml"), "--out", str(out), "-q"]
    command += ["--collectors", "ray:1"]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        before = lines(out)
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        folder = wait_for(lambda child=child: folder_of(child.pid))
        wait_for(lambda before=before: lines(out) > before)
        assert len(processes_with(folder)) >= 2  # at least Ray's two servers
        child.send_signal(number)
        said = child.communicate(timeout=600)[1]
        assert child.returncode == code, said
        wait_for(lambda folder=folder: not processes_with(folder))
        assert Path(folder).exists() == (number == signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        command.append("--resume")


def folder_of(pid: int) -> str | None:
    """The folder of the Ray that this process has started: its session carries the number."""
    found = [re.search(rf"(/tmp/relaxion-ray-\w+)/session_[^/]*_{pid}/", line) for line in command_lines()]
    return next((match[1] for match in found if match), None)


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_text(errors="replace"))
    return lines


def processes_with(word: str) -> list[str]:
    return [line for line in command_lines() if word in line]


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("waited in vain")
