"""The report of a training run in a browser: nothing asked of anybody, films one at a time, read by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, Sheet
from examples_for_pages import HOSTILE
from pictures import drawn, pixels
from test_report_page import CONTRAST, NAMELESS, focus

from relaxion.web.report_page import LARGEST_BYTES
from relaxion.web.report_training import training_page
from relaxion.web.watch_run import watched
from training_runs import ATOMS, PENDULUM, train_small

CHOSEN = "[...document.querySelectorAll('.choices button')].findIndex((b) => b.getAttribute('aria-pressed') === 'true')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; one has an alarm with a script in it."""
    runs = tmp_path_factory.mktemp("runs")
    train_small(ATOMS, runs / "atoms")
    train_small(PENDULUM, runs / "pendulum")
    alarm = {"step": 64, "alarm": "wall", "event": "begins", "sentence": f"blocked against a wall: {HOSTILE}"}
    (runs / "atoms" / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return runs


def page_of(*folders: Path) -> Path:
    runs = watched(folders)
    for run in runs:
        run.poll()
    return training_page(runs).save(folders[0] / "page.html")


@pytest.fixture(scope="module")
def page(chromium: Chromium, folder: Path) -> Iterator[Sheet]:
    sheet = chromium.sheet()
    sheet.open(page_of(folder / "atoms"))
    yield sheet
    sheet.close()


def test_opens_from_disk_and_asks_nobody_for_anything(page: Sheet, folder: Path):
    assert (folder / "atoms" / "page.html").stat().st_size < LARGEST_BYTES
    assert (page.requests, page.complaints) == ([], [])
    assert "force calls per relaxation" in page.evaluate("document.querySelector('h1').textContent")
    titles = set(page.evaluate("[...document.querySelectorAll('h2')].map((e) => e.textContent)"))
    assert {"Force calls per relaxation", "Converged", "Alarms", "Diagnosis", "Performance profile"} <= titles
    assert {"Structure by structure", "Final energies", "Settings"} <= titles
    page.wait("document.querySelectorAll('[data-part=curve] .reference').length === 4")  # BFGS, FIRE; legend


def test_an_alarm_is_shown_as_text_where_its_number_is(page: Sheet):
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.evaluate("document.querySelector('.alarms').innerText")
    gauge = page.evaluate("document.querySelector('.gauge.bad').innerText")
    assert "blocked share" in gauge
    assert "healthy: below 0.3" in gauge
    assert HOSTILE in gauge


def test_films_of_the_hardest_by_keyboard_one_view_at_a_time(page: Sheet):
    assert page.evaluate("document.querySelectorAll('.choices button').length") == 10
    page.wait("document.querySelectorAll('.gallery canvas').length === 1")
    assert drawn(pixels(page.picture_of(".gallery .stage"))) > 1000
    focus(page, ".choices li:nth-child(3) button")
    page.press("Enter")
    assert page.evaluate(CHOSEN) == 2
    for _ in range(12):  # more than a browser has 3D views to give
        page.press("Enter")
    assert page.evaluate("document.querySelectorAll('.gallery canvas').length") == 1
    assert drawn(pixels(page.picture_of(".gallery .stage"))) > 1000
    focus(page, ".gallery [aria-label='One force call on']")
    page.press("Enter")
    assert page.evaluate("document.querySelector('.gallery input[type=range]').value") == "2"
    assert page.complaints == []


def test_numbers_stand_beside_every_picture(page: Sheet):
    for part in ("scatter-0", "curve"):
        page.evaluate(f"document.querySelector('[data-part={part}] summary').click()")
    page.wait("document.querySelectorAll('[data-part=scatter-0] table, [data-part=curve] table').length === 2")
    heads = page.evaluate("[...document.querySelectorAll('[data-part=scatter-0] thead th')].map((e) => e.textContent)")
    assert heads == ["Structure", "Atoms", "Policy", "BFGS", "FIRE"]
    assert page.evaluate("document.querySelectorAll('[data-part=scatter-0] tbody tr').length") == 12


def test_readable_by_everybody(page: Sheet):
    assert page.evaluate(NAMELESS) == []
    for dark in (True, False):
        page.prefer(dark=dark, still=True)
        contrast = page.evaluate(CONTRAST)
        assert contrast["bad"] == []
        assert contrast["seen"] > 100
    page.resize(390, 844)
    page.wait("document.querySelector('.plot svg').viewBox.baseVal.width < 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.resize(1280, 800)
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    found = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
    assert any(
        role in ("image", "img") and name.startswith("Performance profile: Policy is first") for role, name in found
    )
    assert ("log", "Alarms") in found


def test_several_runs_in_one_page(opened, folder: Path):
    sheet: Sheet = opened(page_of(folder / "pendulum", folder / "atoms"))
    shown = "[...document.querySelectorAll('[data-run]')].filter((e) => e.checkVisibility()).map((e) => e.dataset.run)"
    assert set(sheet.evaluate(shown)) == {"0"}
    focus(sheet, ".chooser select")
    sheet.evaluate("(() => { const s = document.querySelector('.chooser select'); s.value = '1';"
                   "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert set(sheet.evaluate(shown)) == {"1"}
    sheet.wait("document.querySelectorAll('.gallery canvas').length === 1")
    assert drawn(pixels(sheet.picture_of(".gallery .stage"))) > 1000
    for value in ("0", "1"):
        sheet.evaluate(f"(() => {{ const s = document.querySelector('.chooser select'); s.value = '{value}';"
                       "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    sheet.wait("document.querySelectorAll('.gallery canvas').length === 1")
    rows = sheet.evaluate("[...document.querySelectorAll('[data-part=runs] tbody th')].map((e) => e.textContent)")
    assert rows == ["pendulum", "atoms"]
    assert sheet.complaints == []
