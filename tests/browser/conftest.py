"""Pages in a real browser. Without Chromium these tests are skipped, but never in CI: there they fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.io import write
from chromium import Chromium, Sheet, find
from examples_for_pages import HOSTILE
from typer.testing import CliRunner

from relaxion.cli.app import app


@pytest.fixture(scope="module")  # not longer: a turning structure keeps a core busy, also where nobody looks
def chromium() -> Iterator[Chromium]:
    program = find()
    if program is None:
        words = "no Chromium here; 'make chromium' installs Debian's, or set RELAXION_CHROMIUM to one"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    with Chromium(program) as browser:
        yield browser


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
def report(chromium: Chromium, report_file: Path) -> Iterator[Sheet]:
    """The report, opened once for all tests that only look or put things back."""
    sheet = chromium.sheet()
    sheet.open(report_file)
    yield sheet
    sheet.close()


@pytest.fixture
def opened(chromium: Chromium) -> Iterator[Callable[..., Sheet]]:
    """Open a page in a sheet of its own: opened(path, width=390, dark=True)."""
    sheets = []

    def open_one(path: Path, **options: object) -> Sheet:
        sheet = chromium.sheet(**options)  # type: ignore[arg-type]
        sheets.append(sheet)
        sheet.open(path)
        return sheet

    yield open_one
    for sheet in sheets:
        sheet.close()
