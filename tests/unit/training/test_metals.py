"""The task `metals`: metric, then gate, in one run that can be cut anywhere, and becomes a bundle."""

from __future__ import annotations

import json

import pytest
import torch
from relaxion.training.metals_trainer import MetalsTrainer

from relaxion.bundles import covers, uncovered
from relaxion.errors import SettingsError
from relaxion.files import Stored, digest
from relaxion.optimize.choice import load
from relaxion.optimize.gate import N_KNOBS
from relaxion.optimize.guard import OBSERVATION
from relaxion.training.checkpoint import DivergedError
from relaxion.training.loop import train
from relaxion.training.metric import MetalsRunSettings
from relaxion.training.packaging import bundle_from_run
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.training.settings import RunSettings

TINY = {
    "channels": 4, "n_hidden": 4, "n_coordinates": 1, "n_radial": 4, "n_layers": 1,
    "n_updates": 4, "n_lessons": 4, "updates_per_round": 2, "starts_per_round": 4, "rounds_before": 1,
    "largest_n_atoms": 4, "slab_share": 0.0, "cluster_share": 0.0, "packing_share": 0.0, "gate_cluster_share": 0.0,
    "gate_packing_share": 0.0, "vacancy_share": 0.0, "label_tolerance_ev_per_angstrom": 1e-2, "emt_share": 1.0,
    "steps": 28, "n_environments": 2, "warmup_steps": 8, "batch_size": 8, "widths": [8], "assessment_starts": 1,
    "log_interval_steps": 4, "assessment_interval_steps": 0, "checkpoint_interval_steps": 1,
}  # fmt: skip


def tiny(**changes) -> RunSettings:
    return settings_from_recipe(find("metals"), None, TINY | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("metals") / "run"
    return out, train(tiny(), out)


def test_both_stages_learn_and_are_written_down(finished):
    out, result = finished
    assert result.steps == 28
    assert result.force_calls_bfgs > 0
    names = {name for line in (out / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"imitation/relative_error", "train/critic_loss", "time/force_calls"} <= names
    assert "core" in json.loads((out / "baselines.json").read_text())


def test_cut_in_both_stages_and_resumed_it_is_the_straight_run(finished):
    _, straight = finished
    trainer = MetalsTrainer(tiny())
    for end in (2, 10, 28):  # through snapshots: a new trainer takes over in the metric's stage and in the gate's
        while trainer.step < end:
            trainer.advance()
        tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
        trainer.close()
        trainer = MetalsTrainer(tiny())
        trainer.restore(Stored(tensors, {}))
    assert digest(trainer.weights()) == straight.weights_sha256
    trainer.close()


def test_it_becomes_a_bundle_that_relaxes(finished, tmp_path):
    out, result = finished
    bundle = bundle_from_run(out, "few-metals")
    assert bundle.kind == "metric + gate"
    assert bundle.card.policy_result is not None
    assert bundle.card.policy_result.mean_force_calls == pytest.approx(result.final_force_calls_mean)
    assert covers(bundle, [29, 79])
    assert covers(bundle, [29] * 11 + [8])
    assert uncovered(bundle, [29, 8]) == ("O",)  # an oxide is no metal with an adsorbate
    assert uncovered(bundle, [29, 1, 6, 7]) == ("H", "C", "N")  # few of each, many together
    bundle.write(tmp_path / "few.safetensors")
    loaded = load(tmp_path / "few.safetensors")
    assert loaded.gate is not None


def test_every_agent_can_turn_the_knobs():
    for agent in ("td3", "sac", "ddpg", "d4pg"):
        settings = settings_from_recipe(find("metals"), agent, TINY)
        assert isinstance(settings, MetalsRunSettings)
        trainer = MetalsTrainer(settings)
        trainer.imitation.counters[0] = settings.imitation.n_updates
        seen = torch.randn(5, len(OBSERVATION))
        assert not trainer.gate_trainer.agent.policy(seen).detach().any(), "it begins at the hand-made rule"
        penalty = trainer.gate_trainer.agent.policy_penalty
        assert penalty(None, torch.full((2, N_KNOBS), 0.5)).tolist() == pytest.approx([0.5 * N_KNOBS * 0.25] * 2)
        for _ in range(6):
            trainer.advance()
        assert trainer.gate() is not None
        assert all(torch.isfinite(t).all() for t in trainer.weights().values() if t.is_floating_point())
        trainer.close()


def test_a_metric_that_is_no_longer_a_number_is_not_kept():
    trainer = MetalsTrainer(tiny())
    with torch.no_grad():
        trainer.policy.network.to_arms.weight[0, 0, 0] = torch.nan
    with pytest.raises(DivergedError, match="to_arms"):
        trainer.snapshot()


def test_settings_survive_their_own_file():
    settings = tiny()
    assert RunSettings.read(settings.flat()) == settings


def test_normalised_observations_are_refused():
    with pytest.raises(SettingsError, match="normalise_observations = false"):
        tiny(normalise_observations=True)


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(SettingsError, match="all shares"):
        tiny(alloy_share=0.0)
    with pytest.raises(SettingsError, match="above largest_n_atoms"):
        tiny(smallest_n_atoms=6)
