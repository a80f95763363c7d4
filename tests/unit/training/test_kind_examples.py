"""Examples from fresh starts of a collection's kinds: shares, volumes, costs, the card, a resume to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relaxion.errors import RelaxionWarning, RunError
from relaxion.files import digest
from relaxion.train.runs.loop import read_weights, train
from relaxion.train.runs.packaging import bundle_from_run
from relaxion.train.supervised.dataset import LiveExamples
from relaxion.train.supervised.sources import KindStarts
from relaxion.train.tasks.settings import read_settings
from relaxion.train.tasks.stiffness import StiffnessRunSettings

KINDS = """
seed = 5
[kinds.alloy]
make = "metal"
engine = "emt"
share = 3.0
largest_n_atoms = 6
free_cell_share = 0.5
[kinds.copper]
make = "element"
element = "Cu"
engine = "emt"
largest_n_atoms = 4
sizing_force_calls = 4
[kinds.nobody]
make = "metal"
engine = "chgnet"
share = 0.0
"""
NOWHERE = """
[kinds.nowhere]
make = "file"
engine = "emt"
files = ["no-such-file.xyz"]
"""
QUICK = {
    "task": "stiffness", "examples": "kinds", "steps": 4, "fit_updates": 4, "example_relaxations": 8,
    "assessment_starts": 1,
    "example_rounds_before": 1, "example_interval_updates": 2, "examples_per_update": 8, "channels": 8,
    "n_hidden": 8, "n_layers": 1, "cutoff_angstrom": 4.0, "secant_weight": 0.6,
}  # fmt: skip


def settings(folder: Path, kinds: str = KINDS, **given: object) -> StiffnessRunSettings:
    (folder / "kinds.toml").write_text(kinds)
    read = read_settings(QUICK | {"kinds_of": str(folder / "kinds.toml")} | given)
    assert isinstance(read, StiffnessRunSettings)
    return read


def test_each_update_has_its_share_of_every_kind_at_hand(tmp_path):
    examples = settings(tmp_path).trainer().fit.dataset
    assert isinstance(examples, LiveExamples)
    alloy, copper = (source.starts for source in examples.sources)
    assert isinstance(alloy, KindStarts)
    assert isinstance(copper, KindStarts)
    assert (alloy.kind, copper.kind) == ("alloy", "copper")
    assert examples.shares == [0.75, 0.25]
    drawn, told = examples.draw(0)
    assert drawn.number == 8
    assert 0 < told["fit/finished_share"] <= 1
    sized = examples.force_calls / 8 - told["fit/calls_per_relaxation"]
    assert sized > 0, "calls for the volume of copper are counted too"


def test_kinds_whose_files_are_missing_are_named(tmp_path):
    with pytest.warns(RelaxionWarning, match=r"files of nowhere are not here, 20% of the starts of .*kinds\.toml"):
        examples = settings(tmp_path, KINDS + NOWHERE).trainer().fit.dataset
    assert isinstance(examples, LiveExamples)
    assert examples.shares == [0.75, 0.25]


def test_starts_come_at_the_volume_of_their_engine_and_never_twice(tmp_path):
    plan = settings(tmp_path).data
    copper = plan.starts_of("copper")  # pyright: ignore[reportAttributeAccessIssue]
    one, other = (copper.sample(torch.Generator().manual_seed(seed), 6) for seed in (1, 2))
    again = copper.sample(torch.Generator().manual_seed(1), 6)
    assert torch.equal(one.positions, again.positions)
    assert one.positions.shape != other.positions.shape or not torch.equal(one.positions, other.positions)
    stresses = copper.potential(one, stresses=True).stresses
    pressures = stresses.diagonal(dim1=1, dim2=2).mean(dim=1).abs()
    assert float(pressures.median()) < 0.05, "eV/Å³; rattled, but near no pressure"


def test_a_stopped_run_goes_on_to_the_bit(tmp_path):
    whole = train(settings(tmp_path), tmp_path / "whole")
    train(settings(tmp_path, steps=2), tmp_path / "parts")
    train(settings(tmp_path), tmp_path / "parts", resume=True)
    weights = [digest(read_weights(tmp_path / name).tensors) for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    bundle = bundle_from_run(tmp_path / "whole", "mine")
    assert bundle.card.potential == "emt"
    assert bundle.card.starts == ("alloy 3 (emt)", "copper 1 (emt)")
    assert "Cu" in bundle.card.elements
    assert bundle.card.periodic is True
    assert whole.training_force_calls > 0


def test_nothing_at_hand_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="none of the kinds"):
        train(
            settings(
                tmp_path,
                (KINDS + NOWHERE).replace("3.0", "0.0").replace('make = "element"', 'make = "element"\nshare = 0.0'),
            ),
            tmp_path / "run",
        )
