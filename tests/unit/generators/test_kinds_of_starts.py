"""Kinds of starts: reproducible, made by seed, kind and number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relaxion.errors import SettingsError
from relaxion.train.data.kinds import CollectSettings, make_start
from relaxion.train.tasks.settings import find, read_toml

RECIPE = {
    "seed": 3,
    "kinds": {
        "alloy": {"make": "metal", "engine": "emt", "share": 12, "free_cell_share": 0.4},
        "other": {"make": "metal", "engine": "eam", "share": 6, "largest_n_atoms": 8},
    },
}


def settings(**given: object) -> CollectSettings:
    return CollectSettings.of(RECIPE, given)


def test_a_start_depends_on_seed_kind_and_number_only() -> None:
    first, again = make_start(settings(), "alloy", 5), make_start(settings(share=400), "alloy", 5)
    assert first.key == again.key
    assert torch.equal(first.structure().positions, again.structure().positions)
    assert make_start(settings(seed=4), "alloy", 5).key != first.key
    assert settings().key("alloy", 6) != first.key
    assert settings(largest_strain=0.02).key("alloy", 5) != first.key


def test_settings_reach_one_kind_or_all() -> None:
    found = settings(**{"other.share": 9, "max_force_calls": 7})
    assert (found.kinds["other"].share, found.kinds["alloy"].share) == (9, 12)
    assert {kind.max_force_calls for kind in found.kinds.values()} == {7}
    with pytest.raises(SettingsError, match="no kind 'allo' in this recipe: did you mean 'alloy'"):
        settings(**{"allo.share": 9})
    with pytest.raises(SettingsError, match="unknown setting 'max_force_call': did you mean 'max_force_calls'"):
        settings(max_force_call=9)
    with pytest.raises(SettingsError, match="seed"):
        settings(seed=9000)  # belongs to benchmarks
    with pytest.raises(SettingsError, match="unknown maker 'metl': did you mean 'metal'"):
        settings(make="metl")
    with pytest.raises(SettingsError, match="section for each kind"):
        CollectSettings.of({"seed": 1}, {})


def test_the_shipped_recipe_is_read_and_makes_every_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no files of ../shared here
    found = CollectSettings.of(read_toml(find("universal-data")), {})
    assert found.side == "training"
    for kind, own in found.kinds.items():
        if own.make != "file":
            start = make_start(found, kind, 0)
            assert own.smallest_n_atoms <= len(start.atoms) <= own.largest_n_atoms + 6  # adsorbates
            assert torch.isfinite(start.structure().positions).all()
