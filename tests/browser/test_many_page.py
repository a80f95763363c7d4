"""The page of a folder of `relax-many` in a browser: failures are seen, the search box finds structures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ase.build import bulk
from ase.io import write
from examples_for_pages import HOSTILE
from playwright.sync_api import expect
from sheets import Sheet
from typer.testing import CliRunner

from relaxion.apps.cli.app import app

ROWS = ".part[data-part=structures] tbody tr"


@pytest.fixture(scope="module")
def many(sheet: Sheet, tmp_path_factory: pytest.TempPathFactory) -> Sheet:
    folder, before = tmp_path_factory.mktemp("many"), Path.cwd()
    os.chdir(folder)
    try:
        images = [bulk("Cu", a=3.5, cubic=True), bulk("Au", a=4.0, cubic=True), bulk("Ti")]
        images[0].info["id"] = HOSTILE
        write("all.extxyz", images)
        options = ["--calc", "emt", "--workers", "local:1", "--out", "out", "-q"]
        assert CliRunner().invoke(app, ["relax-many", "all.extxyz", *options]).exit_code == 1
        assert CliRunner().invoke(app, ["report", "out"]).exit_code == 0
    finally:
        os.chdir(before)
    return sheet.open(folder / "out" / "report.html")


def test_failures_are_seen_at_once(many: Sheet) -> None:
    expect(many.find("h1")).to_have_text("out: 2 of 3 structures relaxed, 1 failed")
    expect(many.find(".part[data-part=failures] tbody th")).to_contain_text("no parameters for Ti")
    assert (many.requests, many.complaints) == ([], [])


def test_the_search_box_leaves_what_has_all_words(many: Sheet) -> None:
    box = many.find(".search input")
    for words, number in (("converged", 2), ("Au4 conv", 1), ("failed", 1), ("nothing has this", 0), ("", 3)):
        box.fill(words)
        expect(many.find(f"{ROWS}:not([hidden])")).to_have_count(number)
    box.fill("au4")
    expect(many.find(".search [role=status]")).to_have_text("1 of 3")
    box.fill("")


def test_tables_scroll_inside_themselves_on_a_phone(many: Sheet) -> None:
    many.phone()
    for part in ("failures", "slowest", "structures"):
        wide, seen, first = many.evaluate(f"""(() => {{
            const box = document.querySelector('[data-part={part}] .scroll');
            return [box.scrollWidth, box.clientWidth, box.querySelector('tbody th').offsetWidth]; }})()""")
        assert wide > seen, part
        assert first < 0.6 * seen, "a first column that stays leaves room for the others"
    many.desktop()


def test_readable_by_everybody(many: Sheet) -> None:
    many.readable()
