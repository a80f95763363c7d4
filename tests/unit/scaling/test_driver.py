"""The driver: every structure ends in exactly one place, whatever happens to workers and input."""

import csv
import json
import sqlite3
from functools import partial
from io import StringIO

import pytest
from ase import Atoms
from ase.io import read, write
from inline_workers import InlineWorkers, alloy

from relaxion import relax_batch
from relaxion.apps.relax_many.results import failures, make_summary, merge, read_counts, results
from relaxion.apps.relax_many.run import RelaxWorker
from relaxion.errors import FileError


def test_results_are_those_of_relax_batch(tmp_path, input_file, drive, structures):
    tally = drive([input_file])
    assert (tally.read, tally.relaxed, tally.failed, tally.not_converged) == (12, 12, 0, 0)
    counts = make_summary(tmp_path / "out")
    assert (counts.places, counts.structures, counts.converged, counts.waiting) == (12, 12, 12, 0)
    merged = merge(tmp_path / "out", tmp_path / "all.extxyz", force=False)
    assert merged.written == 12
    for relaxed, back in zip(
        relax_batch(structures, "emt", policy=None), read(tmp_path / "all.extxyz", ":"), strict=True
    ):
        assert back.info["relaxion_force_calls"] == relaxed.force_calls
        assert back.get_potential_energy() == pytest.approx(relaxed.energy_ev, abs=1e-6)
        assert back.positions == pytest.approx(relaxed.atoms.positions, abs=1e-6)


def test_running_again_does_nothing_twice(tmp_path, input_file, drive):
    drive([input_file])
    before = results(tmp_path / "out")
    tally = drive([input_file])
    assert (tally.relaxed, tally.already) == (0, 12)
    assert results(tmp_path / "out") == before


def test_a_run_that_was_stopped_goes_on(tmp_path, input_file, drive):
    asked = iter([False, False, False, True])
    first = drive([input_file], chunk_size=3, stop=lambda: next(asked))
    assert 0 < first.relaxed < 12
    assert not first.input_read
    second = drive([input_file], chunk_size=3)
    assert first.relaxed + second.relaxed == 12
    assert read_counts(tmp_path / "out").converged == 12


def test_doubles_have_one_result_and_are_listed_twice(tmp_path, drive, structures):
    for number, atoms in enumerate(structures):
        atoms.info["name"] = f"n{number}"
    write(tmp_path / "a.extxyz", [*structures[:4], structures[1]])
    write(tmp_path / "b.extxyz", [structures[2], structures[5]])
    tally = drive([tmp_path / "a.extxyz", tmp_path / "b.extxyz"])
    assert (tally.read, tally.relaxed, tally.already) == (7, 5, 2)
    counts = make_summary(tmp_path / "out")
    assert (counts.places, counts.structures, counts.doubles) == (7, 5, 2)
    with (tmp_path / "out" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["structure"] for row in rows] == ["0", "1", "2", "3", "4", "0", "1"]
    assert rows[1]["key"] == rows[4]["key"]
    assert rows[1]["energy_ev"] == rows[4]["energy_ev"] != ""
    merge(tmp_path / "out", tmp_path / "all.extxyz", force=False)
    back = read(tmp_path / "all.extxyz", ":")
    assert len(back) == 7
    assert back[1].positions == pytest.approx(back[4].positions)
    assert back[4].info["relaxion_input"].endswith("a.extxyz#4")
    with sqlite3.connect(tmp_path / "out" / "results.sqlite") as database:
        assert database.execute("SELECT count(*) FROM summary WHERE outcome = 'converged'").fetchone() == (7,)


def test_more_input_files_may_be_added(tmp_path, drive, structures):
    write(tmp_path / "a.extxyz", structures[:3])
    write(tmp_path / "b.extxyz", structures[3:5])
    drive([tmp_path / "a.extxyz"])
    drive([tmp_path / "b.extxyz"])
    assert read_counts(tmp_path / "out").converged == 5
    merge(tmp_path / "out", tmp_path / "all.extxyz", force=False)
    assert len(read(tmp_path / "all.extxyz", ":")) == 5


def test_merging_overwrites_nothing_unasked(tmp_path, input_file, drive):
    drive([input_file])
    (tmp_path / "all.extxyz").write_text("precious")
    with pytest.raises(FileError, match="`force=True` replaces it"):
        merge(tmp_path / "out", tmp_path / "all.extxyz", force=False)
    assert (tmp_path / "all.extxyz").read_text() == "precious"
    merge(tmp_path / "out", tmp_path / "all.extxyz", force=True)
    assert len(read(tmp_path / "all.extxyz", ":")) == 12


