"""Pages in Debian's Chromium, driven by Playwright. Without Chromium these tests are skipped, but never in CI: there
they fail. No test depends on speed: whatever takes its time is waited for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.io import write
from examples_for_pages import HOSTILE
from playwright.sync_api import Browser, expect, sync_playwright
from sheets import PATIENCE_MS, Sheet
from typer.testing import CliRunner

from relaxion.apps.cli.app import app

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # as root there is no other way
    "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",  # WebGL in software
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars",
)  # fmt: skip
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")  # not longer: a turning structure keeps a core busy, also where nobody looks
def chromium() -> Iterator[Browser]:
    program = os.environ.get("RELAXION_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        words = "no Chromium here; 'make chromium' installs Debian's, or set RELAXION_CHROMIUM to one"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages that the tests look at, written by the command line."""
    folder = tmp_path_factory.mktemp("pages")
    atoms = bulk("Cu", a=3.7, cubic=True) * (2, 1, 1)
    atoms.symbols[[1, 6]] = "Au"
    atoms.positions += np.random.default_rng(3).normal(0, 0.15, atoms.positions.shape)
    atoms.info["comment"] = HOSTILE
    name = "a<b>&'c.xyz"
    write(folder / name, atoms, format="extxyz")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for arguments in (
            ["relax", name, "--compare", "BFGS,FIRE", "--report", "--out", "out", "--quiet"],
            ["race", name, "--with", "BFGS,FIRE", "--out", "race.html", "--quiet"],
        ):
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.stderr
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(scope="session")
def report_file(made: Path) -> Path:
    (page,) = made.glob("out/*/report.html")
    return page


@pytest.fixture(scope="session")
def race_file(made: Path) -> Path:
    return made / "race.html"


@pytest.fixture(scope="module")
def sheet(chromium: Browser) -> Iterator[Sheet]:
    """An empty one for all tests of a module."""
    made = Sheet(chromium)
    yield made
    made.page.close()


@pytest.fixture(scope="module")
def report(sheet: Sheet, report_file: Path) -> Sheet:
    """The report, opened once for all tests that only look or put things back."""
    return sheet.open(report_file)


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[..., Sheet]]:
    """Open a page in a sheet of its own: opened(path, dark=True)."""
    sheets: list[Sheet] = []

    def open_one(path: Path, **options: bool) -> Sheet:
        sheets.append(Sheet(chromium, **options))
        return sheets[-1].open(path)

    yield open_one
    for made in sheets:
        made.page.close()
