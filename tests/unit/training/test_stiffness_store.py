"""A stiffness that learns from a store: what becomes an example, that it learns, a resume to the bit, its bundle."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from relaxion.database import RelaxationDatabase
from relaxion.errors import FileError, RunError
from relaxion.files import Stored, digest
from relaxion.model.policy_file import PolicyFile
from relaxion.structures import Outcome
from relaxion.train.collecting.collect import collect
from relaxion.train.collecting.starts import CollectSettings
from relaxion.train.experience.reward import largest_force
from relaxion.train.runs.loop import train
from relaxion.train.runs.packaging import bundle_from_run
from relaxion.train.runs.recipe import read_settings
from relaxion.train.supervised.dataset import grouped_examples, mean_error
from relaxion.train.supervised.examples import examples_of_minimised, is_validation
from relaxion.train.supervised.sources import StoreSettings, split_store, stored_calls
from relaxion.train.tasks.settings import RunSettings
from relaxion.train.tasks.stiffness import StiffnessTrainer

RECIPE = {
    "seed": 5,
    "kinds": {
        "alloy": {"make": "metal", "engine": "emt", "number": 44, "largest_n_atoms": 8, "free_cell_share": 0.4},
    },
}
SMALL = {"channels": 8, "n_hidden": 8, "n_layers": 1, "cutoff_angstrom": 4.0, "examples_per_update": 16}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "alloys"
    collect(CollectSettings.of(RECIPE, {}), path)
    return path


def settings(store: Path | str, **given: object) -> RunSettings:
    table = {
        "task": "stiffness",
        "examples": "store",
        "store": str(store),
        "steps": 30,
        "fit_updates": 30,
        "assessment_starts": 3,
    }
    return read_settings(table | SMALL | given)


def test_every_state_is_taught_the_way_to_the_end_of_its_own_relaxation(store: Path) -> None:
    trajectory = next(t for t in RelaxationDatabase.open(store) if t.outcome == Outcome.CONVERGED and not t.cell_free)
    examples = examples_of_minimised(trajectory)
    assert examples is not None
    ends = examples.state.structures.moved(examples.goal).positions.reshape(examples.number, -1, 3)
    apart = ends - trajectory.positions[-1]
    drift = apart.mean(dim=1, keepdim=True)  # a shift of all atoms costs nothing
    assert torch.allclose(apart - drift, torch.zeros_like(apart), atol=1e-12)
    assert bool((largest_force(trajectory.structures, trajectory.evaluation)[: examples.number] > 0.03).all())


def test_relaxations_without_an_end_teach_nothing(store: Path) -> None:
    whole = next(t for t in RelaxationDatabase.open(store) if len(t) > 4)
    names = ("cells", "positions", "energies", "forces", "stresses")
    cut = replace(whole, outcome=int(Outcome.STEP_LIMIT), **{name: getattr(whole, name)[:2] for name in names})
    assert examples_of_minimised(cut) is None
    assert stored_calls(cut) == 200


def test_the_two_sides_of_a_store_never_mix(store: Path) -> None:
    training, validation = split_store(StoreSettings(store=str(store)))
    assert training
    assert validation
    assert not {t.key for t in training} & {t.key for t in validation}
    assert all(is_validation(t.key, 20, digits=64) for t in validation)


def test_it_learns(store: Path) -> None:
    trainer = StiffnessTrainer(settings(store, steps=120, fit_updates=120))  # pyright: ignore[reportArgumentType]
    _, validation = split_store(StoreSettings(store=str(store)))
    unseen = grouped_examples(validation)["crystals"].examples
    before = mean_error(trainer.policy.network, unseen)
    for _ in range(120):
        trainer.advance()
    assert mean_error(trainer.policy.network, unseen) < 0.8 * before


def test_it_goes_on_to_the_bit(store: Path) -> None:
    straight = StiffnessTrainer(settings(store))  # pyright: ignore[reportArgumentType]
    for _ in range(4):
        straight.advance()
    kept = Stored(straight.snapshot(), {})
    resumed = StiffnessTrainer(settings(store))  # pyright: ignore[reportArgumentType]
    resumed.restore(kept)
    for trainer in (straight, resumed):
        for _ in range(4):
            trainer.advance()
    assert digest(straight.weights()) == digest(resumed.weights())


def test_a_run_becomes_a_bundle_with_the_elements_it_has_seen(store: Path, tmp_path: Path) -> None:
    result = train(settings(store, steps=10, fit_updates=10), tmp_path / "run")
    assert result.steps == 10
    bundle = bundle_from_run(tmp_path / "run", "mine")
    file = tmp_path / "mine.safetensors"
    bundle.write(file)
    card = PolicyFile.read(file).card
    training, _ = split_store(StoreSettings(store=str(store)))
    assert len(card.elements) == len({int(z) for t in training for z in t.numbers})
    assert card.policy_result is not None
    assert card.policy_result.success_rate == 1.0
    assert "--from-weights" not in card.training_command
    train(settings(store, steps=2, fit_updates=2), tmp_path / "second", from_weights=tmp_path / "run")
    assert f"--from-weights {tmp_path / 'run'}" in bundle_from_run(tmp_path / "second", "mine").card.training_command


def test_no_store_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="relaxion collect"):
        train(settings(""), tmp_path / "run")
    with pytest.raises(FileError, match="nothing does not exist"):
        train(settings(tmp_path / "nothing"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_store_of_another_version_is_refused(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in RelaxationDatabase.open(store).files():
        # not a copy of the file: what a writer has not yet moved there lies beside it
        with sqlite3.connect(file) as original, sqlite3.connect(other / file.name) as database:
            original.backup(database)
            database.execute("UPDATE description SET value = '7' WHERE name = 'format_version'")
    with pytest.raises(FileError, match="format version 7"):
        train(settings(other), tmp_path / "run")
