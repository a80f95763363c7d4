"""R14: `--model`, a cheaper calculator that plans."""

from __future__ import annotations

import pytest
from ase.build import bulk
from ase.io import read, write
from test_report import data_of, part

MORSE = "morse?epsilon=0.35&rho0=4.0&r0=2.65"


@pytest.fixture
def copper() -> str:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    write("cu.extxyz", atoms)
    return "cu.extxyz"


def test_both_counts_are_shown(relaxion, copper):
    answer = relaxion("relax", copper, "--calc", "emt", "--model", MORSE, "--json", "--report")
    assert answer.code == 0, answer.err
    told = answer.objects[0]
    assert told["model"].startswith("Morse")
    assert told["model_calls"] > told["force_calls"]
    tiles = {tile["label"]: tile for tile in part(data_of(told["report"]), "tiles")["tiles"]}
    assert tiles["Model calls"]["value"] == str(told["model_calls"])


@pytest.mark.parametrize(
    ("model", "said"),
    [("nonsense", "nonsense"), ("emt", "the calculator itself"), ("gone:make", "cannot be imported")],
)
def test_a_model_that_cannot_be_made_is_named_and_the_relaxation_goes_on(relaxion, copper, model, said):
    answer = relaxion("relax", copper, "--calc", "emt", "--model", model)
    assert answer.code == 0
    assert said in answer.err


def test_relax_many_plans_too_and_keeps_the_model_with_its_settings(relaxion, copper):
    words = ("relax-many", copper, "--calc", "emt", "--workers", "1", "--out", "many", "--quiet")
    assert relaxion(*words, "--model", MORSE).code == 0
    assert relaxion("merge", "many", "all.extxyz").code == 0
    frame = read("all.extxyz")
    assert frame.info["relaxion_model_calls"] > frame.info["relaxion_force_calls"]
    other = relaxion(*words)
    assert other.code == 2
    assert "model" in other.err
