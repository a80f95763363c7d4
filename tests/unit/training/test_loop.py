"""Whole runs in their folder: what is written, what is refused, what must not disturb what."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv

from relaxion.errors import CheckpointError, FileError, RunError, SettingsError
from relaxion.files import Format, write_json
from relaxion.train.runs.loop import Interrupted, train
from relaxion.train.runs.run_folder import RunFolder
from relaxion.train.tasks.control import ReturnsAssessor, Trainer
from relaxion.train.tasks.progress import CHECKPOINTS
from relaxion.train.tasks.settings import RunSettings, read_settings
from training_runs import without_times

SMALL: dict[str, Any] = {
    "agent": "td3", "task": "Pendulum-v1", "steps": 120, "seed": 4, "widths": [8, 8], "batch_size": 8,
    "warmup_steps": 30, "replay_capacity": 100, "log_interval_steps": 25, "assessment_interval_steps": 50,
    "assessment_starts": 2, "checkpoint_interval_steps": 40,
}  # fmt: skip
KEYS = [
    "agent", "task", "seed", "steps", "final_return_mean", "final_return_worst", "episodes", "wall_time_seconds",
    "weights_sha256",
]  # fmt: skip


class Failing(PendulumEnv):
    """Pendulum whose answer at one step is not finite; the test decides when and what."""

    at, what, count = -1, "reward", 0

    def step(self, u: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(u)
        Failing.count += 1
        if Failing.count == Failing.at:
            reward = {"reward": np.nan, "large reward": 1e39}.get(self.what, reward)
            observation = observation * np.inf if self.what == "observation" else observation
        return observation, reward, *rest  # type: ignore[return-value]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    gymnasium.register("FailingPendulum-v0", entry_point=Failing, max_episode_steps=200, disable_env_checker=True)
    monkeypatch.setattr(Failing, "count", 0)
    yield "FailingPendulum-v0"
    gymnasium.registry.pop("FailingPendulum-v0")


def make_settings(**changes: Any) -> RunSettings:
    return read_settings({**SMALL, **changes})


def records(out: Path) -> list[dict[str, float]]:
    return [without_times(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    result = train(make_settings(), tmp_path / "run")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(written) == KEYS
    assert (written["steps"], written["agent"], written["seed"]) == (120, "td3", 4)
    assert written["weights_sha256"] == result.weights_sha256
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {
        ".lock", "settings.toml", "metrics.jsonl", "checkpoint.safetensors", "agent.safetensors", "result.json",
        "assessment.json",
    }  # fmt: skip
    lines = records(tmp_path / "run")
    assert [line["time/total_timesteps"] for line in lines] == [0, 25, 50, 75, 100, 120]
    assert {"train/critic_loss", "train/actor_loss", "train/n_updates", "time/episodes"} <= lines[2].keys()
    assert [line for line in lines if "eval/mean_reward" in line] == [lines[0], lines[2], lines[4], lines[5]]
    assert lines[5]["eval/mean_reward"] == written["final_return_mean"]
    assert lines[1]["train/n_updates"] == 0  # still warming up
    assert lines[2]["train/n_updates"] == 21  # the first with the 30th transition


@pytest.mark.parametrize("agent", ["ddpg", "td3", "d4pg", "sac"])
def test_the_same_seed_gives_the_same_run(agent: str, tmp_path: Path) -> None:
    settings = make_settings(agent=agent, steps=80)
    torch.manual_seed(1)
    first = train(settings, tmp_path / "one")
    torch.manual_seed(2)  # the global generator plays no part
    second = train(settings, tmp_path / "two")
    other = train(make_settings(agent=agent, steps=80, seed=5), tmp_path / "three")
    assert first.weights_sha256 == second.weights_sha256 != other.weights_sha256
    assert records(tmp_path / "one") == records(tmp_path / "two") != records(tmp_path / "three")


@pytest.mark.parametrize("agent", ["ddpg", "td3", "d4pg", "sac"])
def test_assessments_and_checkpoints_do_not_disturb_training(agent: str, tmp_path: Path) -> None:
    often = train(make_settings(agent=agent, assessment_interval_steps=5, checkpoint_interval_steps=3), tmp_path / "a")
    never = train(make_settings(agent=agent, assessment_interval_steps=0), tmp_path / "b")
    assert often.weights_sha256 == never.weights_sha256
    assert often.final_return_mean == never.final_return_mean


def test_a_finished_run_can_be_lengthened(tmp_path: Path) -> None:
    train(make_settings(steps=70), tmp_path / "pieces")
    longer = train(make_settings(), tmp_path / "pieces", resume=True)
    straight = train(make_settings(), tmp_path / "straight")
    assert longer.weights_sha256 == straight.weights_sha256
    assert records(tmp_path / "pieces") == records(tmp_path / "straight")
    with pytest.raises(RunError, match="has already done 120 steps, more than the 70 asked for"):
        train(make_settings(steps=70), tmp_path / "pieces", resume=True)
    assert json.loads((tmp_path / "pieces" / "result.json").read_text())["steps"] == 120


def test_a_round_of_several_environments_may_overshoot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the final assessment, the run has its last checkpoint but no result: the same command finishes it."""
    settings = make_settings(steps=100, n_environments=8, replay_capacity=160, assessment_interval_steps=0)
    straight = train(settings, tmp_path / "straight")
    assert straight.steps == 104

    def killed(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ReturnsAssessor, "__call__", killed)
    with pytest.raises(MemoryError):
        train(settings, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    monkeypatch.undo()
    for _ in range(2):  # and once more: a finished run is finished
        again = train(settings, tmp_path / "run", resume=True)
        assert replace(again, wall_time_seconds=0) == replace(straight, wall_time_seconds=0)
    with pytest.raises(RunError, match="has already done 104 steps, more than the 96 asked for"):
        train(
            replace(settings, training=settings.training.model_copy(update={"steps": 96})),
            tmp_path / "run",
            resume=True,
        )


def test_a_resume_that_fails_leaves_the_result(tmp_path: Path) -> None:
    train(make_settings(), tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="it was cut"):
        train(make_settings(steps=200), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 120


def test_changed_settings_are_refused_by_name(tmp_path: Path) -> None:
    train(make_settings(), tmp_path / "run")
    with pytest.raises(RunError, match=r"batch_size \(was 8, now 9\), target_noise \(was 0.2, now 0.3\)"):
        train(make_settings(batch_size=9, target_noise=0.3), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"agent \(was 'td3', now 'sac'\)"):
        train(make_settings(agent="sac"), tmp_path / "run", resume=True)


def test_old_weights_begin_a_new_run(tmp_path: Path) -> None:
    """Counters start at 0; networks, targets and normaliser are the old ones (R10.2)."""
    old = train(make_settings(), tmp_path / "old")
    warm_up_only = make_settings(steps=29, seed=9, log_interval_steps=10)
    for number, source in enumerate((tmp_path / "old", tmp_path / "old" / "agent.safetensors")):
        new = train(warm_up_only, tmp_path / f"new{number}", from_weights=source)
        assert [line["time/total_timesteps"] for line in records(tmp_path / f"new{number}")] == [10, 20, 29]
        assert records(tmp_path / f"new{number}")[-2]["train/n_updates"] == 0
        assert new.weights_sha256 != old.weights_sha256  # the normaliser has seen more
    plain = train(warm_up_only, tmp_path / "plain")
    assert new.final_return_mean != plain.final_return_mean
    with pytest.raises(RunError, match=r"cannot be combined with `force=True` or `from_weights=\.\.\.`"):
        train(make_settings(), tmp_path / "old", resume=True, from_weights=tmp_path / "old")


def test_weights_of_another_shape_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    train(make_settings(steps=40), tmp_path / "old")
    with pytest.raises(Exception, match="does not fit the agent"):
        train(make_settings(widths=[9]), tmp_path / "new", from_weights=tmp_path / "old")
    assert not (tmp_path / "new" / "settings.toml").exists()


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_non_finite_answers_stop_the_run_which_can_be_resumed(
    what: str, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(task=failing, assessment_interval_steps=0)
    straight = train(settings, tmp_path / "straight")
    monkeypatch.setattr(Failing, "count", 0)
    monkeypatch.setattr(Failing, "what", what)
    monkeypatch.setattr(Failing, "at", 58)
    with pytest.raises(RunError, match=f"environment's {what} at step 57 is not finite.*`resume=True` continues"):
        train(settings, tmp_path / "run")
    offender = json.loads((tmp_path / "run" / "offending_transition.json").read_text())
    assert offender["step"] == 57
    assert not np.isfinite(np.array(offender["rewards" if what == "reward" else "next_observations"], float)).all()
    assert not (tmp_path / "run" / "result.json").exists()
    monkeypatch.setattr(Failing, "at", -1)
    resumed = train(settings, tmp_path / "run", resume=True)
    assert resumed.weights_sha256 == straight.weights_sha256


def test_a_reward_must_fit_into_32_bits(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "what", "large reward")
    monkeypatch.setattr(Failing, "at", 20)
    with pytest.raises(RunError, match="environment's reward at step 19 is not finite in 32 bits"):
        train(make_settings(task=failing, assessment_interval_steps=0), tmp_path / "run")


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_non_finite_answers_stop_an_assessment(
    what: str, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "what", what)
    monkeypatch.setattr(Failing, "at", 60)
    with pytest.raises(RunError, match=rf"environment's {what} in step \d+ of an assessment is not finite"):
        train(make_settings(task=failing), tmp_path / "run")


def test_a_diverged_agent_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Trainer.advance

    def diverge(trainer: Trainer) -> None:
        advance(trainer)
        if trainer.step == 80:
            parameter = next(iter(trainer.agent.critics.parameters()))  # type: ignore[attr-defined]
            parameter.data[:] = torch.nan

    monkeypatch.setattr(Trainer, "advance", diverge)
    with pytest.raises(RunError, match=r"the agent's critics.* at step 80 is not finite.* lower its learning rates"):
        train(make_settings(), tmp_path / "run")
    stored = CHECKPOINTS.read(tmp_path / "run" / "checkpoint.safetensors", "relaxion checkpoint")
    assert int(stored.tensors["counters.step"]) == 40
    offender = json.loads((tmp_path / "run" / "offending_transition.json").read_text())
    assert offender["step"] == 80


def test_what_is_not_finite_is_written_as_words(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"a": [1.0, float("nan")], "b": {"c": float("-inf")}})
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": [1.0, "nan"], "b": {"c": "-inf"}}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").owned(), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        train(make_settings(), tmp_path / "run")
    train(make_settings(steps=30), tmp_path / "run")  # the lock file is still there, but nobody holds it


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileError, match="not empty; choose another folder"):
        train(make_settings(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]
    first = train(make_settings(), tmp_path / "run")
    with pytest.raises(FileError, match="not empty; `resume=True` continues"):
        train(make_settings(seed=7), tmp_path / "run")
    (tmp_path / "run" / "note.txt").write_text("mine")
    second = train(make_settings(seed=7), tmp_path / "run", force=True)
    assert (tmp_path / "run" / "note.txt").read_text() == "mine"
    assert second.weights_sha256 != first.weights_sha256
    assert len(records(tmp_path / "run")) == 6
    with pytest.raises(FileError, match="cannot be a run folder"):
        train(make_settings(), tmp_path / "note.txt" / "run")


def test_force_removes_only_what_a_run_made(tmp_path: Path) -> None:
    mine, board = tmp_path / "mine", tmp_path / "mine" / "tensorboard"
    board.mkdir(parents=True)
    for file in (mine / "settings.toml", mine / ".lock", board / "events.out.tfevents.1"):
        file.write_text("mine")
    with pytest.raises(FileError, match=r"not empty; choose another folder: no run made it"):
        train(make_settings(), mine, force=True)
    assert {file.read_text() for file in (mine / "settings.toml", mine / ".lock", *board.iterdir())} == {"mine"}
    train(make_settings(steps=30), tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()  # the checkpoint tells, too
    board = tmp_path / "run" / "tensorboard"
    board.mkdir()
    (board / "note.txt").write_text("mine")
    (board / "events.out.tfevents.1").write_text("")
    train(make_settings(steps=30), tmp_path / "run", force=True)
    assert [file.name for file in board.iterdir()] == ["note.txt"]


def test_what_a_kill_leaves_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".checkpoint.safetensors.part", ".result.json.part"):
        (run / name).write_bytes(b"half")
    train(make_settings(steps=30), run)
    assert not list(run.glob(".*.part"))
    (run / ".agent.safetensors.part").write_bytes(b"half")
    (run / ".note.part").write_bytes(b"mine")
    train(make_settings(steps=30), run, resume=True)
    assert [file.name for file in run.glob(".*.part")] == [".note.part"]


def test_a_run_killed_before_its_first_checkpoint_can_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_form: Format, path: Path, *_: object) -> None:
        path.with_name(f".{path.name}.part").write_bytes(b"half")
        raise MemoryError

    monkeypatch.setattr(Format, "write", killed)
    with pytest.raises(MemoryError):
        train(make_settings(tensorboard=True), tmp_path / "run")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        ".lock", ".checkpoint.safetensors.part", "metrics.jsonl"
    }  # fmt: skip
    monkeypatch.undo()
    assert train(make_settings(), tmp_path / "run").steps == 120


