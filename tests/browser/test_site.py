"""The documentation site, built once and opened from disk: no network, nothing to complain of, search, phone width."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from sheets import Sheet

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index.html",
    "td3-day-and-night.html",
    "how-it-works.html",
    "results/relaxing.html",
    "reference/command-line.html",
    "reference/python.html",
    "tutorials/relax-my-structure.html",
    "benchmarks/relaxation/index.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Path:  # noqa: ARG001  no browser, no build
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def go_to(sheet: Sheet, page: Path) -> None:
    sheet.requests.clear()
    sheet.complaints.clear()
    sheet.desktop()
    sheet.page.goto(page.as_uri())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_from_disk(site: Path, sheet: Sheet, name: str):
    go_to(sheet, site / name)
    assert [address for address in sheet.requests if not address.startswith(("file:", "data:"))] == []
    assert sheet.complaints == []
    assert sheet.evaluate("[...document.images].filter((i) => !i.complete || i.naturalWidth === 0).length") == 0
    sheet.phone()


def test_search_works_without_a_server(site: Path, sheet: Sheet):
    go_to(sheet, site / "index.html")
    sheet.find(".md-search__input").fill("overestimation")
    expect(sheet.find(".md-search-result__item")).not_to_have_count(0)
    found = sheet.evaluate("[...document.querySelectorAll('.md-search-result__link')].map((e) => e.href)")
    assert any("diagnostics.html" in address for address in found)


def test_code_stands_beside_its_words_on_a_wide_screen(site: Path, sheet: Sheet):
    go_to(sheet, site / "td3-day-and-night.html")
    sides = "[...document.querySelector('.beside').children].map((e) => e.getBoundingClientRect().left)"
    words, code = sheet.evaluate(sides)
    assert code > words + 100
    sheet.phone()
    words, code = sheet.evaluate(sides)
    assert code == pytest.approx(words, abs=1)
