"""The report in a browser: nothing asked of anybody, atoms on the canvas, every button by keyboard, read by anyone."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.constraints import FixAtoms
from examples_for_pages import HOSTILE, relaxed_copper, thousand_atoms
from pictures import COPPER, GOLD, changed, drawn, near, painted, pixels
from playwright.sync_api import Browser, expect
from sheets import CONTRAST, NAMELESS, Sheet, go_to

import relaxion
from relaxion.apps.report.page import LARGEST_BYTES
from relaxion.apps.report.relaxation import RelaxationReport, relaxation_page
from relaxion.train.judge.runs import Reading, Run

PLAY, SLIDER, PLOT = ".bar .main", "input[type=range]", ".plot >> nth=0"
NO_WEBGL = """for (const kind of [HTMLCanvasElement, OffscreenCanvas]) {
  const before = kind.prototype.getContext;
  kind.prototype.getContext = function (name, ...rest) {
    return name.includes('webgl') ? null : before.call(this, name, ...rest);
  };
}"""


def last_call(sheet: Sheet) -> str:
    return sheet.evaluate("document.querySelector('input[type=range]').max")


def test_opens_from_disk_and_asks_nobody_for_anything(report: Sheet, report_file: Path):
    assert report_file.stat().st_size < LARGEST_BYTES
    assert report.page.url.startswith("file:")
    assert (report.requests, report.complaints) == ([], [])
    expect(report.find("h1")).to_have_text(re.compile("^Au2Cu6 relaxed in "))


def test_the_network_is_forbidden_not_only_unused(report: Sheet):
    blocked = report.evaluate("fetch('https://example.org').then(() => 'reached', () => 'blocked')")
    assert blocked == "blocked"
    report.until(lambda: len(report.complaints) > 0)  # the complaint about it is what was wanted
    report.complaints.clear()
    report.requests.clear()


def test_whatever_a_file_says_is_text(report: Sheet):
    assert report.evaluate("window.hacked") is None
    expect(report.find("body")).to_contain_text(HOSTILE)
    expect(report.find("body")).to_contain_text("a<b>&'c.xyz")
    expect(report.find("main img")).to_have_count(0)


def test_the_canvas_shows_the_atoms(report: Sheet):
    go_to(report, 1)
    picture = report.picture(".stage")
    assert near(picture, COPPER) > 2000
    assert near(picture, GOLD) > 500
    go_to(report, 100)
    expect(report.find(SLIDER)).to_have_value(last_call(report))
    report.until(lambda: changed(picture, report.picture(".stage")) > 500)  # the atoms have moved


def test_arrows_can_be_switched_off(report: Sheet):
    go_to(report, 1)
    with_arrows = report.picture(".stage")
    box = report.find(".tools input[type=checkbox] >> nth=0")
    box.uncheck()
    report.until(lambda: changed(with_arrows, report.picture(".stage")) > 50)
    without = report.picture(".stage")
    box.check()
    blue = (with_arrows[..., 2] > with_arrows[..., 0] + 40).sum() - (without[..., 2] > without[..., 0] + 40).sum()
    assert blue > 50


def test_play_step_and_jump_by_keyboard(report: Sheet):
    go_to(report, 1)
    slider = report.find(SLIDER)
    report.press("[aria-label='One force call on']", "Enter")
    expect(slider).to_have_value("2")
    report.page.keyboard.press(" ")
    expect(slider).to_have_value("3")
    report.press("[aria-label='One force call back']", "Enter")
    expect(slider).to_have_value("2")
    report.press(SLIDER, "End")
    expect(slider).to_have_value(last_call(report))
    report.page.keyboard.press("Home")
    expect(slider).to_have_value("1")
    report.press(PLAY, "Enter")
    expect(report.find(PLAY)).to_have_text(re.compile("Pause|Again"))
    expect(report.find(PLAY)).to_have_text("Replay")
    expect(report.find(".film .state")).to_have_text(re.compile("^converged, fmax 0.0"))


def test_playing_can_be_paused(report: Sheet):
    report.evaluate("Relaxion.page.clock.secondsPerCall = 1e6")
    go_to(report, 1)
    for selector, key in ((PLAY, "Enter"), (".stage", " ")):
        report.press(selector, key)
        expect(report.find(PLAY)).to_have_text("Pause")
        report.page.keyboard.press(key)
        expect(report.find(PLAY)).to_have_text("Play")
    report.evaluate("Relaxion.page.clock.secondsPerCall = 0.1")


def test_the_view_turns_by_keyboard(report: Sheet):
    go_to(report, 1)
    before = report.picture(".stage")
    report.press(".stage", "ArrowRight", "ArrowRight")
    report.until(lambda: changed(before, report.picture(".stage")) > 500)


def test_a_click_in_a_plot_shows_that_call(report: Sheet):
    go_to(report, 1)
    box = report.find(PLOT).bounding_box()
    assert box is not None
    report.find(PLOT).click(position={"x": box["width"] - 15, "y": 20})
    expect(report.find(SLIDER)).to_have_value(last_call(report))


def test_the_numbers_under_the_mouse_are_read_out(report: Sheet):
    report.find(PLOT).hover(position={"x": 80, "y": 60})
    expect(report.find(".readout >> nth=0")).to_have_text(re.compile(r"^force calls 2Relaxion 0\.\d+BFGS 3\.\d+FIRE 3"))
    report.find("h1").hover()
    expect(report.find(".readout >> nth=0")).to_be_hidden()


def test_curves_are_drawn_in_their_colours_beside_the_tolerance(report: Sheet):
    expect(report.find("ul.legend >> nth=0").locator("li")).to_have_text(
        ["Relaxion", "BFGS", "FIRE", "tolerance 0.05 eV/Å"]
    )
    for dark in (True, False):
        report.prefer(dark=dark)
        for name in ("s0", "s1", "s2", "good"):
            colour = report.evaluate(f"Relaxion.colour('{name}')")
            report.until(lambda colour=colour: painted(report.picture(PLOT), colour) > 15)


def test_the_numbers_of_a_curve_are_there_as_a_table(report: Sheet):
    expect(report.find(PLOT)).to_have_attribute(
        "aria-label", re.compile("fmax .eV/Å. against force calls; Relaxion from ")
    )
    report.find(".part[data-kind=plot] summary >> nth=0").click()
    expect(report.find(".part[data-kind=plot] thead th")).to_have_text(["force calls", "Relaxion", "BFGS", "FIRE"])
    report.find(".part[data-kind=plot] summary >> nth=0").click()


def test_marks_of_an_axis_show_what_they_are(report: Sheet):
    marks = "[0, 0.25, 0.5, 0.75].map((value) => Relaxion.whole(value, 0.25))"
    assert report.evaluate(marks) == ["0.00", "0.25", "0.50", "0.75"]
    assert report.evaluate("[Relaxion.whole(20000), Relaxion.whole(-1.5, 0.5)]") == ["20\u202f000", "−1.5"]


def test_options_of_a_command_are_not_broken(report: Sheet):
    """On a phone too a line ends between two words. The command on the page is that of whoever runs the tests."""
    report.phone()
    broken = report.evaluate("""(() => {
        const code = document.querySelector('.code code');
        code.replaceChildren(...Relaxion.words('relaxion relax a-long-name-of-a-structure.xyz --compare BFGS --report'
            + ' --pressure 5 --out another-long-name --leave-saddles --allow-unseen --model sevennet', /(\\S+)/));
        const names = [...code.querySelectorAll('.name')].filter((e) => e.textContent.startsWith('--'));
        return [names.length, names.filter((e) => e.offsetHeight > 30).map((e) => e.textContent)];
    })()""")
    report.desktop()
    assert broken == [7, []]


@pytest.mark.parametrize("shape", ["molecule", "tall cell"])
def test_a_structure_fills_its_picture_and_is_not_cut(opened, tmp_path: Path, shape: str):
    """From the first frame to the last, whatever its shape."""
    atoms = Atoms("OH2", [(0, 0, 0), (0.96, 0, 0), (-0.24, 0.93, 0)])
    if shape == "tall cell":
        atoms = Atoms("Cu2", [(0, 0, 0), (2.5, 0, 2.5)], cell=(5, 5, 25), pbc=True)
    run = Run("converged", 1, 0.0, 0.01, 1.0, final=atoms, readings=(Reading(1, 0.0, 0.01),))
    told = RelaxationReport(shape, atoms, run, 0.05, "emt", "none", False)
    sheet = opened(relaxation_page(told).save(tmp_path / "shape.html"))
    sheet.until(lambda: drawn(sheet.picture(".stage")) > 500)
    picture = sheet.picture(".stage")
    seen = np.abs(picture[5:-5, 5:-5] - picture[8, 8]).sum(axis=2) > 60
    rows, columns = (np.flatnonzero(seen.any(axis=axis)) for axis in (1, 0))
    assert rows[0] > 1
    assert rows[-1] < len(seen) - 2
    assert max(np.ptp(rows), np.ptp(columns)) > 0.45 * len(seen)
    labels = " ".join(sheet.texts(".facts dt"))
    assert ("Space group" in labels) is (shape == "tall cell")


def test_atoms_that_are_held_are_faint(opened, tmp_path: Path):
    seen = []
    for held in ([], [0]):
        atoms = Atoms("Cu2", [(0, 0, 0), (0, 0, 3)], constraint=FixAtoms(held))
        run = Run("converged", 1, 0.0, 0.01, 1.0, final=atoms, readings=(Reading(1, 0.0, 0.01),))
        told = RelaxationReport("held", atoms, run, 0.05, "emt", "none", False)
        sheet = opened(relaxation_page(told).save(tmp_path / f"{len(held)}.html"))
        sheet.until(lambda sheet=sheet: drawn(sheet.picture(".stage")) > 500)
        seen.append(near(sheet.picture(".stage"), COPPER, 0.05))
    assert seen[1] < 0.8 * seen[0]


def test_rejected_points_are_hollow_and_gaps_stay_open(opened, tmp_path: Path):
    """Five calls, the third rejected, the fourth without an answer."""
    readings = [Reading(1, 0.0, 5.0), Reading(2, -1.0, 1.0), Reading(3, 2.0, 8.0, accepted=False),
                Reading(4, None, None), Reading(5, -2.0, 0.01)]  # fmt: skip
    atoms = Atoms("Cu2", [(0, 0, 0), (0, 0, 2.2)])
    run = Run("converged", 5, -2.0, 0.01, 1.0, final=atoms, readings=tuple(readings))
    sheet = opened(
        relaxation_page(RelaxationReport("five", atoms, run, 0.05, "emt", "none", False)).save(tmp_path / "5.html")
    )
    blue = sheet.evaluate("Relaxion.colour('s0')")
    sheet.until(lambda: painted(sheet.picture(PLOT), blue) > 100)
    area = sheet.find(".u-over >> nth=0").evaluate("(e) => [e.offsetLeft, e.offsetWidth]")
    third, fourth = (area[0] + round(share * area[1]) for share in (0.5, 0.75))
    picture = sheet.picture(PLOT)
    top = next(row for row in range(len(picture)) if painted(picture[row : row + 1, third : third + 1], blue))
    assert picture[top + 4, third].sum() > 700, "white inside a ring of eight pixels"
    assert painted(picture[:, third + 10 : fourth + 10], blue) == 0
    assert sheet.complaints == []


def test_a_screen_reader_finds_its_way(report: Sheet):
    assert report.evaluate(NAMELESS) == []
    assert report.evaluate("document.documentElement.lang") == "en"
    expect(report.find("h1")).to_have_count(1)
    assert report.evaluate("['header', 'main', 'footer'].every((tag) => document.querySelector(tag))")
    tables = report.evaluate("""[...document.querySelectorAll('table')].map((t) => [t.caption?.textContent,
        [...t.querySelectorAll('th')].every((h) => ['col', 'row'].includes(h.scope)),
        t.querySelectorAll('th').length])""")
    assert tables
    for caption, scoped, heads in tables:
        assert caption
        assert scoped
        assert heads > 3
    page = report.page
    expect(page.get_by_role("slider", name="Force call", exact=True)).to_have_count(1)
    expect(page.get_by_role("button", name="One force call on")).to_have_count(1)
    expect(page.get_by_role("table", name="Comparison with other optimizers")).to_have_count(1)
    expect(page.get_by_role("img", name=re.compile("^Largest force: "))).to_have_count(1)
    for name in ("Result", "Relaxation", "Structure", "How it was made"):
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_light_and_dark_with_enough_contrast(report: Sheet, dark: bool):
    report.prefer(dark=dark)
    report.until(lambda: bool(report.picture(".stage")[4, 20].sum() < 150) is dark)  # the film follows the theme too
    ground = pixels(report.page.screenshot())[2, 2]
    contrast = report.evaluate(CONTRAST)
    report.prefer(dark=False)
    assert bool(ground.sum() < 120) is dark
    assert contrast["seen"] > 60
    assert contrast["bad"] == []


def test_phone_width(report: Sheet):
    report.phone()
    try:
        report.until(lambda: report.evaluate("document.querySelector('.uplot').clientWidth") < 390)
        wide = report.evaluate("""[...document.querySelectorAll('.part, .stage, .bar, .plot, button, h1')].filter((e) =>
            e.getBoundingClientRect().right > 391 && !e.closest('.scroll')).map((e) => e.className)""")
        assert wide == []
        small = report.evaluate("""[...document.querySelectorAll('.bar button, .tools button')].filter((e) =>
            e.getBoundingClientRect().height < 32).length""")
        assert small == 0, "large enough for a finger"
    finally:
        report.desktop()


def test_still_for_those_who_want_it_and_moving_for_the_others(opened, report_file: Path):
    sheet = opened(report_file, still=True)
    turn = sheet.find(".tools button >> nth=0")
    expect(sheet.find(PLAY)).to_have_text("Play")
    expect(turn).to_have_attribute("aria-pressed", "false")
    sheet.prefer(dark=False, still=False)
    sheet.open(report_file)
    expect(turn).to_have_attribute("aria-pressed", "true")
    expect(sheet.find(SLIDER)).not_to_have_value("1")
    assert sheet.complaints == []


def test_a_thousand_atoms_are_drawn(opened, tmp_path: Path):
    page = relaxion.report(thousand_atoms()).save(tmp_path / "large.html")
    assert page.stat().st_size < LARGEST_BYTES
    sheet = opened(page)
    for call in (2, 3, 1):
        go_to(sheet, call)
    assert near(sheet.picture(".stage"), COPPER) > 5000
    assert sheet.complaints == []


def test_without_webgl_the_rest_is_there(chromium: Browser, report_file: Path):
    sheet = Sheet(chromium)
    sheet.page.add_init_script(NO_WEBGL)
    sheet.open(report_file)
    expect(sheet.find(".stage")).to_contain_text("offers no WebGL")
    go_to(sheet, 2)
    expect(sheet.find(".film .calls")).to_have_text("2 force calls")
    expect(sheet.find(".plot canvas")).to_have_count(2)
    sheet.page.close()


def test_notebook_shows_it_in_a_frame_of_its_own(opened, tmp_path: Path):
    notebook = tmp_path / "notebook.html"
    shown = relaxion.report(relaxed_copper())._repr_html_()
    notebook.write_text(f"<!doctype html><html data-ready='true'><body>{shown}</body></html>", encoding="utf-8")
    sheet = opened(notebook)
    sheet.until(lambda: near(sheet.picture("iframe"), COPPER) > 2000)
    assert sheet.evaluate("document.querySelector('iframe').contentDocument") is None, "sandboxed"
