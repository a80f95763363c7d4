"""The task `metric` with live lessons: a run that can be cut anywhere, reads old files, and becomes a bundle."""

from __future__ import annotations

import json

import pytest
import torch

from relaxion.bundles import covers, uncovered
from relaxion.errors import CheckpointError, RelaxionWarning, SettingsError
from relaxion.files import Stored, digest
from relaxion.generators.starts import KINDS
from relaxion.optimize.choice import load
from relaxion.optimize.trust_rule import DEFAULT
from relaxion.training.checkpoint import DivergedError
from relaxion.training.loop import train
from relaxion.training.metric import MetricRunSettings, MetricTrainer
from relaxion.training.old_settings import upgraded
from relaxion.training.packaging import bundle_from_run
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.training.settings import RunSettings

TINY = {
    "channels": 4, "n_hidden": 4, "n_coordinates": 1, "n_radial": 4, "n_layers": 1, "lesson_updates": 4,
    "lessons_per_update": 4, "lesson_updates_per_gathering": 2, "lesson_starts": 4, "lesson_gatherings_before": 1,
    "largest_n_atoms": 4, "slab_share": 0.0, "cluster_share": 0.0, "packing_share": 0.0, "vacancy_share": 0.0,
    "lesson_tolerance_ev_per_angstrom": 1e-2, "emt_share": 1.0, "steps": 4, "assessment_starts": 1,
    "log_interval_steps": 2, "assessment_interval_steps": 0, "checkpoint_interval_steps": 1,
}  # fmt: skip
OLD = {
    "channels": 4, "n_hidden": 4, "n_coordinates": 1, "n_radial": 4, "n_layers": 1, "n_updates": 4, "n_lessons": 4,
    "updates_per_round": 2, "starts_per_round": 4, "rounds_before": 1, "largest_n_atoms": 4, "slab_share": 0.0,
    "cluster_share": 0.0, "packing_share": 0.0, "vacancy_share": 0.0, "label_tolerance_ev_per_angstrom": 1e-2,
    "emt_share": 1.0, "steps": 4, "assessment_starts": 1, "log_interval_steps": 2, "assessment_interval_steps": 0,
    "checkpoint_interval_steps": 1, "cutoff_angstrom": 4.5,
}  # fmt: skip


def tiny(**changes) -> MetricRunSettings:
    settings = RunSettings.read({"task": "metric", "examples": "live", "cutoff_angstrom": 4.5, **TINY, **changes})
    assert isinstance(settings, MetricRunSettings)
    return settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("metals") / "run"
    return out, train(tiny(), out)


