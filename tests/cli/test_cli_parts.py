"""The pieces of the command line that can be checked with numbers made up for the purpose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT

from relaxion.apps.cli.inputs import RelaxationJob, check_overlaps
from relaxion.apps.cli.progress import ProgressLine, one_line
from relaxion.apps.cli.relax import Report, as_json
from relaxion.apps.comparison import check_count, compared, in_words, minima_in_words
from relaxion.apps.result_folder import full_suffix, stem
from relaxion.errors import StructureError
from relaxion.potentials import AsePotential, Emt
from relaxion.potentials.counting import CalculatorFailed, CountingCalculator
from relaxion.train.judge.runs import Run


def run(calls: int, energy: float = 0.0, outcome: str = "converged", error: str | None = None) -> Run:
    return Run(outcome, calls, energy, 0.03, 0.1, error=error)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [(7, 21, "3.0 × fewer than BFGS"), (21, 7, "3.0 × more than BFGS"), (40, 41, "about as many as BFGS")],
)
def test_ratio(ours, theirs, words):
    assert in_words(run(ours), [compared("BFGS", run(theirs), run(ours), 4)]) == f"BFGS {theirs}: {words}"


def test_ratio_is_to_the_best_that_converged():
    others = {"FIRE": run(44), "BFGS": run(21), "MDMin": run(3, outcome="step_limit"), "GPMin": run(2, error="x")}
    others["GPMin"] = run(2, outcome="error", error="x")
    rows = [compared(name, other, run(7), 4) for name, other in others.items()]
    counts = "FIRE 44, BFGS 21, MDMin not converged after 3, GPMin failed after 2"
    assert in_words(run(7), rows) == f"{counts}: 3.0 × fewer than BFGS"
    assert in_words(run(7, outcome="step_limit"), rows) == counts


def test_minima_differ_by_more_than_a_millielectronvolt_per_atom():
    ours = run(7, energy=1.0)
    near = compared("BFGS", run(9, energy=1.0039), ours, 4)
    far = compared("FIRE", run(9, energy=0.99), ours, 4)
    lost = compared("MDMin", run(9, energy=5.0, outcome="step_limit"), ours, 4)
    assert minima_in_words(ours, [near, far, lost]) == "FIRE found another minimum, 2.5 meV/atom lower"
    assert minima_in_words(run(7, 1.0, "step_limit"), [far]) == ""


def test_json_has_no_nan():
    report = Report(RelaxationJob(Path("a.xyz"), 2, "a-2", Atoms("Cu")), run(1))
    assert json.loads(as_json(report, compare=False))["index"] == 2
    with pytest.raises(ValueError, match="JSON"):
        as_json(Report(report.job, run(1, energy=np.nan)), compare=False)


def test_counter_counts_structures_not_questions(copper):
    counter = CountingCalculator(Emt(), stress=True)
    copper.calc = counter
    copper.get_potential_energy()
    copper.get_forces()
    copper.get_stress()
    copper.get_potential_energy(force_consistent=True)
    assert counter.calls == 1
    copper.positions[0, 0] += 0.1
    copper.get_stress()
    copper.get_forces()
    assert counter.calls == 2
    copper.positions[0, 0] -= 0.1  # been here before: still a new call
    copper.get_forces()
    assert counter.calls == 3


def test_counter_answers_as_the_calculator(alloy):
    expected = alloy.copy()
    expected.calc = EMT()
    for potential in (Emt(), AsePotential(EMT())):
        alloy.calc = CountingCalculator(potential, stress=True)
        assert alloy.get_potential_energy() == pytest.approx(expected.get_potential_energy(), abs=1e-9)
        assert alloy.get_forces() == pytest.approx(expected.get_forces(), abs=1e-9)
        assert alloy.get_stress() == pytest.approx(expected.get_stress(), abs=1e-9)


def test_counter_refuses_forces_of_the_wrong_shape(copper):
    calculator = EMT()
    calculator.get_forces = lambda _: np.zeros((3, 3))
    copper.calc = CountingCalculator(AsePotential(calculator), stress=False)
    with pytest.raises(CalculatorFailed, match=r"forces of shape \(3, 3\) for 4 atoms"):
        copper.get_forces()


def test_a_miscount_is_said(caplog):
    check_count(7, 7)
    assert caplog.messages == []
    check_count(6, 7)
    assert "the optimizer counted 6 force calls, the calculator 7" in caplog.messages[0]


def test_overlaps_reports_the_closest_pair():
    atoms = Atoms("HCuAu", positions=[[0, 0, 0], [0, 0, 0.29], [0, 0, 0.49]])
    with pytest.raises(StructureError, match=r"atoms 1 and 2 \(Cu, Au\) are 0\.2 Å apart"):
        check_overlaps(atoms)
    check_overlaps(Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.31]]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.cif", ("a", ".cif")), ("a.b.cif.gz", ("a.b", ".cif.gz")), ("POSCAR", ("POSCAR", "")), (".xyz", (".xyz", ""))],
)
def test_stem(name, expected):
    assert (stem(Path(name)), full_suffix(Path(name))) == expected


def test_one_line():
    assert one_line(" a\n  b\tc ") == "a b c"
    assert len(one_line("x" * 10_000)) == 600


def test_plain_progress_speaks_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 6.5])
    monkeypatch.setattr("relaxion.apps.cli.progress.time.monotonic", lambda: next(clock))
    progress = ProgressLine(quiet=False)
    with progress.line():
        report = progress.reporter("a.xyz", "Relaxion")
        for calls in (1, 2, 3):
            report(calls, -1.0, 0.5)
        progress.reporter("a.xyz", "BFGS")(1, -1.0, 0.5)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "a.xyz · Relaxion: call 1",
        "a.xyz · Relaxion: call 3",
        "a.xyz · BFGS: call 1",
    ]
