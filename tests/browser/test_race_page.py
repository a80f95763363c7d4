"""The race in a browser: films in step, calls counting up, the winner marked."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import COPPER, changed, near
from playwright.sync_api import expect
from sheets import Sheet, go_to


@pytest.fixture(scope="module")
def race(sheet: Sheet, race_file: Path) -> Sheet:
    return sheet.open(race_file)


def ends(race: Sheet) -> list[int]:
    data = "JSON.parse(document.getElementById('data').textContent).parts.find((p) => p.kind === 'film')"
    return race.evaluate(f"{data}.films.map((f) => f.end_call)")


def test_three_films_and_no_complaint(race: Sheet):
    expect(race.find(".film h3")).to_have_text(["Relaxion", "BFGS", "FIRE"])
    expect(race.find(".stage canvas")).to_have_count(3)
    assert (race.requests, race.complaints) == ([], [])
    picture = race.picture(".films")
    for part in (picture[:, : picture.shape[1] // 3], picture[:, -picture.shape[1] // 3 :]):
        assert near(part, COPPER) > 500


def test_calls_count_up_in_step_and_stop_at_the_finish(race: Sheet):
    finish = ends(race)
    for call in (1, 2, finish[0], max(finish)):
        go_to(race, call)
        expect(race.find(".film .calls b")).to_have_text([str(min(call, end)) for end in finish])
    expect(race.find(".winner h3")).to_have_text(["Relaxion"])
    assert all(state.startswith("converged") for state in race.texts(".film .state"))


def test_turning_one_turns_all(race: Sheet):
    before = race.picture(".film:last-child .stage")
    race.press(".film:first-child .stage", "ArrowRight", "ArrowRight")
    race.until(lambda: changed(before, race.picture(".film:last-child .stage")) > 300)


def test_the_same_count_as_the_table_and_the_title(race: Sheet):
    rows = race.evaluate(
        "[...document.querySelectorAll('.part[data-kind=table] tbody tr')].map((r) => Number(r.cells[1].textContent))"
    )
    assert rows == ends(race)
    expect(race.find("h1")).to_have_text(f"Relaxion wins with {rows[0]} force calls")


def test_readable_by_everybody(race: Sheet):
    race.readable()
