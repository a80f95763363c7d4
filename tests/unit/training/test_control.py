"""Collect, store, update: what enters replay, what the agent sees, what a snapshot holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from relaxion.errors import CheckpointError, RelaxionWarning
from relaxion.files import Stored, digest
from relaxion.train.experience.vectors import Batch, task
from relaxion.train.tasks.control import Trainer, VectorRunSettings

SMALL: dict[str, Any] = {
    "agent": "td3", "task": "Pendulum-v1", "seed": 4, "widths": [8, 8], "batch_size": 8, "warmup_steps": 210,
    "replay_capacity": 500,
}  # fmt: skip


def make_trainer(steps: int = 0, **changes: Any) -> Trainer:
    trainer = Trainer(VectorRunSettings.read({**SMALL, **changes}), task("Pendulum-v1"))
    for _ in range(steps):
        trainer.advance()
    return trainer


def stored(trainer: Trainer) -> Stored:
    tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
    return Stored(tensors, {"settings": trainer.settings.flat()})


def test_a_time_limit_enters_replay_as_no_termination_and_a_new_episode_begins() -> None:
    replay = make_trainer(205).replay
    assert not replay.terminated.any()
    assert replay.ended.nonzero().flatten().tolist() == [199]
    follows = (replay.next_observations[:204] == replay.observations[1:205]).all(dim=1)
    assert (~follows).nonzero().flatten().tolist() == [199]  # only across the reset
    assert replay.assemble(torch.tensor([199])).discounts.item() == pytest.approx(0.99)


def test_nothing_is_updated_during_warm_up() -> None:
    trainer = make_trainer(209)
    assert digest(trainer.agent.snapshot()) == digest(make_trainer().agent.snapshot())
    trainer.advance()
    assert trainer.n_updates == 1


def test_the_agent_acts_on_and_learns_from_normalised_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(212)
    acted: list[torch.Tensor] = []
    learned: list[Batch] = []
    explore = trainer.agent.explore
    monkeypatch.setattr(trainer.agent, "explore", lambda o, g: (acted.append(o), explore(o, g))[1])
    monkeypatch.setattr(trainer.agent, "update", lambda batch: (learned.append(batch), {})[1])
    raw = trainer.environments.observations.clone()
    trainer.advance()
    assert torch.equal(acted[0], trainer.normaliser(raw))
    assert not torch.equal(acted[0], raw)
    known = trainer.normaliser(trainer.replay.observations[: len(trainer.replay)])
    assert all((known == row).all(dim=1).any() for row in learned[0].observations)


def test_the_best_action_is_that_of_the_normalised_observation() -> None:
    trainer = make_trainer(212)
    raw = trainer.environments.observations
    assert torch.equal(trainer.act(raw), trainer.agent.act(trainer.normaliser(raw)))
    assert not torch.equal(trainer.act(raw), trainer.agent.act(raw))


@pytest.mark.parametrize("agent", ["ddpg", "td3", "d4pg", "sac"])
def test_a_restored_trainer_holds_all_that_was_saved(agent: str) -> None:
    support = {"lowest_value": -1700.0, "highest_value": 0.0} if agent == "d4pg" else {}
    trainer, copy = make_trainer(230, agent=agent, **support), make_trainer(3, agent=agent, **support)
    copy.restore(stored(trainer))
    assert digest(copy.snapshot()) == digest(trainer.snapshot())
    for one in (trainer, copy):
        for _ in range(5):
            one.advance()
    assert digest(copy.snapshot()) == digest(trainer.snapshot())
    metrics = trainer.scalars()
    assert copy.scalars() == metrics
    assert metrics["time/episodes"] == 1


def test_old_weights_come_without_their_run() -> None:
    old, new = make_trainer(230), make_trainer(0, seed=8)
    fresh = new.agent.snapshot()
    new.start_from(stored(old))
    taken, source = new.agent.snapshot(), old.agent.snapshot()
    for name, tensor in taken.items():
        belongs_to_the_run = name.split(".")[0] in ("policy_optimizer", "critic_optimizer", "n_updates", "generator")
        assert torch.equal(tensor, (fresh if belongs_to_the_run else source)[name]), name
    assert int(taken["n_updates"]) == new.n_updates == new.step == len(new.replay) == 0
    assert torch.equal(new.normaliser.mean, old.normaliser.mean)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"normalise_observations": False}, r"normalise_observations \(was True, now False\)"),
        ({"lowest_value": -9.0}, r"lowest_value \(was -150.0, now -9.0\)"),
        ({"highest_value": 9.0}, r"highest_value \(was 150.0, now 9.0\)"),
        ({"n_bins": 11}, r"n_bins \(was 51, now 11\)"),
    ],
)
def test_old_weights_of_another_meaning_are_refused(changes: dict[str, Any], sentence: str) -> None:
    old, new = make_trainer(3, agent="d4pg"), make_trainer(agent="d4pg", seed=8, **changes)
    before = digest(new.weights())
    with pytest.raises(CheckpointError, match=sentence):
        new.start_from(stored(old))
    assert digest(new.weights()) == before


@pytest.mark.parametrize("agent", ["ddpg", "td3", "d4pg", "sac"])
def test_old_weights_for_other_bounds_of_actions_are_refused(agent: str) -> None:
    narrow = replace(task("Pendulum-v1"), highest_action=torch.ones(1))
    new = Trainer(VectorRunSettings.read({**SMALL, "agent": agent}), narrow)
    before = digest(new.weights())
    with pytest.raises(
        CheckpointError, match=r"centre of actions \(was \[0.0\], now \[-0.5\]\), half_range of actions"
    ):
        new.start_from(stored(make_trainer(3, agent=agent)))
    assert digest(new.weights()) == before


def test_a_checkpoint_of_another_task_is_refused() -> None:
    saved = stored(make_trainer(5))
    saved.tensors.pop("replay.rewards")
    with pytest.raises(CheckpointError, match=r"does not fit this run .*'rewards'"):
        make_trainer().restore(saved)


def test_episodes_that_do_not_repeat_are_cut() -> None:
    many = {"n_environments": 2, "n_steps": 3}
    saved = stored(make_trainer(5, **many))
    saved.tensors["environments.observations"] += 1
    resumed = make_trainer(**many)
    with pytest.warns(RelaxionWarning, match="did not repeat its episode"):
        resumed.restore(saved)
    for _ in range(3):
        resumed.advance()
    assert resumed.replay.ended.nonzero().flatten().tolist() == [8, 9]
    assert not resumed.replay.terminated.any()
    assert torch.equal(
        resumed.replay.assemble(torch.tensor([6])).next_observations[0], saved.tensors["replay.next_observations"][8]
    )
    assert resumed.environments.snapshot()["lengths"].tolist() == [3, 3]
    assert resumed.episodes.snapshot()["lengths"].tolist() == [3, 3]


CLOSURE = """
import sys
from relaxion.train.runs.loop import make_trainer
from relaxion.train.tasks.settings import find, settings_from_recipe
make_trainer(settings_from_recipe(find("pendulum"), "td3", {}))
loaded = [name for name in sys.modules if name.split(".")[0] == "relaxion"]
print([name for name in loaded if not hasattr(sys.modules[name], "__path__")])
print(sorted({name.split(".")[1] for name in loaded if "." in name}), "ase" in sys.modules)
print(sorted({name.split(".")[2] for name in loaded if name.startswith("relaxion.train.")}))
"""


def test_pendulum_needs_few_modules_and_no_atoms() -> None:
    """A student who reads TD3 on Pendulum meets none of the rooms that know atoms."""
    out = subprocess.run(
        [sys.executable, "-c", CLOSURE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(ast.literal_eval(out[0])) < 30
    rooms = ["errors", "files", "model", "settings", "train"]
    assert out[1] == f"{rooms} False"
    assert out[2] == str(["agents", "experience", "recipes", "runs", "tasks"])
