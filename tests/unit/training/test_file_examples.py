"""Fine-tuning: any policy as a beginning, any calculator and structures as the world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ase.build import bulk
from ase.io import write

from relaxion.errors import CheckpointError, RunError
from relaxion.policies import find_policy
from relaxion.train.runs.loop import read_weights, train
from relaxion.train.tasks.settings import find, settings_from_recipe

QUICK = {
    "steps": 2, "fit_updates": 2, "example_relaxations": 2, "examples_per_update": 4, "example_rounds_before": 1,
    "assessment_starts": 1, "assessment_interval_steps": 0, "log_interval_steps": 1, "example_force_calls": 30,
}  # fmt: skip


def settings(tmp_path: Path, **more):
    images = [bulk("Cu", cubic=True, a=3.6 + 0.01 * number) for number in range(8)]
    write(tmp_path / "mine.extxyz", images)
    own = dict(find_policy("metals").policy.settings["network"])
    world = {"calculator": "emt", "structures": str(tmp_path / "mine.extxyz")}
    return settings_from_recipe(find("fine-tune"), None, {**own, **world, **QUICK, **more})


def test_a_shipped_policy_goes_on_learning(tmp_path):
    result = train(settings(tmp_path), tmp_path / "run", from_weights=Path("metals"))
    assert result.steps == 2
    before, after = find_policy("metals").policy.weights, read_weights(tmp_path / "run").part("stiffness")
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed
    assert all(float((before[name] - after[name]).abs().max()) < 0.01 for name in changed)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(RunError, match=r"the settings structures"):
        train(settings(tmp_path, structures=""), tmp_path / "run")
    with pytest.raises(CheckpointError, match="no policy named 'metalls'"):
        read_weights(Path("metalls"))
