"""The recipe of the tutorial `train-a-crystal`: TD3, e3nn, from nothing, with nothing to download."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaxion.train.runs.loop import train
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.settings import find, settings_from_recipe

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_what_the_page_says() -> None:
    settings = settings_from_recipe(find("alfe-quick"), None, {})
    assert isinstance(settings, RelaxRunSettings)
    assert (settings.agent_name, settings.networks.backbone, settings.atoms.expert_share) == ("td3", "tensor_field", 0)
    assert (settings.atoms.potential, settings.atoms.structures) == ("eam", "b2:AlFe")
    assert settings.training.steps <= 3_000  # processor time: docs/tutorials/train-a-crystal.md


def test_it_learns_and_keeps_a_policy(tmp_path: Path) -> None:
    pytest.importorskip("e3nn")
    small = {"steps": 64, "warmup_steps": 32, "assessment_starts": 2, "assessment_interval_steps": 32, "channels": 4}
    result = train(settings_from_recipe(find("alfe-quick"), None, small), tmp_path / "run")
    assert result.steps >= 64
    assert result.kept_step is not None  # pyright: ignore


def test_readme_and_start_page_lead_there() -> None:
    """By the words of somebody who only knows TD3, crystals and e3nn."""
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if "relaxion train alfe-quick" in line]
    assert all(word in line for word in ("TD3", "e3nn", "crystal"))
    assert "tutorials/train-a-crystal.md" in (ROOT / "docs" / "index.md").read_text()
