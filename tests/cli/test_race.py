"""`relaxion race`: who wins, counted inside the calculator, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from ase import Atoms
from ase.io import write
from test_report import data_of, part

from relaxion.apps.comparison import compared
from relaxion.apps.report.page import LARGEST_BYTES
from relaxion.apps.report.relaxation import RelaxationReport, race_page, verdict
from relaxion.train.judge.runs import Run


def test_winner_by_force_calls_counted_inside_the_calculator(relaxion, alloy_file):
    options = ["--with", "BFGS,BFGSLineSearch", "--calc", "calculators_for_test:Counted", "--json"]
    answer = relaxion("race", alloy_file, *options)
    assert answer.code == 0, answer.err
    (result,) = answer.objects
    calls = {name: run["force_calls"] for name, run in result["runs"].items()}
    assert list(calls) == ["Relaxion", "BFGS", "BFGSLineSearch"]
    assert len(Path("evaluations.txt").read_text().split()) == sum(calls.values())
    assert result["winners"] == [name for name in calls if calls[name] == min(calls.values())]
    data = data_of("race.html")
    films = part(data, "film")["films"]
    assert [film["end_call"] for film in films] == list(calls.values())
    assert [film["name"] for film in films if film["winner"]] == result["winners"]
    # a line search asks between two steps of its log; the film has all of it
    assert len(films[2]["calls"]) == calls["BFGSLineSearch"]
    assert data["last_call"] == max(calls.values())
    assert Path("race.html").stat().st_size < LARGEST_BYTES


def test_sentence(relaxion, alloy_file):
    answer = relaxion("race", alloy_file, "--cell", "--out", "r.html")
    assert answer.code == 0
    assert answer.out.startswith("alloy.xyz: Au2Cu6: Relaxion wins with ")
    assert answer.out.endswith("written to r.html\n")
    assert answer.out.count("\n") == 1


def test_not_converged_is_code_3_and_failed_is_code_1(relaxion, alloy_file):
    answer = relaxion("race", alloy_file, "--steps", "1", "--with", "BFGS")
    assert answer.code == 3
    assert "nobody converged" in answer.out
    answer = relaxion("race", alloy_file, "--calc", "calculators_for_test:breaks_in_the_middle", "--force")
    assert answer.code == 1
    assert "Relaxion failed: " in answer.err
    assert Path("race.html").exists(), "the others are worth seeing"


def test_ctrl_c_writes_nothing(relaxion, alloy_file):
    for calculator in ("interrupted", "interrupted_in_comparison"):
        answer = relaxion("race", alloy_file, "--calc", f"calculators_for_test:{calculator}")
        assert answer.code == 130
        assert "no page was written" in answer.err
        assert not Path("race.html").exists()


def test_several_structures(relaxion, alloy):
    other = alloy.copy()
    other.symbols[:] = "Cu"
    write("two.xyz", [alloy, other])
    first = relaxion("race", "two.xyz", "--with", "BFGS")
    assert ": Au2Cu6: " in first.out
    assert "holds 2 structures; the first one races" in first.err
    assert ": Cu8: " in relaxion("race", "two.xyz@1", "--with", "BFGS", "--force").out
    answer = relaxion("race", "two.xyz@2", "--force")
    assert (answer.code, "two.xyz has 2 structures, numbered 0 to 1" in answer.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing.cif"], 1, "does not exist"),
        (["alloy.xyz", "--with", "BFSG"], 2, "did you mean 'BFGS'?"),
        (["alloy.xyz", "--with", ","], 2, "--with names 1 to 5 optimizers, got 0"),
        (["alloy.xyz", "--with", "BFGS,FIRE,FIRE2,LBFGS,MDMin,GPMin"], 2, "got 6"),
        (["alloy.xyz", "--out", "."], 1, "is a folder"),
        (["alloy.xyz", "--out", "no/such/race.html"], 1, "does not exist; make it first"),
        (["alloy.xyz", "--out", "alloy.xyz"], 1, "alloy.xyz exists; try --force"),
        (["alloy.xyz", "--calc", "nonsense"], 2, "nonsense"),
        (["alloy.xyz", "--fmax", "-1"], 2, "--fmax"),
        (["alloy.xyz", "--policy", "no-such-policy"], 2, "no-such-policy"),
    ],
)
def test_bad_input(relaxion, alloy_file, arguments, code, words):
    answer = relaxion("race", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert alloy_file.read_text().startswith("8\n")
    assert not Path("race.html").exists()


def run(calls: int, outcome: str = "converged", error: str | None = None) -> Run:
    return Run(outcome, calls, -1.0, 0.03, 0.1, error=error)


def race_of(Relaxion: Run, **others: Run) -> RelaxationReport:
    start = Atoms("Cu2", positions=[[0, 0, 0], [2.4, 0, 0]])
    beside = [compared(name, run, Relaxion, len(start)) for name, run in others.items()]
    return RelaxationReport("a.xyz", start, Relaxion, 0.05, "emt", "none", False, "relaxion race a.xyz", beside)


def test_verdicts():
    assert verdict(race_of(Relaxion=run(7), BFGS=run(20))) == "Relaxion wins with 7 force calls"
    assert verdict(race_of(Relaxion=run(30), BFGS=run(20))) == "BFGS wins with 20 force calls"
    assert verdict(race_of(Relaxion=run(7), BFGS=run(7))) == "Relaxion and BFGS tie with 7 force calls"
    assert verdict(race_of(Relaxion=run(1), BFGS=run(2, "step_limit"))) == "Relaxion wins with 1 force call"
    assert verdict(race_of(Relaxion=run(3, "step_limit"), BFGS=run(2, "error", "x"))) == "nobody converged"


def test_a_racer_that_failed_at_once_has_a_still():
    page = race_page(race_of(Relaxion=run(7), BFGS=run(1, "error", "OSError: away")))
    films = next(one for one in page.parts if one["kind"] == "film")["films"]
    assert [len(film["calls"]) for film in films] == [1, 1]
    assert "OSError: away" in str([one for one in page.parts if one["kind"] == "facts"])
