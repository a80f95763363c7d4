"""The task `stiffness` with live examples: a run that can be cut anywhere, and becomes a bundle."""

from __future__ import annotations

import json

import pytest
import torch

from relaxion.errors import SettingsError
from relaxion.files import Stored, digest
from relaxion.model.policy_file import uncovered
from relaxion.optimizer.choice import load
from relaxion.train.data.starts import KINDS
from relaxion.train.runs.loop import train
from relaxion.train.runs.packaging import bundle_from_run
from relaxion.train.supervised.dataset import LiveExamples
from relaxion.train.tasks.progress import DivergedError
from relaxion.train.tasks.settings import find, read_settings, settings_from_recipe
from relaxion.train.tasks.stiffness import StiffnessRunSettings, StiffnessTrainer

TINY = {
    "channels": 4, "n_hidden": 4, "n_coordinates": 1, "n_radial": 4, "n_layers": 1, "fit_updates": 4,
    "examples_per_update": 4, "example_interval_updates": 2, "example_relaxations": 4, "example_rounds_before": 1,
    "largest_n_atoms": 4, "metal_starts": "alloy",
    "example_tolerance_ev_per_angstrom": 1e-2, "emt_share": 1.0, "steps": 4, "assessment_starts": 1,
    "log_interval_steps": 2, "assessment_interval_steps": 0, "checkpoint_interval_steps": 1,
}  # fmt: skip


def tiny(**changes) -> StiffnessRunSettings:
    settings = read_settings({"task": "stiffness", "examples": "live", "cutoff_angstrom": 4.5, **TINY, **changes})
    assert isinstance(settings, StiffnessRunSettings)
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
    assert {"fit/relative_error", "fit/finished_share", "time/force_calls"} <= names
    assert "core" in json.loads((out / "baselines.json").read_text())


def test_cut_and_resumed_it_is_the_straight_run(finished):
    _, straight = finished
    trainer = StiffnessTrainer(tiny())
    for end in (1, 3, 4):
        while trainer.step < end:
            trainer.advance()
        tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
        trainer = StiffnessTrainer(tiny())
        trainer.restore(Stored(tensors, {}))
    assert digest(trainer.weights()) == straight.weights_sha256


SEVERAL = {
    "metal_starts": "alloy+vacancy", "emt_share": 0.5, "example_force_calls": 60, "example_relaxations": 8,
    "examples_per_update": 8,
}  # fmt: skip


def test_every_update_has_examples_of_every_kind():
    dataset = StiffnessTrainer(tiny(**SEVERAL)).fit.dataset
    assert isinstance(dataset, LiveExamples)
    examples, scalars = dataset.draw(0)
    assert len(dataset.sources) == 4  # alloys and vacancies, with EMT and with EAM
    assert examples.number == 8
    assert scalars["fit/finished_share"] > 0.5
    assert dataset.force_calls >= 8
    assert set(dataset.rounds[0]) == {0, 1, 2, 3}


def test_of_several_kinds_cut_and_resumed_it_is_the_straight_run():
    straight, trainer = StiffnessTrainer(tiny(**SEVERAL)), StiffnessTrainer(tiny(**SEVERAL))
    for _ in range(4):
        straight.advance()
    while trainer.step < 4:
        trainer.advance()
        tensors = {name: tensor.clone() for name, tensor in trainer.snapshot().items()}
        trainer = StiffnessTrainer(tiny(**SEVERAL))
        trainer.restore(Stored(tensors, {}))
    assert digest(trainer.weights()) == digest(straight.weights())
    assert trainer.force_calls == straight.force_calls


@pytest.mark.filterwarnings("ignore:logm result may be inaccurate:RuntimeWarning")  # by 1e-13, of ASE's filter
def test_two_runs_of_the_shipped_recipe_are_equal_to_the_bit():
    """With every kind of start and both potentials, and a small network."""
    small = {name: TINY[name] for name in ("n_coordinates", "n_radial", "n_layers")} | {"channels": 8, "n_hidden": 8}
    few = {"fit_updates": 2, "steps": 2, "example_rounds_before": 1, "example_relaxations": 20}
    few |= {"examples_per_update": 20, "example_force_calls": 30, "example_tolerance_ev_per_angstrom": 0.05}
    few |= {"largest_n_atoms": 6, "largest_slab_n_atoms": 12}
    few["metal_starts"] = "+".join(KINDS)
    settings = settings_from_recipe(find("metals"), None, small | few)
    assert isinstance(settings, StiffnessRunSettings)
    one, two = StiffnessTrainer(settings), StiffnessTrainer(settings)
    assert one.fit.muon is not None
    assert len(one.fit.dataset.sources) == 2 * len(KINDS)
    untaught = digest(one.weights())
    for trainer in (one, two):
        while trainer.step < 2:
            trainer.advance()
    assert digest(one.weights()) == digest(two.weights()) != untaught
    assert one.force_calls == two.force_calls


def test_it_becomes_a_bundle_that_relaxes(finished, tmp_path):
    out, result = finished
    bundle = bundle_from_run(out, "few-metals")
    assert bundle.kind == "stiffness"
    assert bundle.card.policy_result is not None
    assert bundle.card.policy_result.mean_force_calls == pytest.approx(result.final_force_calls_mean)
    assert [row.optimizer for row in bundle.card.results] == ["policy", "classical core", "BFGS", "FIRE"]
    assert bundle.card.environment_steps == result.training_force_calls
    assert not uncovered(bundle, [29, 79])
    assert not uncovered(bundle, [29] * 11 + [8])
    assert uncovered(bundle, [29] * 11 + [8], adsorbates=False) == ("O",)
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


def test_a_stiffness_that_is_no_longer_a_number_is_not_kept():
    trainer = StiffnessTrainer(tiny())
    with torch.no_grad():
        trainer.policy.network.to_arms.weight[0, 0, 0] = torch.nan
    with pytest.raises(DivergedError, match="to_arms"):
        trainer.snapshot()


def test_settings_survive_their_own_file():
    settings = tiny()
    assert read_settings(settings.flat()) == settings
    assert tiny(fit_updates=0, steps=7).fit.fit_updates == 7, "the rate falls over all steps"


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(SettingsError, match="no kind with a share"):
        tiny(metal_starts="alloy:0")
    with pytest.raises(SettingsError, match="did you mean 'alloy'"):
        tiny(metal_starts="aloy:1")