def test_resume_without_or_with_a_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(make_settings(), tmp_path / "run", resume=True)
    train(make_settings(), tmp_path / "run")
    file = tmp_path / "run" / "checkpoint.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        train(make_settings(steps=200), tmp_path / "run", resume=True)
    file.write_bytes(content)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="it was cut"):
        train(make_settings(steps=200), tmp_path / "run", resume=True)


def test_an_interrupt_saves_and_the_rest_follows(tmp_path: Path) -> None:
    def interrupt(step: int, _newest: object) -> None:
        if step == 67:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped at step 67"):
        train(make_settings(), tmp_path / "run", on_progress=interrupt)
    resumed = train(make_settings(), tmp_path / "run", resume=True)
    assert resumed.weights_sha256 == train(make_settings(), tmp_path / "straight").weights_sha256
    assert records(tmp_path / "run") == records(tmp_path / "straight")


@pytest.mark.parametrize("at", [50, 120])
def test_an_interrupt_of_an_assessment(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on the way and the final one; what it would have logged is logged by the resume."""
    act = Trainer.act

    def interrupting(trainer: Trainer, observations: torch.Tensor) -> torch.Tensor:
        if trainer.step == at:
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.undo()
        return act(trainer, observations)

    monkeypatch.setattr(Trainer, "act", interrupting)
    with pytest.raises(Interrupted, match=f"stopped at step {at}"):
        train(make_settings(), tmp_path / "run")
    resumed = train(make_settings(), tmp_path / "run", resume=True)
    straight = train(make_settings(), tmp_path / "straight")
    assert replace(resumed, wall_time_seconds=0) == replace(straight, wall_time_seconds=0)
    assert records(tmp_path / "run") == records(tmp_path / "straight")


def test_an_unknown_task_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'Pendulum-v1'"):
        train(make_settings(task="Pendulum-v11"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(make_settings(tensorboard=True), tmp_path / "run")
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/critic_loss")] == [50, 75, 100]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_tensorboard_loses_no_point_to_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(make_settings(tensorboard=True, steps=75), tmp_path / "run")
    train(make_settings(tensorboard=True), tmp_path / "run", resume=True)
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/critic_loss")] == [50, 75, 100]


def test_a_resumed_run_has_the_curve_of_a_straight_one(tmp_path: Path) -> None:
    """R9.5: total steps, no point twice, none lost."""
    train(make_settings(steps=60), tmp_path / "resumed")
    train(make_settings(), tmp_path / "resumed", resume=True)
    train(make_settings(), tmp_path / "straight")
    resumed, straight = (
        [(line["time/total_timesteps"], line["eval/mean_reward"]) for line in lines if "eval/mean_reward" in line]
        for lines in (records(tmp_path / "resumed"), records(tmp_path / "straight"))
    )
    assert [step for step, _ in resumed] == [0, 50, 100, 120]
    assert resumed == straight
