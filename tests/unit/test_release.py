"""What a release says in several places is the same everywhere: version, dependencies, Python, torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from relaxion import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "vesin": "python-vesin"}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def torch_pin() -> str:
    return re.search(r"^torch==(\S+)$", text("constraints.txt"), re.MULTILINE)[1]


def test_one_version_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in text("CITATION.cff")
    assert f'version: "{__version__}"' in text("packaging/conda/meta.yaml")
    newest = re.search(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.MULTILINE)
    assert newest[1] == __version__
    assert f"date-released: {newest[2]}\n" in text("CITATION.cff")


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.*)$", text("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    run = re.search(r"^  run:\n((?:    - .*\n)+)", text("packaging/conda/meta.yaml"), re.MULTILINE)[1]
    asked = {tuple(line.removeprefix("    - ").split(maxsplit=1)) for line in run.splitlines()}
    parts = [re.fullmatch(r"([\w-]+)(\S*)", word).groups() for word in PROJECT["dependencies"]]
    wanted = {(CONDA_NAMES.get(name, name), bound) for name, bound in parts}
    assert asked == wanted | {("python", PROJECT["requires-python"])}
    assert "entry_points:\n    - relaxion = " + PROJECT["scripts"]["relaxion"] in text("packaging/conda/meta.yaml")


def test_the_image_takes_the_pinned_torch_and_extras_that_exist() -> None:
    dockerfile = text("packaging/Dockerfile")
    assert f"torch=={torch_pin()} " in dockerfile
    extras = re.search(r"/tmp/relaxion\[([\w,]+)\]", dockerfile)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert re.search(r"FROM python:3\.(\d+)-slim", dockerfile)[1] in minors()


def minors() -> list[str]:
    """Of the Pythons the package says it is for."""
    named = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", word) for word in PROJECT["classifiers"]]
    return [found[1] for found in named if found]


def test_pythons_that_are_named() -> None:
    assert PROJECT["requires-python"] == f">=3.{minors()[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_install_lines_name_extras_that_exist(page: str) -> None:
    named = {
        extra for group in re.findall(r"pip install '[^']*\[([\w,]+)\]'", text(page)) for extra in group.split(",")
    }
    assert named <= set(PROJECT["optional-dependencies"])
