"""The live page in a browser: it follows the run, keeps the reader's place, races what is dropped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ase.build import bulk
from ase.io import write
from examples_for_pages import HOSTILE
from pictures import COPPER, drawn, near
from playwright.sync_api import expect
from sheets import CONTRAST, Sheet

from live_server import InThread
from relaxion.web import live as live_module
from relaxion.web.live import Board
from relaxion.web.run import watched
from relaxion.web.training import TrainingRuns
from training_runs import ATOMS, train_small

CURVE, SAID, START, FILE = "[data-part=curve]", "#race .said", "#race [type=submit]", "#race input[type=file]"


class Watched(NamedTuple):
    sheet: Sheet
    run: Path
    rest: list[str]  # lines that are still to come
    assessment: str  # of its end


@pytest.fixture(scope="module")
def live(sheet: Sheet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = train_small(ATOMS, tmp_path_factory.mktemp("runs") / "atoms")
    (run / "result.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    assessment = (run / "assessment.json").read_text()
    (run / "assessment.json").unlink()
    live_module.SECONDS_BETWEEN_LOOKS, before = 0.1, live_module.SECONDS_BETWEEN_LOOKS
    with InThread(Board(TrainingRuns(watched([run])))) as server:
        sheet.page.goto(f"http://127.0.0.1:{server.port}/")
        expect(sheet.find("html")).to_have_attribute("data-live", "open")
        yield Watched(sheet, run, lines[5:], assessment)
        sheet.page.goto("about:blank")
    live_module.SECONDS_BETWEEN_LOOKS = before


def test_it_follows_the_run_and_keeps_the_readers_place(live: Watched):
    sheet, plot = live.sheet, live.sheet.find(f"{CURVE} .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("at step 64"))
    expect(sheet.find(".gallery")).to_have_count(0)
    plot.evaluate("(element) => { window.same = element; }")
    sheet.find(f"{CURVE} summary").click()
    expect(sheet.find(f"{CURVE} tbody tr")).to_have_count(3)
    sheet.find("[data-part=facts-0] button >> nth=0").focus()
    with (live.run / "metrics.jsonl").open("a") as file:
        file.write("".join(live.rest))
    expect(plot).to_have_attribute("aria-label", re.compile("at step 96"))
    expect(sheet.find(f"{CURVE} tbody tr")).to_have_count(4)
    assert sheet.evaluate("window.same.isConnected"), "the plot was redrawn, not exchanged"
    place = "document.activeElement.closest('[data-part]')?.dataset.part"
    sheet.until(lambda: sheet.evaluate(place) == "facts-0", place)


def test_a_film_of_the_newest_assessment_comes(live: Watched):
    (live.run / "assessment.json").write_text(live.assessment)
    expect(live.sheet.find(".gallery .stage canvas")).to_have_count(1)
    live.sheet.until(lambda: drawn(live.sheet.picture(".gallery .stage")) > 1000)
    order = live.sheet.evaluate("[...document.querySelectorAll('#training > *')].map((e) => e.dataset.part)")
    assert order.index("scatter-0") < order.index("worst-0") < order.index("citation")


def test_alarms_as_they_come_are_text(live: Watched):
    alarm = {"step": 96, "alarm": "wall", "event": "begins", "sentence": f"blocked against a wall: {HOSTILE}"}
    (live.run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    expect(live.sheet.find(".alarms li")).to_have_count(1)
    expect(live.sheet.find(".alarms")).to_contain_text(HOSTILE)
    expect(live.sheet.find(".gauge.bad")).to_have_count(1)
    assert live.sheet.evaluate("window.hacked") is None


def test_a_run_that_ends_says_so(live: Watched):
    (live.run / "result.json").write_text('{"steps": 96}')
    expect(live.sheet.find(".lead >> nth=0")).to_contain_text("Finished at step 96")


def test_readable_by_everybody(live: Watched):
    sheet = live.sheet
    for tab in ("race", "training"):
        sheet.find(f"#tab-{tab}").click()
        sheet.readable()
    sheet.press("#tab-training", "ArrowRight")
    expect(sheet.find("#tab-race")).to_be_focused()
    expect(sheet.find("#training")).not_to_be_visible()
    expect(sheet.find("#race")).to_be_visible()
    expect(sheet.find("#tab-training")).to_have_attribute("aria-selected", "false")
    expect(sheet.find("#tab-race")).to_have_attribute("aria-selected", "true")


def test_a_chosen_file_races_with_films_in_step(live: Watched, tmp_path: Path):
    sheet = live.sheet
    atoms = bulk("Cu", a=3.7, cubic=True)
    atoms.rattle(0.1, seed=3)
    write(tmp_path / "a<b>.xyz", atoms, format="xyz", comment=HOSTILE)
    sheet.press("#tab-race", "Enter")
    sheet.find(FILE).set_input_files(tmp_path / "a<b>.xyz")
    expect(sheet.find(START)).to_be_enabled()
    sheet.press(START, "Enter")
    expect(sheet.find("#race .stage canvas")).to_have_count(3)
    expect(sheet.find(SAID)).to_have_text(re.compile("^Relaxion wins with "))
    expect(sheet.find("#race")).to_contain_text(HOSTILE)
    assert sheet.evaluate("window.hacked") is None
    sheet.press("#race [aria-label='One force call on']", "Enter")
    expect(sheet.find("#race .film .calls b")).to_have_text(["2", "2", "2"])
    sheet.until(lambda: near(sheet.picture("#race .stage >> nth=0"), COPPER) > 300)
    assert sheet.evaluate(CONTRAST)["bad"] == []


def test_what_is_no_structure_and_what_is_too_large_say_so(live: Watched, tmp_path: Path):
    sheet = live.sheet
    sheet.press("#tab-race", "Enter")
    (tmp_path / "notes.xyz").write_text("nothing\nof the kind\n")
    sheet.find(FILE).set_input_files(tmp_path / "notes.xyz")
    expect(sheet.find("#race form")).to_contain_text("notes.xyz")
    sheet.press(START, "Enter")  # a click waits for two frames, which a page that nobody looks at may not draw
    expect(sheet.find(SAID)).to_contain_text("cannot be read as XYZ")
    (tmp_path / "large.xyz").write_text("x" * 2_000_001)
    sheet.find(FILE).set_input_files(tmp_path / "large.xyz")
    expect(sheet.find(SAID)).to_contain_text("larger than 2000 kB")
    expect(sheet.find(START)).to_be_disabled()


def test_nothing_was_asked_of_anybody_else_and_nothing_complained(live: Watched):
    address = live.sheet.evaluate("location.origin")
    assert all(url.startswith((address, "data:", "blob:")) for url in live.sheet.requests)
    assert live.sheet.complaints == []
    live.sheet.evaluate("document.activeElement.blur()")  # a page is not changed under a reader who is somewhere in it
    shutil.rmtree(live.run)
    expect(live.sheet.find(".lead >> nth=0")).to_contain_text("Waiting")