def test_it_learns_and_is_written_down(finished):
    out, result = finished
    assert result.steps == 4
    assert result.force_calls_bfgs > 0
    names = {name for line in (out / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"imitation/relative_error", "imitation/finished_share", "time/force_calls"} <= names
    assert "core" in json.loads((out / "baselines.json").read_text())


def test_cut_and_resumed_it_is_the_straight_run(finished):
    _, straight = finished
    trainer = MetricTrainer(tiny())
    for end in (1, 3, 4):
        while trainer.step < end:
            trainer.advance()
        tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
        trainer = MetricTrainer(tiny())
        trainer.restore(Stored(tensors, {}))
    assert digest(trainer.weights()) == straight.weights_sha256


GUARDED = {
    "lesson_under_guard": True, "vacancy_share": 1.0, "emt_share": 0.5, "lesson_force_calls": 60, "lesson_starts": 8,
    "lessons_per_update": 8, "lesson_smallest_force_ev_per_angstrom": 0.03,
}  # fmt: skip


def test_under_the_guard_every_update_has_lessons_of_every_kind():
    examples = MetricTrainer(tiny(**GUARDED)).imitation.examples
    lessons, told = examples.draw(0)
    assert len(examples.sources) == 4  # alloys and vacancies, with EMT and with EAM
    assert lessons.number == 8
    assert told["imitation/finished_share"] > 0.5
    assert examples.force_calls >= 8
    assert set(examples.kept[0]) == {0, 1, 2, 3}


def test_of_several_tries_the_cheapest_teaches():
    once, often = (MetricTrainer(tiny(**GUARDED, lesson_tries=tries)).imitation.examples for tries in (1, 4))
    rules = [rule or DEFAULT for rule in often.rules]
    assert len({(rule.log_scale, rule.log_trust) for rule in rules}) == 4
    _, told_once = once.draw(0)
    _, told_often = often.draw(0)
    assert 3 * once.force_calls < often.force_calls < 5 * once.force_calls
    assert told_often["imitation/finished_share"] >= told_once["imitation/finished_share"]
    assert told_often["imitation/calls_to_label"] < told_once["imitation/calls_to_label"]


def test_tries_are_the_guards():
    with pytest.raises(SettingsError, match="lesson_tries 2 needs lesson_under_guard"):
        tiny(lesson_tries=2)


def test_under_the_guard_cut_and_resumed_it_is_the_straight_run():
    straight, trainer = MetricTrainer(tiny(**GUARDED)), MetricTrainer(tiny(**GUARDED))
    for _ in range(4):
        straight.advance()
    while trainer.step < 4:
        trainer.advance()
        tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
        trainer = MetricTrainer(tiny(**GUARDED))
        trainer.restore(Stored(tensors, {}))
    assert digest(trainer.weights()) == digest(straight.weights())
    assert trainer.force_calls == straight.force_calls


@pytest.mark.filterwarnings("ignore:logm result may be inaccurate:RuntimeWarning")  # by 1e-13, of ASE's filter
def test_two_runs_of_the_shipped_recipe_are_equal_to_the_bit():
    """With every kind of start and both potentials, and a small network."""
    small = {name: TINY[name] for name in ("n_coordinates", "n_radial", "n_layers")} | {"channels": 8, "n_hidden": 8}
    few = {"lesson_updates": 2, "steps": 2, "lesson_gatherings_before": 1, "lesson_starts": 20}
    few |= {"lessons_per_update": 20, "lesson_force_calls": 30, "lesson_tolerance_ev_per_angstrom": 0.05}
    few |= {"largest_n_atoms": 6, "largest_slab_n_atoms": 12, "largest_defect_n_atoms": 16}
    few |= {"largest_particle_n_atoms": 8}
    every = {f"{kind}_share": 1.0 for kind in KINDS}
    settings = settings_from_recipe(find("metals"), None, small | few | every)
    assert isinstance(settings, MetricRunSettings)
    one, two = MetricTrainer(settings), MetricTrainer(settings)
    assert one.imitation.teacher.muon is not None
    assert len(one.imitation.examples.sources) == 2 * len(KINDS)
    untaught = digest(one.weights())
    for trainer in (one, two):
        while trainer.step < 2:
            trainer.advance()
    assert digest(one.weights()) == digest(two.weights()) != untaught
    assert one.force_calls == two.force_calls


def test_it_becomes_a_bundle_that_relaxes(finished, tmp_path):
    out, result = finished
    bundle = bundle_from_run(out, "few-metals")
    assert bundle.kind == "metric"
    assert bundle.card.policy_result is not None
    assert bundle.card.policy_result.mean_force_calls == pytest.approx(result.final_force_calls_mean)
    assert [row.optimizer for row in bundle.card.results] == ["policy", "classical core", "BFGS", "FIRE"]
    assert bundle.card.environment_steps == result.training_force_calls
    assert covers(bundle, [29, 79])
    assert covers(bundle, [29] * 11 + [8])
    assert uncovered(bundle, [29, 8]) == ("O",)  # an oxide is no metal with an adsorbate
    assert uncovered(bundle, [29, 1, 6, 7]) == ("H", "C", "N")  # few of each, many together
    bundle.write(tmp_path / "few.safetensors")
    assert load(tmp_path / "few.safetensors").rule is None


def test_a_trust_rule_of_its_own_travels_in_the_bundle(finished, tmp_path):
    out, _ = finished
    text = (out / "settings.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text + "secant_weight = 0.4\n")
    train(settings_from_recipe(tmp_path / "recipe.toml", None, {"steps": 1, "n_secants": 3}), tmp_path / "run")
    bundle_from_run(tmp_path / "run", "own").write(tmp_path / "own.safetensors")
    control = load(tmp_path / "own.safetensors").rule
    assert control is not None
    assert (control.secant_weight, control.n_secants) == (0.4, 3)


class TestOldNames:
    """Recipes, run folders and checkpoints of the release before."""

    def test_they_say_the_same(self):
        assert RunSettings.read(OLD | {"task": "metals"}) == tiny()
        with pytest.warns(RelaxionWarning, match=r"not by the next: .*n_lessons \(now lessons_per_update\), n_updates"):
            read, asked = settings_from_recipe(find("metals"), None, OLD).flat(), tiny().flat()
        assert {name: read[name] for name in TINY} == {name: asked[name] for name in TINY}

    def test_a_universal_recipe_says_the_same(self):
        names = {"n_updates": 9, "n_lessons": 3, "learning_rate": 1e-3, "end_tolerance_ev_per_angstrom": 1e-2}
        read = RunSettings.read({"task": "universal", "store": "s", "batch_size": 8, "warmup_steps": 9, **names})
        assert read == RunSettings.read(read.flat())
        flat = read.flat()
        assert flat["task"] == "metric"
        assert (flat["examples"], flat["secant_weight"], flat["lesson_smallest_force_ev_per_angstrom"]) == (
            "store", 0.6, 0.03,
        )  # fmt: skip
        assert (flat["lesson_updates"], flat["lessons_per_update"], flat["lesson_learning_rate"]) == (9, 3, 1e-3)

    def test_the_command_line_still_overrules_the_recipe(self):
        with (
            pytest.warns(RelaxionWarning, match="widths: not used by the task metric"),
            pytest.warns(RelaxionWarning, match=r"deprecated, .*: n_updates \(now lesson_updates\)"),
        ):
            read = settings_from_recipe(find("metals"), None, {"n_updates": 7, "widths": [8]})
        assert read.flat()["lesson_updates"] == 7

    def test_a_run_that_would_train_a_gate_is_refused(self):
        with pytest.raises(SettingsError, match="take `steps=4` for the metric alone"):
            RunSettings.read(OLD | {"task": "metals", "steps": 28})
        trainer = MetricTrainer(tiny())
        snapshot = trainer.snapshot() | {"gate.agent.n_updates": torch.tensor(3)}
        with pytest.raises(CheckpointError, match="was training a gate"):
            trainer.restore(Stored(snapshot, {}))

    def test_other_tasks_keep_their_names(self):
        assert upgraded({"task": "relax", "max_force_calls": 9}) == {"task": "relax", "max_force_calls": 9}

    def test_a_checkpoint_of_a_store_that_counted_updates_alone(self):
        trainer = MetricTrainer(tiny())
        trainer.advance()
        snapshot = trainer.snapshot()
        snapshot["imitation.counters"] = snapshot["imitation.counters"][:1]
        trainer.restore(Stored(snapshot, {}))
        assert trainer.step == 1


def test_a_metric_that_is_no_longer_a_number_is_not_kept():
    trainer = MetricTrainer(tiny())
    with torch.no_grad():
        trainer.policy.network.to_arms.weight[0, 0, 0] = torch.nan
    with pytest.raises(DivergedError, match="to_arms"):
        trainer.snapshot()


def test_settings_survive_their_own_file():
    settings = tiny()
    assert RunSettings.read(settings.flat()) == settings


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(SettingsError, match="all shares"):
        tiny(alloy_share=0.0)
    with pytest.raises(SettingsError, match="above largest_n_atoms"):
        tiny(smallest_n_atoms=6)
