"""`relaxion search`: its folder, its exit codes, and what it does not overwrite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ase.db
import ase.io
import numpy as np
import pytest
from typer.testing import CliRunner

from relaxion.apps.cli.command import app
from relaxion.train.tasks.search import alloy_cluster


@pytest.fixture
def start(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.xyz"
    alloy_cluster(("Ni", "Pd"), 9, 4, np.random.default_rng(2)).write(path)
    return path


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["search", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_the_folder_holds_minima_database_summary_and_page(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "found"
    code, said, _ = run(start, "--calc", "emt", "--calls", 60, "--out", out, "--json", "--compare", "--quiet")
    assert code == 0
    told = json.loads(said)
    assert told["force_calls"] == 60
    minima: Any = ase.io.read(out / "minima.extxyz", index=":")
    energies = [atoms.get_potential_energy() for atoms in minima]
    assert energies == pytest.approx([minimum["energy_ev"] for minimum in told["minima"]], abs=1e-6)
    assert energies == sorted(energies)
    rows = list(ase.db.connect(out / "minima.db").select())
    assert [row.energy for row in rows] == pytest.approx(energies, abs=1e-6)
    assert [row.times_found for row in rows] == [minimum["times_found"] for minimum in told["minima"]]
    assert sum(kind["force_calls"] for kind in told["moves"].values()) == 60 - told["staircase"][0][0]
    page = (out / "report.html").read_text()
    assert "plain basin hopping" in page
    assert "Best energy over force calls" in page

    # nothing is overwritten; --resume goes on with more calls, --force begins anew and leaves what is not ours
    before = (out / "minima.extxyz").read_bytes()
    code, _, errors = run(start, "--calc", "emt", "--calls", 60, "--out", out)
    assert code == 1
    assert "holds earlier results" in errors
    assert (out / "minima.extxyz").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    code, said, _ = run(start, "--calc", "emt", "--calls", 70, "--out", out, "--resume", "--json")
    assert code == 0
    assert json.loads(said)["force_calls"] == 70
    assert run(start, "--calc", "emt", "--calls", 30, "--out", out, "--force")[0] == 0
    assert (out / "notes.txt").read_text() == "mine"


def test_a_budget_below_one_relaxation_ends_with_3_and_keeps_the_structure(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "found"
    code, said, errors = run(start, "--calc", "emt", "--calls", 2, "--out", out)
    assert code == 3
    assert not said
    assert "did not relax the start" in errors
    assert len(ase.io.read(out / "start.extxyz")) == 9  # pyright: ignore[reportArgumentType]
    code, _, errors = run(start, "--calc", "emt", "--calls", 60, "--out", out, "--resume")
    assert code == 1
    assert "begin anew with --force" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--moves", "swop"], 2, "unknown kind of move 'swop'"),
        (["--moves", "swap=much"], 2, "a share is a number"),
        (["--choice", "oracle"], 2, "choice is one of"),
        (["--resume"], 1, "no search that could be resumed"),
        (["--resume", "--force"], 2, "give one of them"),
        (["--pressure", "3"], 2, "for a free cell"),
    ],
)
def test_bad_words_get_a_sentence(start: Path, tmp_path: Path, words: list[str], code: int, sentence: str) -> None:
    got, _, errors = run(start, "--calc", "emt", "--out", tmp_path / "found", *words)
    assert got == code
    assert sentence in " ".join(errors.split())
    assert not (tmp_path / "found" / "minima.extxyz").exists()
