"""`relaxion bench` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ase.build import bulk
from ase.io import write

QUICK = ["--with", "BFGS", "--number", "2", "--quiet"]
ASKED_FOR = {"mean_force_calls", "median_force_calls", "p95_force_calls", "failures", "wall_time_seconds"}


def one_sentence(text: str) -> None:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text


def test_json_and_table(relaxion):
    answer = relaxion("bench", "emt-bulk", "--with", "BFGS,FIRE", "--number", "3", "--json", "a.json")
    assert answer.code == 0
    plain = json.loads(Path("a.json").read_text())
    assert set(plain["optimizers"]) == {"relaxion", "core", "BFGS", "FIRE"}
    for numbers in plain["optimizers"].values():
        assert set(numbers) >= ASKED_FOR
    assert plain["best_classical"] == "BFGS"
    means = {name: numbers["mean_force_calls"] for name, numbers in plain["optimizers"].items()}
    assert plain["ratio_to_best_classical"] == pytest.approx(means["relaxion"] / means["BFGS"])
    low, high = plain["ratio_to_best_classical_interval_95"]
    assert low <= plain["ratio_to_best_classical"] <= high
    assert plain["same_minimum_rate"] == 1
    assert sum(plain["force_calls"]["BFGS"]) == pytest.approx(3 * means["BFGS"])
    assert (plain["seed"], plain["structures"], plain["ours"]) == (9000, 3, "relaxion")
    assert set(plain["versions"]) >= {"relaxion", "ase", "torch"}
    for word in ("relaxion", "core", "BFGS", "FIRE", "Break-even", "the best classical one here"):
        assert word in answer.out
    assert f"{means['BFGS']:.1f}" in answer.out
    assert "structure 0: relaxion" in answer.err, "progress is on stderr"


def test_the_same_command_gives_the_same_counts(relaxion):
    counts = []
    for file in ("a.json", "b.json"):
        assert relaxion("bench", "emt-slabs", *QUICK, "--json", file).code == 0
        counts.append(json.loads(Path(file).read_text())["force_calls"])
    assert counts[0] == counts[1]


def test_json_on_stdout_is_nothing_else(relaxion):
    answer = relaxion("bench", "emt-bulk", *QUICK, "--json", "-")
    assert json.loads(answer.out)["set"] == "emt-bulk"
    assert not list(Path().glob("*.json"))


def test_without_policy_the_core_is_ours(relaxion):
    answer = relaxion("bench", "emt-bulk", *QUICK, "--policy", "none", "--json", "-")
    plain = json.loads(answer.out)
    assert (plain["ours"], set(plain["optimizers"])) == ("core", {"core", "BFGS"})
    assert plain["ratio_to_core"] == 1


def test_calls_are_those_of_the_users_calculator(relaxion, alloy_file):
    """Counted a second time by the calculator itself, which writes a line per evaluation."""
    answer = relaxion(
        "bench",
        alloy_file,
        "--calc",
        "calculators_for_test:Counted",
        "--with",
        "BFGSLineSearch,GPMin",
        "--json",
        "-",
        "-q",
    )
    counted = sum(calls[0] for calls in json.loads(answer.out)["force_calls"].values())
    assert len(Path("evaluations.txt").read_text().splitlines()) == counted


def test_a_file_perturbed(relaxion):
    write("cu.cif", bulk("Cu", cubic=True))
    answer = relaxion("bench", "cu.cif", *QUICK, "--perturb", "rattle:0.1", "--cell", "--json", "-")
    plain = json.loads(answer.out)
    assert (plain["structures"], plain["free_cell"], plain["perturb"]) == (2, True, "rattle:0.1")
    assert plain["energies_ev"]["core"][0] != plain["energies_ev"]["core"][1], "each start is displaced by itself"
    assert min(plain["force_calls"]["BFGS"]) > 1


def test_a_file_as_it_is(relaxion, alloy_file):
    answer = relaxion("bench", alloy_file, "--with", "none", "-q", "--json", "-")
    plain = json.loads(answer.out)
    assert (plain["structures"], plain["best_classical"], plain["ratio_to_best_classical"]) == (1, None, None)
    assert relaxion("bench", alloy_file, "--with", "none", "-q").code == 0
    too_many = relaxion("bench", alloy_file, "--number", "5")
    assert (too_many.code, too_many.out) == (2, "")
    assert "holds 1 structures" in too_many.err


def test_not_converged_is_exit_3_and_charged_at_the_cap(relaxion):
    answer = relaxion("bench", "emt-bulk", *QUICK, "--steps", "2", "--json", "a.json")
    assert answer.code == 3
    plain = json.loads(Path("a.json").read_text())
    assert plain["optimizers"]["relaxion"]["failures"] == 2
    assert plain["force_calls"]["BFGS"] == [2, 2]
    assert plain["same_minimum_rate"] is None


def test_seeds_of_training_are_told(relaxion):
    answer = relaxion("bench", "emt-bulk", "--with", "none", "--number", "1", "--seed", "3")
    assert "seeds below 9000 are for training" in answer.err


def test_interrupted_between_structures(relaxion, alloy_file):
    """The alloy, twice: Ctrl-C comes in the second; what all have done is shown."""
    alloy = Path(alloy_file).read_text()
    Path("two.xyz").write_text(alloy + alloy)
    answer = relaxion(
        "bench", "two.xyz", "--calc", "calculators_for_test:interrupted_in_comparison", "--with", "none", "--policy",
        "none", "--json", "a.json", "-q",
    )  # fmt: skip
    assert answer.code == 130
    plain = json.loads(Path("a.json").read_text())
    assert (plain["structures"], plain["interrupted"]) == (1, True)


def test_interrupted_in_the_first_structure(relaxion, alloy_file):
    answer = relaxion("bench", alloy_file, "--calc", "calculators_for_test:interrupted", "--with", "none", "-q")
    assert (answer.code, answer.out) == (130, "")
    one_sentence(answer.err)


BAD = {
    "set": (["emt-bluk"], 2, "unknown set 'emt-bluk': did you mean 'emt-bulk'?"),
    "set far": (["xyzzy"], 2, "known: alfe, alfe-cell, carbon-cell"),
    "optimizer": (
        ["emt-bulk", "--with", "BFGS,FIRRE"],
        2,
        "no optimizer 'FIRRE'; did you mean 'FIRE'?",
    ),
    "policy": (["emt-bulk", "--policy", "no-such"], 2, "no-such"),
    "calculator": (["emt-bulk", "--calc", "emtt"], 2, "did you mean 'emt'?"),
    "perturb": (["emt-bulk", "--perturb", "ratle:0.1"], 2, "did you mean 'rattle'?"),
    "fmax": (["emt-bulk", "--fmax", "nan"], 2, "--fmax is a force in eV/Å above 0"),
    "steps": (["emt-bulk", "--steps", "0"], 2, "--steps is 1 or more, got 0"),
    "number": (["emt-bulk", "--number", "0"], 2, "--number is 1 or more, got 0"),
    "missing file": (["none.cif"], 1, "none.cif does not exist"),
    "empty file": (["empty.cif"], 1, "empty.cif is empty"),
    "element": (["alfe", "--calc", "emt"], 1, "no parameters for Fe"),
    "no cell": (["emt-clusters", "--cell"], 1, "periodic along 0 of 3 axes"),
    "no stress": (["emt-bulk", "--cell", "--calc", "calculators_for_test:NoStress"], 1, "gives no stress"),
    "exists": (["emt-bulk", "--json", "taken.json"], 1, "taken.json exists; try --force"),
    "no folder": (["emt-bulk", "--json", "no/such/a.json"], 1, "name a file in a folder that exists"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(relaxion, case):
    Path("empty.cif").touch()
    Path("taken.json").write_text("mine")
    arguments, code, words = BAD[case]
    answer = relaxion("bench", "--number", 1, *arguments)
    assert (answer.code, answer.out) == (code, "")
    one_sentence(answer.err)
    assert words in answer.err
    assert Path("taken.json").read_text() == "mine"


def test_force_replaces(relaxion):
    Path("taken.json").write_text("mine")
    assert relaxion("bench", "emt-bulk", *QUICK, "--json", "taken.json", "--force").code == 0
    assert json.loads(Path("taken.json").read_text())["set"] == "emt-bulk"


def test_a_calculator_that_fails_is_a_failure_of_the_relaxation(relaxion, alloy_file):
    answer = relaxion(
        "bench", alloy_file, "--calc", "calculators_for_test:breaks_at_once", "--with", "none", "--policy", "none",
        "--json", "a.json",
    )  # fmt: skip
    assert answer.code == 3
    assert "core failed 1 times with an error, the first: calculator Breaks failed at force call 1" in answer.err