def test_a_killer_is_found_and_set_aside_and_its_company_is_not(tmp_path, input_file, drive, settings):
    worker = partial(RelaxWorker, settings, folder=str(tmp_path))
    killer = settings.key(read(input_file, 5))
    workers = InlineWorkers(worker, lambda keys: killer in keys)
    tally = drive([input_file], chunk_size=12, workers=workers)
    assert (tally.relaxed, tally.failed) == (11, 1)
    assert tally.worker_deaths == 4  # in a full chunk, among eight, and twice alone
    (reason,) = failures(tmp_path / "out")
    assert reason["key"] == killer
    assert "died 2 times" in reason["reason"]
    came = read(StringIO(reason["input"]), format="extxyz")
    assert came.positions == pytest.approx(alloy(5).positions, abs=1e-7)


def test_workers_killed_by_chance_harm_no_structure(tmp_path, input_file, drive, settings):
    worker = partial(RelaxWorker, settings, folder=str(tmp_path))
    deaths = iter([True, True, False, True, False, False, True])
    workers = InlineWorkers(worker, lambda _: next(deaths, False))
    tally = drive([input_file], chunk_size=6, workers=workers)
    assert (tally.relaxed, tally.failed, tally.worker_deaths) == (12, 0, 4)
    assert len(list(results(tmp_path / "out"))) == 12


def test_what_cannot_be_relaxed_is_set_aside_with_reason_and_input(tmp_path, drive, structures):
    uranium = alloy(3, extra="U")
    lost = structures[1].copy()
    lost.positions[0, 0] = float("nan")
    write(tmp_path / "in.extxyz", [structures[0], uranium, lost])
    tally = drive([tmp_path / "in.extxyz"])
    assert (tally.relaxed, tally.failed) == (1, 2)
    reasons = " ".join(reason["reason"] for reason in failures(tmp_path / "out"))
    assert "no parameters for U" in reasons
    assert "not finite" in reasons
    again = drive([tmp_path / "in.extxyz"])
    assert (again.relaxed, again.failed, again.already) == (0, 0, 3)


def test_a_file_that_breaks_off_gives_what_it_holds(tmp_path, input_file, drive):
    whole = input_file.read_text()
    input_file.write_text(whole[: len(whole) * 2 // 5])
    tally = drive([input_file])
    assert tally.relaxed >= 1
    assert tally.failed == 1
    (reason,) = failures(tmp_path / "out")
    assert "cannot be read from structure" in reason["reason"]


def test_the_step_limit_is_a_result(tmp_path, drive, settings, structures):
    write(tmp_path / "in.extxyz", structures[:2])
    object.__setattr__(settings, "max_force_calls", 1)
    tally = drive([tmp_path / "in.extxyz"])
    assert (tally.relaxed, tally.not_converged) == (2, 2)
    assert {found["outcome"] for found in results(tmp_path / "out")} == {"step_limit"}


def test_progress_is_told(tmp_path, input_file, drive):
    drive([input_file])
    told = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert told["relaxed"] == 12
    assert told["input_read"] is True


def test_the_input_is_streamed(tmp_path, drive, settings):
    """No more is read than is handed out, so that memory does not grow with the input."""
    write(tmp_path / "in.extxyz", [alloy(seed) for seed in range(40)])
    read_when_given = []

    class Watching(InlineWorkers):
        def give(self, worker, tasks):
            read_when_given.append(len(tasks))
            super().give(worker, tasks)

    tallies = []
    workers = Watching(partial(RelaxWorker, settings, folder=str(tmp_path)))
    drive([tmp_path / "in.extxyz"], chunk_size=5, workers=workers, report=lambda tally: tallies.append(tally.read))
    assert read_when_given == [5] * 8


def test_structures_of_many_kinds_keep_their_names(tmp_path, drive):
    atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 2.4]], info={"name": "dimer", "tags": [1, 2]})
    write(tmp_path / "dimer.extxyz", atoms)
    drive([tmp_path / "dimer.extxyz"])
    merge(tmp_path / "out", tmp_path / "all.extxyz", force=False)
    assert read(tmp_path / "all.extxyz").info["name"] == "dimer"
