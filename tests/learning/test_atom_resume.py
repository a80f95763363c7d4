"""On structures too: killed at any moment and resumed, a run is the run that never stopped, to the bit (R10.1)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from test_resume import AGENTS, fork_and_kill, records, start_and_kill

from relaxion.train.runs.loop import train
from relaxion.train.tasks.relax_settings import RelaxRunSettings

SMALL = {
    "task": "relax",
    "potential": "emt",
    "structures": "alloys:Al-Cu-Ni:2-4",
    "n_pooled": 40,
    "perturbation": "rattle:0.1",
    "steps": 160,
    "seed": 3,
    "n_structures": 4,
    "max_force_calls": 12,
    "channels": 4,
    "n_layers": 1,
    "cutoff_angstrom": 3.5,
    "environment_information": ["log_largest_force", "log_calls"],
    "batch_size": 6,
    "warmup_steps": 20,
    "replay_capacity": 100,  # the ring is full before the end
    "updates_per_round": 2,
    "n_steps": 2,
    "expert_share": 0.5,
    "expert_steps": 100,
    "imitation_weight": 0.3,
    "log_interval_steps": 8,
    "assessment_interval_steps": 60,
    "assessment_starts": 3,
    "checkpoint_interval_steps": 24,
    "alarm_memory_steps": 40,
}


def settings_for(agent: str, **changes: object) -> RelaxRunSettings:
    noisy = {"exploration_noise_final": 0.05, "exploration_noise_steps": 100} if agent != "sac" else {}
    support = {"lowest_value": -4.0, "highest_value": 4.0, "n_bins": 11} if agent == "d4pg" else {}
    return RelaxRunSettings.read({**SMALL, **noisy, **support, "agent": agent, **changes})


def check_kills(agent: str, folder: Path, n_kills: int, steps: int = 160, forked: bool = False) -> None:
    settings = settings_for(agent, steps=steps)
    straight = train(settings, folder / "straight")
    killed, recipe = folder / "killed", folder / "recipe.toml"
    recipe.write_text(settings.as_toml())
    chance = random.Random(time.time_ns())
    n_lines = len(records(folder / "straight"))
    for at_line in sorted(chance.sample(range(1, n_lines - 5), n_kills)):
        if forked:
            fork_and_kill(settings, killed, at_line, chance)
        else:
            start_and_kill(recipe, killed, at_line, chance)
    resumed = train(settings, killed, resume=True)
    assert resumed.weights_sha256 == straight.weights_sha256
    assert resumed.final_return_mean == straight.final_return_mean
    assert resumed.episodes == straight.episodes > 0
    assert records(killed) == records(folder / "straight")
    names = ("settings.toml", "baselines.json", "alarms.jsonl")
    told = [[_text(out / name) for name in names] for out in (killed, folder / "straight")]
    assert told[0] == told[1]


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("agent", AGENTS)
def test_one_kill(agent: str, tmp_path: Path) -> None:
    check_kills(agent, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_many_kills(agent: str, tmp_path: Path) -> None:
    check_kills(agent, tmp_path, 20, steps=400, forked=True)


def test_the_same_seed_twice_and_another(tmp_path: Path) -> None:
    first, again, other = (train(settings_for("td3", seed=s), tmp_path / n) for s, n in ((3, "a"), (3, "b"), (4, "c")))
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_more_assessments_change_nothing(tmp_path: Path) -> None:
    often = train(settings_for("sac", assessment_interval_steps=8), tmp_path / "often")
    never = train(settings_for("sac", assessment_interval_steps=0), tmp_path / "never")
    assert often.weights_sha256 == never.weights_sha256
    assert often.final_return_mean == never.final_return_mean
    assert often.training_force_calls == never.training_force_calls
