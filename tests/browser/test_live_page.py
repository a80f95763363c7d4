"""The live page in a browser: it follows the run, keeps the reader's place, races what is dropped."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ase.build import bulk
from ase.io import write
from chromium import Chromium, Sheet
from examples_for_pages import HOSTILE
from pictures import drawn, near, pixels
from test_report_page import CONTRAST, COPPER, NAMELESS, focus

from relaxion.web import live_server
from relaxion.web.live_board import Board
from relaxion.web.live_server import InThread
from relaxion.web.watch_run import watched
from training_runs import ATOMS, train_small

LIVE = "document.documentElement?.dataset.ready === 'true' && document.documentElement.dataset.live === 'open'"
DOTS = "document.querySelectorAll('[data-part=curve] .plot circle').length"
SAID = "document.querySelector('#race .said').textContent"


class Watched(NamedTuple):
    sheet: Sheet
    run: Path
    rest: list[str]  # lines that are still to come
    assessment: str  # of its end


@pytest.fixture(scope="module")
def live(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = train_small(ATOMS, tmp_path_factory.mktemp("runs") / "atoms")
    (run / "result.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    assessment = (run / "assessment.json").read_text()
    (run / "assessment.json").unlink()
    live_server.SECONDS_BETWEEN_LOOKS, before = 0.1, live_server.SECONDS_BETWEEN_LOOKS
    with InThread(Board(watched([run]))) as server:
        sheet = chromium.sheet()
        time.sleep(0.5)
        sheet.send("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        sheet.wait(LIVE)
        yield Watched(sheet, run, lines[4:], assessment)
        sheet.close()
    live_server.SECONDS_BETWEEN_LOOKS = before


def test_it_follows_the_run_and_keeps_the_readers_place(live: Watched):
    sheet = live.sheet
    assert sheet.evaluate(DOTS) == 2
    assert sheet.evaluate("document.querySelectorAll('.gallery').length") == 0
    sheet.evaluate("window.same = document.querySelector('[data-part=curve] .plot')")
    sheet.evaluate("document.querySelector('[data-part=curve] summary').click()")
    focus(sheet, "[data-part=facts-0] button")
    with (live.run / "metrics.jsonl").open("a") as file:
        file.write("".join(live.rest))
    sheet.wait(f"{DOTS} === 3")
    assert sheet.evaluate("window.same.isConnected"), "the plot was redrawn, not exchanged"
    sheet.wait("document.querySelectorAll('[data-part=curve] tbody tr').length === 3")
    assert sheet.evaluate("document.activeElement.closest('[data-part]')?.dataset.part") == "facts-0"


def test_a_film_of_the_newest_assessment_comes(live: Watched):
    (live.run / "assessment.json").write_text(live.assessment)
    live.sheet.wait("document.querySelectorAll('.gallery canvas').length === 1")
    assert drawn(pixels(live.sheet.picture_of(".gallery .stage"))) > 1000
    order = live.sheet.evaluate("[...document.querySelectorAll('#training > *')].map((e) => e.dataset.part)")
    assert order.index("scatter-0") < order.index("worst-0") < order.index("citation")


def test_alarms_as_they_come_are_text(live: Watched):
    alarm = {"step": 96, "alarm": "wall", "event": "begins", "sentence": f"blocked against a wall: {HOSTILE}"}
    (live.run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    live.sheet.wait("document.querySelectorAll('.alarms li').length === 1")
    assert HOSTILE in live.sheet.evaluate("document.querySelector('.alarms').innerText")
    assert live.sheet.evaluate("window.hacked") is None
    live.sheet.wait("document.querySelectorAll('.gauge.bad').length === 1")


def test_a_run_that_ends_says_so(live: Watched):
    (live.run / "result.json").write_text('{"steps": 96}')
    live.sheet.wait("document.querySelector('.lead').textContent.includes('Finished at step 96')")


def test_readable_by_everybody(live: Watched):
    sheet = live.sheet
    for tab in ("race", "training"):
        sheet.evaluate(f"document.getElementById('tab-{tab}').click()")
        assert sheet.evaluate(NAMELESS) == []
        for dark in (True, False):
            sheet.prefer(dark=dark, still=True)
            assert sheet.evaluate(CONTRAST)["bad"] == []
        sheet.resize(390, 844)
        assert sheet.evaluate("document.documentElement.scrollWidth") <= 390
        sheet.resize(1280, 800)
    focus(sheet, "#tab-training")
    sheet.press("ArrowRight")
    assert sheet.evaluate("document.activeElement.id") == "tab-race"
    assert sheet.evaluate("[document.getElementById('training').hidden, document.getElementById('race').hidden]") == [
        True,
        False,
    ]
    roles = sheet.evaluate("[...document.querySelectorAll('[role=tab]')].map((e) => e.getAttribute('aria-selected'))")
    assert roles == ["false", "true"]


def test_a_chosen_file_races_with_films_in_step(live: Watched, tmp_path: Path):
    sheet = live.sheet
    atoms = bulk("Cu", a=3.7, cubic=True)
    atoms.rattle(0.1, seed=3)
    write(tmp_path / "a<b>.xyz", atoms, format="xyz", comment=HOSTILE)
    sheet.evaluate("document.getElementById('tab-race').click()")
    give(sheet, tmp_path / "a<b>.xyz")
    sheet.wait("!document.querySelector('#race [type=submit]').disabled")
    focus(sheet, "#race [type=submit]")
    sheet.press("Enter")
    sheet.wait("document.querySelectorAll('#race .stage canvas').length === 3", seconds=120)
    assert sheet.evaluate(SAID).startswith("Relaxion wins with ")
    assert HOSTILE in sheet.evaluate("document.querySelector('#race').innerText")
    assert sheet.evaluate("window.hacked") is None
    focus(sheet, "#race [aria-label='One force call on']")
    sheet.press("Enter")
    counts = sheet.evaluate("[...document.querySelectorAll('#race .film .calls b')].map((e) => e.textContent)")
    assert counts == ["2", "2", "2"]
    assert near(pixels(sheet.picture_of("#race .stage")), COPPER) > 300
    assert sheet.evaluate(CONTRAST)["bad"] == []


def test_what_is_no_structure_and_what_is_too_large_say_so(live: Watched, tmp_path: Path):
    sheet = live.sheet
    (tmp_path / "notes.xyz").write_text("nothing\nof the kind\n")
    give(sheet, tmp_path / "notes.xyz")
    sheet.wait("document.querySelector('#race form').innerText.includes('notes.xyz')")
    sheet.wait("!document.querySelector('#race [type=submit]').disabled")
    sheet.evaluate("document.querySelector('#race [type=submit]').click()")
    sheet.wait(f"{SAID}.includes('cannot be read as XYZ')", seconds=120)
    (tmp_path / "large.xyz").write_text("x" * 2_000_001)
    give(sheet, tmp_path / "large.xyz")
    sheet.wait(f"{SAID}.includes('larger than 2000 kB')")
    assert sheet.evaluate("document.querySelector('#race [type=submit]').disabled")


def test_nothing_was_asked_of_anybody_else_and_nothing_complained(live: Watched):
    address = live.sheet.evaluate("location.origin")
    assert all(url.startswith((address, "data:", "blob:")) for url in live.sheet.requests)
    assert live.sheet.complaints == []
    live.sheet.evaluate("document.activeElement.blur()")  # a page is not changed under a reader who is somewhere in it
    shutil.rmtree(live.run)
    live.sheet.wait("document.querySelector('.lead').textContent.includes('Waiting')")


def give(sheet: Sheet, path: Path) -> None:
    """Choose a file as the browser's own dialogue would."""
    root = sheet.send("DOM.getDocument")["root"]["nodeId"]
    node = sheet.send("DOM.querySelector", nodeId=root, selector="#race input[type=file]")["nodeId"]
    sheet.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])
