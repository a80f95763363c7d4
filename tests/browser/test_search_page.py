"""The page of a search in a browser: it opens at the lowest minima and replays how they were found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ase.cluster import Octahedron
from ase.io import write
from pictures import COPPER, near
from playwright.sync_api import expect
from sheets import Sheet, go_to
from typer.testing import CliRunner

from relaxion.apps.cli.app import app


@pytest.fixture(scope="module")
def search(sheet: Sheet, tmp_path_factory: pytest.TempPathFactory) -> Sheet:
    folder, before = tmp_path_factory.mktemp("search"), Path.cwd()
    os.chdir(folder)
    try:
        atoms = Octahedron("Cu", 3, cutoff=1)
        atoms.symbols[[0, 2, 5]] = "Au"
        write("cluster.xyz", atoms)
        options = ["--calc", "emt", "--calls", "60", "--compare", "--out", "out", "-q"]
        assert CliRunner().invoke(app, ["search", "cluster.xyz", *options], catch_exceptions=False).exit_code == 0
    finally:
        os.chdir(before)
    return sheet.open(folder / "out" / "report.html")


def test_it_opens_at_the_lowest_minima(search: Sheet) -> None:
    assert (search.requests, search.complaints) == ([], [])
    expect(search.find(".bar .main")).to_have_text("Replay")
    expect(search.find(".film h3 >> nth=0")).to_have_text("1: lowest")
    for state in search.texts(".film .state"):
        assert re.match(r"found (once|\d+ times), first at call \d+$", state)
    for number in range(search.find(".stage").count()):
        search.until(lambda number=number: near(search.picture(f".stage >> nth={number}"), COPPER) > 2000)


def test_only_what_changes_counts_calls(search: Sheet) -> None:
    counts = search.texts(".film .calls")
    assert set(counts[1:]) == {""}
    go_to(search, 1)
    assert set(search.texts(".film .calls")[1:]) == {""}
    assert all("first at call" in state for state in search.texts(".film .state")[1:])


def test_the_best_energy_falls_in_steps(search: Sheet) -> None:
    expect(search.find(".plot >> nth=0")).to_have_attribute("aria-label", re.compile("Relaxion search ends 0 eV above"))
    search.find("summary >> nth=0").click()
    heads = ["force calls", "Relaxion search", "plain basin hopping"]
    expect(search.find("details[open] thead th")).to_have_text(heads)


def test_readable_by_everybody(search: Sheet) -> None:
    search.readable()
