"""`relax-many --learn`: rounds in the order of the input, weights for later ones, the same results after a stop."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from ase.io import write
from inline_workers import InlineWorkers, alloy

from relaxion.apps.relax_many.learning import Learner, read_fit
from relaxion.apps.relax_many.results import ResultFolder, make_summary
from relaxion.apps.relax_many.run import ManyRun, RelaxWorker
from relaxion.apps.relax_many.settings import ManySettings
from relaxion.train.supervised.fine_tune import FineTune
from relaxion.train.supervised.fit import FitSettings

QUICK = partial(
    FineTune,
    settings=FitSettings(fit_updates=2, examples_per_update=4, fit_learning_rate=2e-3),
    validation_one_in=2,
    least_validation=2,
)


@pytest.fixture
def row(tmp_path: Path) -> Path:
    write(tmp_path / "row.extxyz", [alloy(seed) for seed in range(10)])
    return tmp_path / "row.extxyz"


def relax(row: Path, out: Path, stop=lambda: False, every: int = 3) -> Learner:
    many = ManySettings(policy="metals", fmax_ev_per_angstrom=0.02, learn_every=every)
    worker = partial(RelaxWorker, many, database=str(out / "memory"))
    with ResultFolder(out, many, [row]) as folder, InlineWorkers(worker) as workers:
        learner = Learner(out, out / "memory", every, {"metals": "metals"}, QUICK)
        ManyRun(folder, workers, many, [row], chunk_size=1, stop=stop, learner=learner).run()
    return learner


def table(out: Path) -> list[tuple[str, ...]]:
    make_summary(out)
    with (out / "summary.csv").open() as file:
        return [(line["key"], line["force_calls"], line["energy_ev"]) for line in csv.DictReader(file)]


def test_policies_are_fitted_to_rounds_and_later_ones_relax_with_it(row, tmp_path):
    learner = relax(row, tmp_path / "out")
    fits = sorted((tmp_path / "out" / "learned").iterdir())
    assert [file.name for file in fits] == [f"0000{number}-metals.safetensors" for number in range(3)]
    assert learner.weights(0) == learner.weights(1) == {}
    assert learner.weights(3) == {"metals": str(fits[1])}
    told = read_fit(fits[2]).values
    assert (told["policy"], told["round"], told["n_relaxations"]) == ("metals", 2, 9)


def test_stopped_and_resumed_it_gives_the_same_as_straight(row, tmp_path):
    relax(row, tmp_path / "straight")
    for steps in (7, 25):
        asked = iter(range(10**6))
        relax(row, tmp_path / "resumed", stop=lambda asked=asked, steps=steps: next(asked) >= steps)
    relax(row, tmp_path / "resumed")
    assert table(tmp_path / "straight") == table(tmp_path / "resumed")
    last = "learned/00002-metals.safetensors"
    straight, resumed = (read_fit(tmp_path / name / last).tensors for name in ("straight", "resumed"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


def test_a_damaged_fit_is_made_again(row, tmp_path, caplog):
    relax(row, tmp_path / "out", stop=iter([False] * 40 + [True] * 100).__next__)
    (tmp_path / "out" / "learned" / "00000-metals.safetensors").write_bytes(b"half")
    relax(row, tmp_path / "out")
    assert "is fitted again" in caplog.text
    assert len(table(tmp_path / "out")) == 10


def test_folders_without_learning_are_what_they_were():
    assert "learn_every" not in ManySettings().model_dump()
    assert ManySettings(learn_every=5).model_dump()["learn_every"] == 5
    assert ManySettings(learn_every=5).context != ManySettings().context


def test_settings_that_are_younger_than_folders_leave_their_keys_as_they_were():
    assert ManySettings().context.hex().startswith("d8d2ed07b5672100")
    assert ManySettings(model="emt").context != ManySettings().context
