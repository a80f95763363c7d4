"""The documentation site, built once and opened from disk: no network, nothing to complain of, search, phone width."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, Sheet

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index.html",
    "td3-day-and-night.html",
    "metric.html",
    "results.html",
    "reference/command-line.html",
    "reference/relaxing.html",
    "tutorials/swap-bfgs.html",
    "benchmarks/relaxation/index.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, chromium: Chromium) -> Path:  # noqa: ARG001  no browser, no build
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def sheet(chromium: Chromium) -> Iterator[Sheet]:
    opened = chromium.sheet()
    yield opened
    opened.close()


def go_to(sheet: Sheet, page: Path) -> None:
    sheet.events.clear()
    sheet.send("Page.navigate", url=page.as_uri())
    sheet.wait(f"location.href.startsWith({page.as_uri()!r}) && document.readyState === 'complete'")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_from_disk(site: Path, sheet: Sheet, name: str):
    sheet.resize(1280, 800)
    go_to(sheet, site / name)
    assert [address for address in sheet.requests if not address.startswith(("file:", "data:"))] == []
    assert sheet.complaints == []
    assert sheet.evaluate("[...document.images].filter((i) => !i.complete || i.naturalWidth === 0).length") == 0
    sheet.resize(390, 844)
    assert sheet.evaluate("document.documentElement.scrollWidth") <= 390


def test_search_works_without_a_server(site: Path, sheet: Sheet):
    sheet.resize(1280, 800)
    go_to(sheet, site / "index.html")
    sheet.evaluate(
        "(() => { const field = document.querySelector('.md-search__input'); field.focus();"
        " field.value = 'overestimation'; field.dispatchEvent(new Event('keyup', {bubbles: true}));"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    sheet.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    found = sheet.evaluate("[...document.querySelectorAll('.md-search-result__link')].map((e) => e.href)")
    assert any("diagnostics.html" in address for address in found)


def test_code_stands_beside_its_words_on_a_wide_screen(site: Path, sheet: Sheet):
    sheet.resize(1280, 800)
    go_to(sheet, site / "td3-day-and-night.html")
    sides = "[...document.querySelector('.beside').children].map((e) => e.getBoundingClientRect().left)"
    words, code = sheet.evaluate(sides)
    assert code > words + 100
    sheet.resize(390, 844)
    words, code = sheet.evaluate(sides)
    assert code == pytest.approx(words, abs=1)
