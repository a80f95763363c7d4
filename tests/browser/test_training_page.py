"""The report of a training run in a browser: nothing asked of anybody, films one at a time, read by anyone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from examples_for_pages import HOSTILE
from pictures import drawn, painted
from playwright.sync_api import expect
from sheets import Sheet

from relaxion.apps.report.page import LARGEST_BYTES
from relaxion.apps.report.run import watched
from relaxion.apps.report.training import training_page
from training_runs import ATOMS, PENDULUM, train_small

STAGE = ".gallery .stage"


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
def page(sheet: Sheet, folder: Path) -> Sheet:
    return sheet.open(page_of(folder / "atoms"))


def test_opens_from_disk_and_asks_nobody_for_anything(page: Sheet, folder: Path):
    assert (folder / "atoms" / "page.html").stat().st_size < LARGEST_BYTES
    assert (page.requests, page.complaints) == ([], [])
    expect(page.find("h1")).to_contain_text("force calls per relaxation")
    titles = set(page.texts("h2"))
    assert {"Force calls per relaxation", "Converged", "Alarms", "Diagnosis", "Performance profile"} <= titles
    assert {"Structure by structure", "Final energies", "Settings"} <= titles


def test_the_curve_stands_beside_the_classical_optimizers(page: Sheet):
    expect(page.find("[data-part=curve] .legend li")).to_have_text([re.compile("^BFGS "), re.compile("^FIRE ")])
    for name in ("s0", "text"):  # the curve; the two lines
        colour = page.evaluate(f"Relaxion.colour('{name}')")
        page.until(lambda colour=colour: painted(page.picture("[data-part=curve] .plot"), colour) > 100)


def test_dots_and_stairs_are_drawn(page: Sheet):
    for part, name, least in (("profile-0", "s1", 60), ("scatter-0", "s1", 20), ("scatter-0", "s2", 20)):
        colour = page.evaluate(f"Relaxion.colour('{name}')")
        page.until(lambda p=part, c=colour, n=least: painted(page.picture(f"[data-part={p}] .plot"), c) > n)


def test_an_alarm_is_shown_as_text_where_its_number_is(page: Sheet):
    assert page.evaluate("window.hacked") is None
    expect(page.find(".alarms")).to_contain_text(HOSTILE)
    for words in ("Blocked share", "alarm", "healthy: below 0.3", HOSTILE):
        expect(page.find(".gauge.bad")).to_contain_text(words)


def test_six_diagnostics_are_seen_and_each_has_a_verdict(page: Sheet):
    gauges = page.find("[data-part=diagnosis-0] .gauge")
    assert gauges.count() > 20
    expect(page.find("[data-part=diagnosis-0] .gauge:visible")).to_have_count(6)
    assert "" not in page.texts("[data-part=diagnosis-0] .verdict")
    alarm, ground = (page.evaluate(f"getComputedStyle(document.querySelector('{one}')).backgroundColor")
                     for one in (".gauge.bad", ".gauge.good"))  # fmt: skip
    assert alarm != ground


def test_a_link_leads_from_an_alarm_to_its_number(page: Sheet):
    number = page.find("[data-part=diagnosis-0] .gauge.bad")
    number.evaluate("(e) => document.querySelector('[data-part=diagnosis-0] .more .gauges').append(e)")
    expect(number).to_be_hidden()
    page.find(".alarms a").click()
    expect(number).to_be_visible()
    assert page.evaluate("document.querySelector(':target') === document.querySelector('.gauge.bad')")


def test_names_of_settings_are_not_broken(page: Sheet):
    page.evaluate("document.querySelectorAll('.gauges details').forEach((e) => { e.open = true; })")
    page.phone()
    broken = page.evaluate("""[...document.querySelectorAll('.gauges .name')]
        .filter((e) => e.getBoundingClientRect().height > 1.6 * parseFloat(getComputedStyle(e).fontSize))
        .map((e) => e.textContent)""")
    page.desktop()
    assert page.find(".gauges .name").count() > 5
    assert broken == []


def test_films_of_the_hardest_by_keyboard_one_view_at_a_time(page: Sheet):
    expect(page.find(".choices button")).to_have_count(10)
    expect(page.find(f"{STAGE} canvas")).to_have_count(1)
    page.until(lambda: drawn(page.picture(STAGE)) > 1000)
    third = ".choices li:nth-child(3) button"
    page.press(third, *["Enter"] * 13)  # more than a browser has 3D views to give
    expect(page.find(third)).to_have_attribute("aria-pressed", "true")
    expect(page.find(".choices [aria-pressed=true]")).to_have_count(1)
    expect(page.find(f"{STAGE} canvas")).to_have_count(1)
    page.until(lambda: drawn(page.picture(STAGE)) > 1000)
    page.press(".gallery [aria-label='One force call on']", "Enter")
    expect(page.find(".gallery input[type=range]")).to_have_value("2")
    assert page.complaints == []


def test_numbers_stand_beside_every_picture(page: Sheet):
    for part in ("scatter-0", "curve"):
        page.find(f"[data-part={part}] summary").click()
        expect(page.find(f"[data-part={part}] table")).to_have_count(1)
    expect(page.find("[data-part=scatter-0] thead th")).to_have_text(["Structure", "Atoms", "Policy", "BFGS", "FIRE"])
    expect(page.find("[data-part=scatter-0] tbody tr")).to_have_count(12)


def test_readable_by_everybody(page: Sheet):
    page.readable(least=100)
    expect(page.page.get_by_role("img", name=re.compile("^Performance profile: Policy is first"))).to_have_count(1)
    expect(page.page.get_by_role("log", name="Alarms")).to_have_count(1)


def test_several_runs_in_one_page(opened, folder: Path):
    sheet: Sheet = opened(page_of(folder / "pendulum", folder / "atoms"))
    shown = "[...document.querySelectorAll('[data-run]')].filter((e) => e.checkVisibility()).map((e) => e.dataset.run)"
    chooser = sheet.find(".chooser select")
    assert set(sheet.evaluate(shown)) == {"0"}
    for value in ("1", "0", "1"):
        chooser.select_option(value)
        assert set(sheet.evaluate(shown)) == {value}
    expect(sheet.find(f"{STAGE} canvas")).to_have_count(1)
    sheet.until(lambda: drawn(sheet.picture(STAGE)) > 1000)
    expect(sheet.find("[data-part=runs] tbody th")).to_have_text(["pendulum", "atoms"])
    assert sheet.complaints == []
