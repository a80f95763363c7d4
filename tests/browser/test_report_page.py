"""The report in a browser: nothing asked of anybody, atoms on the canvas, every button by keyboard, read by anyone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from chromium import Chromium, Sheet
from examples_for_pages import HOSTILE, relaxed_copper, thousand_atoms
from pictures import near, pixels

from relaxion.web.report_page import LARGEST_BYTES

COPPER, GOLD = (200, 128, 51), (255, 209, 35)
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
CALL = "document.querySelector('input[type=range]').value"
PLAY = "document.querySelector('.bar .main').textContent"
NO_WEBGL = """for (const kind of [HTMLCanvasElement, OffscreenCanvas]) {
  const before = kind.prototype.getContext;
  kind.prototype.getContext = function (name, ...rest) {
    return name.includes('webgl') ? null : before.call(this, name, ...rest);
  };
}"""
# name and role of everything a keyboard can reach, by the browser's own reckoning
NAMELESS = """[...document.querySelectorAll('button, input, select, summary, [tabindex="0"]')].filter((e) => {
  const label = e.getAttribute('aria-label') || (e.labels && [...e.labels].map((l) => l.textContent).join('')) ||
    e.textContent;
  return !label.trim();
}).map((e) => e.outerHTML)"""


def go_to(sheet: Sheet, call: int) -> None:
    sheet.evaluate(f"(() => {{ const r = document.querySelector('input[type=range]'); r.value = {call};"
                   "r.dispatchEvent(new Event('input')); })()")  # fmt: skip


def focus(sheet: Sheet, selector: str) -> None:
    sheet.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")


def test_opens_from_disk_and_asks_nobody_for_anything(report: Sheet, report_file: Path):
    assert report_file.stat().st_size < LARGEST_BYTES
    assert report.evaluate("location.protocol") == "file:"
    assert report.requests == []
    assert report.complaints == []
    assert report.evaluate("document.querySelector('h1').textContent").startswith("Au2Cu6 relaxed in ")


def test_the_network_is_forbidden_not_only_unused(report: Sheet):
    blocked = report.evaluate("fetch('https://example.org').then(() => 'reached', () => 'blocked')")
    assert blocked == "blocked"
    report.events.clear()  # the complaint about it is what was wanted


def test_whatever_a_file_says_is_text(report: Sheet):
    assert report.evaluate("window.hacked") is None
    shown = report.evaluate("document.body.innerText")
    assert HOSTILE in shown
    assert "a<b>&'c.xyz" in shown
    assert report.evaluate("document.querySelectorAll('main img').length") == 0


def test_the_canvas_shows_the_atoms(report: Sheet):
    go_to(report, 1)
    picture = pixels(report.picture_of(".stage"))
    assert near(picture, COPPER) > 2000
    assert near(picture, GOLD) > 500
    go_to(report, 100)
    assert report.evaluate(CALL) == report.evaluate("document.querySelector('input[type=range]').max")
    later = pixels(report.picture_of(".stage"))
    assert (abs(picture - later).sum(axis=2) > 60).sum() > 500, "the atoms have moved"


def test_arrows_can_be_switched_off(report: Sheet):
    go_to(report, 1)
    with_arrows = pixels(report.picture_of(".stage"))
    click = "document.querySelector('.tools input[type=checkbox]').click()"
    report.evaluate(click)
    without = pixels(report.picture_of(".stage"))
    report.evaluate(click)
    assert (abs(with_arrows - without).sum(axis=2) > 60).sum() > 50
    blue = (with_arrows[..., 2] > with_arrows[..., 0] + 40).sum() - (without[..., 2] > without[..., 0] + 40).sum()
    assert blue > 50


def test_play_step_and_jump_by_keyboard(report: Sheet):
    go_to(report, 1)
    focus(report, "[aria-label='One force call on']")
    report.press("Enter")
    assert report.evaluate(CALL) == "2"
    report.press(" ")
    assert report.evaluate(CALL) == "3"
    focus(report, "[aria-label='One force call back']")
    report.press("Enter")
    assert report.evaluate(CALL) == "2"
    focus(report, "input[type=range]")
    report.press("End")
    assert report.evaluate(CALL) == report.evaluate("document.querySelector('input[type=range]').max")
    report.press("Home")
    assert report.evaluate(CALL) == "1"
    focus(report, ".bar .main")
    report.press("Enter")
    assert report.evaluate(PLAY) == "Pause"
    report.press("Enter")
    assert report.evaluate(PLAY) == "Play"
    report.press("Enter")
    report.wait(f"{PLAY} === 'Again'")
    assert report.evaluate("document.querySelector('.film .state').textContent").startswith("converged, fmax 0.0")


def test_the_view_turns_and_plays_by_keyboard(report: Sheet):
    go_to(report, 1)
    focus(report, ".stage")
    before = pixels(report.picture_of(".stage"))
    report.press("ArrowRight")
    report.press("ArrowRight")
    turned = pixels(report.picture_of(".stage"))
    assert (abs(before - turned).sum(axis=2) > 60).sum() > 500
    report.press(" ")
    assert report.evaluate(PLAY) == "Pause"
    report.press(" ")
    assert report.evaluate(PLAY) == "Play"


def test_a_click_in_a_plot_shows_that_call(report: Sheet):
    go_to(report, 1)
    report.evaluate("""(() => { const p = document.querySelector('.plot'), r = p.getBoundingClientRect();
        p.dispatchEvent(new MouseEvent('click', {clientX: r.right - 15, clientY: r.top + 20, bubbles: true})); })()""")
    assert report.evaluate(CALL) == report.evaluate("document.querySelector('input[type=range]').max")


def test_curves_have_a_tolerance_and_their_numbers_as_a_table(report: Sheet):
    assert report.evaluate("document.querySelectorAll('.plot svg .limit').length") == 1
    label = report.evaluate("document.querySelector('.plot svg').getAttribute('aria-label')")
    assert "fmax (eV/Å) against force calls; Relaxion from " in label
    report.evaluate("document.querySelector('.part[data-kind=plot] summary').click()")
    report.wait("document.querySelector('.part[data-kind=plot] table') !== null")
    heads = report.evaluate("[...document.querySelectorAll('.part[data-kind=plot] thead th')].map(e => e.textContent)")
    report.evaluate("document.querySelector('.part[data-kind=plot] summary').click()")
    assert heads == ["force calls", "Relaxion", "BFGS", "FIRE"]


def test_a_screen_reader_finds_its_way(report: Sheet):
    assert report.evaluate(NAMELESS) == []
    assert report.evaluate("document.documentElement.lang") == "en"
    assert report.evaluate("document.querySelectorAll('h1').length") == 1
    assert report.evaluate("['header', 'main', 'footer'].every((tag) => document.querySelector(tag))")
    tables = report.evaluate("""[...document.querySelectorAll('table')].map((t) => [t.caption?.textContent,
        [...t.querySelectorAll('th')].every((h) => ['col', 'row'].includes(h.scope)),
        t.querySelectorAll('th').length])""")
    assert tables
    for caption, scoped, heads in tables:
        assert caption
        assert scoped
        assert heads > 3
    tree = report.send("Accessibility.getFullAXTree")["nodes"]
    found = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
    names = {name for _, name in found}
    assert ("slider", "Force call") in found
    assert ("button", "One force call on") in found
    assert any(role == "table" and "This run beside others" in name for role, name in found)
    assert any(role in ("image", "img") and name.startswith("Largest force: ") for role, name in found)
    assert {"Result", "The way down", "Structure", "How it was made"} <= names


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_light_and_dark_with_enough_contrast(report: Sheet, dark: bool):
    report.prefer(dark=dark, still=True)
    ground = pixels(report.screenshot())[2, 2]
    assert bool(ground.sum() < 120) is dark
    contrast = report.evaluate(CONTRAST)
    stage = pixels(report.picture_of(".stage"))[4, 20]
    report.prefer(dark=False, still=True)
    assert contrast["seen"] > 60
    assert contrast["bad"] == []
    assert bool(stage.sum() < 150) is dark, "the film follows the theme too"


def test_phone_width(report: Sheet):
    report.resize(390, 844)
    try:
        report.wait("document.querySelector('.plot svg').viewBox.baseVal.width < 390")
        assert report.evaluate("document.documentElement.scrollWidth") <= 390
        wide = report.evaluate("""[...document.querySelectorAll('.part, .stage, .bar, .plot, button, h1')].filter((e) =>
            e.getBoundingClientRect().right > 391 && !e.closest('.scroll')).map((e) => e.className)""")
        assert wide == []
        small = report.evaluate("""[...document.querySelectorAll('.bar button, .tools button')].filter((e) =>
            e.getBoundingClientRect().height < 32).length""")
        assert small == 0, "large enough for a finger"
    finally:
        report.resize(1280, 800)


def test_still_for_those_who_want_it_and_moving_for_the_others(opened, report_file: Path):
    sheet = opened(report_file, still=True)
    assert sheet.evaluate(PLAY) == "Play"
    assert sheet.evaluate("document.querySelector('.tools button').getAttribute('aria-pressed')") == "false"
    sheet.close = lambda: None  # the same sheet again, with another reader
    sheet.prefer(dark=False, still=False)
    sheet.open(report_file)
    assert sheet.evaluate("document.querySelector('.tools button').getAttribute('aria-pressed')") == "true"
    sheet.wait(f"Number({CALL}) >= 2")
    assert sheet.complaints == []


def test_a_thousand_atoms_stay_responsive(opened, tmp_path: Path):
    page = thousand_atoms().view().save(tmp_path / "large.html")
    assert page.stat().st_size < LARGEST_BYTES
    sheet = opened(page)
    began = time.perf_counter()
    for call in (2, 3, 1):
        go_to(sheet, call)
    seconds = time.perf_counter() - began
    assert near(pixels(sheet.picture_of(".stage")), COPPER) > 5000
    assert sheet.complaints == []
    assert seconds < 20, "three frames on a software renderer, on a machine that may be busy"


def test_without_webgl_the_rest_is_there(chromium: Chromium, report_file: Path):
    sheet = chromium.sheet()
    sheet.send("Page.addScriptToEvaluateOnNewDocument", source=NO_WEBGL)
    sheet.open(report_file)
    assert "offers no WebGL" in sheet.evaluate("document.querySelector('.stage').innerText")
    go_to(sheet, 2)
    assert sheet.evaluate("document.querySelector('.film .calls').textContent") == "2 force calls"
    sheet.wait("document.querySelectorAll('.plot svg').length === 2")
    sheet.close()


def test_notebook_shows_it_in_a_frame_of_its_own(opened, tmp_path: Path):
    notebook = tmp_path / "notebook.html"
    shown = relaxed_copper().view()._repr_html_()
    notebook.write_text(f"<!doctype html><html data-ready='true'><body>{shown}</body></html>", encoding="utf-8")
    sheet = opened(notebook)
    sheet.wait("document.querySelector('iframe') !== null")
    sheet.evaluate("new Promise((done) => setTimeout(done, 500))")
    for _ in range(40):
        picture = pixels(sheet.picture_of("iframe"))
        if near(picture, COPPER) > 2000:
            break
        time.sleep(0.5)
    assert near(picture, COPPER) > 2000
    assert sheet.evaluate("document.querySelector('iframe').contentDocument") is None, "sandboxed"
