"""Run folders of release 0.1, stopped half way, are read, and go on.

`metals` (task metals, settings under their old names) and `relax-metric` (lessons of an agent's metric policy) were
written by `relaxion train … --steps 4` of that release. Resumed here they gave the weights of its straight runs, bit
for bit; that depends on the processor, so here it is only asked that they go on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from relaxion.training import checkpoint
from relaxion.training.loop import train
from relaxion.training.recipe import settings_from_recipe
from relaxion.training.run_folder import AGENT

OLD = Path(__file__).parent / "checkpoints"


@pytest.mark.filterwarnings("ignore:a replay of 64 transitions")
@pytest.mark.parametrize(("name", "part", "steps"), [("metals", "metric", 6), ("relax-metric", "agent", 12)])
def test_an_old_run_goes_on(name: str, part: str, steps: int, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(OLD / name, folder)
    before = checkpoint.read(folder / "checkpoint.safetensors", "relaxion checkpoint").part(part)
    settings = settings_from_recipe(folder / "settings.toml", None, {"steps": steps})
    result = train(settings, folder, resume=True)
    assert result.steps >= steps
    after = checkpoint.read(folder / "agent.safetensors", AGENT).part(part)
    assert before.keys() >= after.keys()
    changed = [key for key, tensor in after.items() if not torch.equal(tensor, before[key])]
    assert any(key.split(".")[-1] == "weight" for key in changed)
    assert all(torch.isfinite(tensor).all() for tensor in after.values() if tensor.is_floating_point())
