"""The live page in a browser: it follows the run and keeps the reader's place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from examples_for_pages import HOSTILE
from pictures import drawn
from playwright.sync_api import expect
from sheets import Sheet

from live_server import InThread
from relaxion.apps.report import live as live_module
from relaxion.apps.report.live import Board
from relaxion.apps.report.run import watched
from relaxion.apps.report.training import TrainingRuns
from training_runs import ATOMS, train_small

CURVE = "[data-part=curve]"


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
    order = live.sheet.evaluate("[...document.querySelectorAll('#parts > *')].map((e) => e.dataset.part)")
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
    live.sheet.readable()


def test_nothing_was_asked_of_anybody_else_and_nothing_complained(live: Watched):
    address = live.sheet.evaluate("location.origin")
    assert all(url.startswith((address, "data:", "blob:")) for url in live.sheet.requests)
    assert live.sheet.complaints == []
    live.sheet.evaluate("document.activeElement.blur()")  # a page is not changed under a reader who is somewhere in it
    shutil.rmtree(live.run)
    expect(live.sheet.find(".lead >> nth=0")).to_contain_text("Waiting")
