"""The race in a browser: films in step, calls counting up, the winner marked."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Sheet
from pictures import near, pixels
from test_report_page import CONTRAST, COPPER, NAMELESS, go_to

COUNTS = "[...document.querySelectorAll('.film .calls b')].map((e) => Number(e.textContent))"


@pytest.fixture(scope="module")
def race(chromium, race_file: Path):
    sheet: Sheet = chromium.sheet()
    sheet.open(race_file)
    yield sheet
    sheet.close()


def ends(race: Sheet) -> list[int]:
    data = "JSON.parse(document.getElementById('data').textContent).parts.find((p) => p.kind === 'film')"
    return race.evaluate(f"{data}.films.map((f) => f.end_call)")


def test_three_films_and_no_complaint(race: Sheet):
    assert race.evaluate("[...document.querySelectorAll('.film h3')].map((e) => e.textContent)") == [
        "Relaxion", "BFGS", "FIRE",
    ]  # fmt: skip
    assert (race.requests, race.complaints) == ([], [])
    stages = race.evaluate("document.querySelectorAll('.stage canvas').length")
    assert stages == 3
    picture = pixels(race.picture_of(".films"))
    for part in (picture[:, : picture.shape[1] // 3], picture[:, -picture.shape[1] // 3 :]):
        assert near(part, COPPER) > 500


def test_calls_count_up_in_step_and_stop_at_the_finish(race: Sheet):
    finish = ends(race)
    for call in (1, 2, finish[0], max(finish)):
        go_to(race, call)
        assert race.evaluate(COUNTS) == [min(call, end) for end in finish]
    assert race.evaluate("document.querySelectorAll('.winner').length") == 1
    assert race.evaluate("document.querySelector('.winner h3').textContent") == "Relaxion"
    states = race.evaluate("[...document.querySelectorAll('.film .state')].map((e) => e.textContent)")
    assert all(state.startswith("converged") for state in states)


def test_turning_one_turns_all(race: Sheet):
    before = pixels(race.picture_of(".film:last-child .stage"))
    race.evaluate("document.querySelector('.film:first-child .stage').focus()")
    race.press("ArrowRight")
    race.press("ArrowRight")
    after = pixels(race.picture_of(".film:last-child .stage"))
    assert (abs(before - after).sum(axis=2) > 60).sum() > 300


def test_the_same_count_as_the_table_and_the_title(race: Sheet):
    rows = race.evaluate(
        "[...document.querySelectorAll('.part[data-kind=table] tbody tr')].map((r) => Number(r.cells[1].textContent))"
    )
    assert rows == ends(race)
    assert race.evaluate("document.querySelector('h1').textContent") == f"Relaxion wins with {rows[0]} force calls"


def test_readable_by_everybody(race: Sheet):
    assert race.evaluate(NAMELESS) == []
    for dark in (True, False):
        race.prefer(dark=dark, still=True)
        assert race.evaluate(CONTRAST)["bad"] == []
    race.resize(390, 844)
    race.wait("document.querySelector('.plot svg').viewBox.baseVal.width < 390")
    assert race.evaluate("document.documentElement.scrollWidth") <= 390
    race.resize(1280, 800)
