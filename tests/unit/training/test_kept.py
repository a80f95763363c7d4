"""The policy that was best on validation starts is kept, whatever learning does to it afterwards, and packaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from relaxion.train.judge.assessment import Assessed, AssessedRelaxation, KeptPolicy, policy_weights
from relaxion.train.runs.loop import train
from relaxion.train.runs.packaging import bundle_from_run
from relaxion.train.runs.run_folder import AGENT, CHECKPOINT
from relaxion.train.tasks.progress import CHECKPOINTS
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.settings import read_settings
from training_runs import ATOMS

LOSES = {  # springs are good before the first update; lost at once
    "policy": "stiffness", "policy_learning_rate": 0.1, "steps": 48, "updates_per_round": 4, "averaged_policy": False,
    "assessment_starts": 4, "assessment_interval_steps": 16,
}  # fmt: skip


def assessed(*calls: int) -> Assessed:
    found: list[Any] = [
        AssessedRelaxation(torch.tensor([13]).numpy(), True, "converged", number, -1.0, film=None)  # pyright: ignore
        for number in calls
    ]
    return Assessed(found, {})


class TestKeptPolicy:
    def test_fewest_calls_on_validation_are_kept_and_ties_go_to_the_earlier(self) -> None:
        kept = KeptPolicy()
        for step, calls in ((10, 8), (20, 5), (30, 5), (40, 9)):
            kept.offer(step, assessed(calls, calls), assessed(100 + step, 200), {"w": torch.tensor([float(step)])})
        assert kept.best is not None
        assert (kept.best.step, kept.best.validation_force_calls_mean, kept.best.force_calls_mean) == (20, 5.0, 160.0)
        assert kept.best.weights["w"].tolist() == [20.0]
        assert kept.beside_best(assessed(9, 9)) == pytest.approx(9 / 5)

    def test_weights_are_copies(self) -> None:
        kept, weights = KeptPolicy(), {"w": torch.zeros(2)}
        kept.offer(1, assessed(3), assessed(3), weights)
        weights["w"] += 1
        assert kept.best is not None
        assert kept.best.weights["w"].tolist() == [0.0, 0.0]

    def test_there_and_back(self) -> None:
        kept, again, empty = KeptPolicy(), KeptPolicy(), KeptPolicy()
        kept.offer(7, assessed(3, 4), assessed(5, 9), {"a.b": torch.ones(2)})
        again.restore(kept.snapshot())
        assert again.snapshot().keys() == kept.snapshot().keys()
        assert all(torch.equal(t, kept.snapshot()[name]) for name, t in again.snapshot().items())
        again.restore(empty.snapshot())  # of a release that kept nothing
        assert again.best is None
        assert again.scalars() == {}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy gets worse."""
    out = tmp_path_factory.mktemp("lost") / "run"
    train(read_settings({**ATOMS, **LOSES}), out)
    return out


def lines(out: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if "eval/force_calls_mean" in line]


def test_result_and_log_say_which_policy_was_kept(lost: Path) -> None:
    result, assessments = json.loads((lost / "result.json").read_text()), lines(lost)
    best = min(assessments, key=lambda line: line["eval/validation_force_calls_mean"])
    assert result["kept_step"] == best["time/total_timesteps"] < result["steps"]
    assert result["kept_force_calls_mean"] == best["eval/force_calls_mean"]
    assert result["kept_validation_force_calls_mean"] < assessments[-1]["eval/validation_force_calls_mean"]
    assert assessments[-1]["eval/kept_step"] == result["kept_step"]


def test_the_kept_policy_is_packaged_with_its_own_results(lost: Path) -> None:
    stored = CHECKPOINTS.read(lost / "agent.safetensors", AGENT)
    kept, last = policy_weights(stored.part("kept")), policy_weights(stored.part("agent"))
    assert any(not torch.equal(kept[name], last[name]) for name in kept)
    bundle, result = bundle_from_run(lost, "kept"), json.loads((lost / "result.json").read_text())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in bundle.policy.weights.items())
    assert bundle.card.policy_result is not None
    assert bundle.card.policy_result.mean_force_calls == pytest.approx(result["kept_force_calls_mean"])
    assert bundle.card.policy_step == result["kept_step"]
    assert f"the policy of step {result['kept_step']}, best on validation starts" in bundle.card_text()


def test_a_checkpoint_holds_what_was_kept(lost: Path) -> None:
    stored = CHECKPOINTS.read(lost / "checkpoint.safetensors", CHECKPOINT)
    trainer = read_settings(stored.values["settings"]).trainer()
    assert isinstance(trainer, RelaxTrainer)
    trainer.restore(stored)
    assert trainer.kept.best is not None
    assert trainer.kept.best.step == json.loads((lost / "result.json").read_text())["kept_step"]


def test_validation_starts_are_others_than_those_of_the_results() -> None:
    trainer = read_settings(ATOMS).trainer()
    assert isinstance(trainer, RelaxTrainer)
    assert trainer.validation is not None
    (results,), (validation,) = trainer.assessor.starts, trainer.validation.starts
    assert len(results.structures) == len(validation.structures)
    assert not torch.equal(results.structures.counts, validation.structures.counts)
    chosen_on = read_settings({**ATOMS, "assess_on": "validation"}).trainer()
    assert isinstance(chosen_on, RelaxTrainer)
    assert chosen_on.validation is None


@pytest.mark.parametrize("agent", ["td3", "sac"])
def test_the_slow_copy_is_what_is_assessed_where_there_is_one(agent: str) -> None:
    trainer = read_settings({**ATOMS, "agent": agent}).trainer()
    online = read_settings({**ATOMS, "agent": agent, "averaged_policy": False}).trainer()
    assert isinstance(trainer, RelaxTrainer)
    assert isinstance(online, RelaxTrainer)
    expected: Any = trainer.agent.policy if agent == "sac" else trainer.agent.target_policy  # pyright: ignore
    assert trainer.acting_policy is expected
    assert online.acting_policy is online.agent.policy
