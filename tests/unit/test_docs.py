"""What the documents point at exists, and they read well: no long lines, nothing cited that people cannot find."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("examples/*.md")]
)
WRITTEN = [page for page in PAGES if "benchmarks" not in page.parts]


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def requirements() -> list[dict[str, Any]]:
    groups = tomllib.loads((ROOT / "tests/requirements.toml").read_text())["group"]
    return [one for group in groups for one in group["requirement"]]


def test_requirements_name_tests_that_exist():
    named = [test for one in requirements() for test in one["tests"]]
    assert len(named) > 40
    for test in named:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), test


def test_every_requirement_cited_is_in_the_list():
    listed = {one.get("id") for one in requirements()}
    cited = {
        (path.name, requirement)
        for folder in ("src", "tests", "docs")
        for path in (ROOT / folder).rglob("*.[pm][yd]")
        for requirement in re.findall(r"\bR\d+\.\d+\b", path.read_text())
    }
    assert len(cited) > 40
    assert sorted((file, requirement) for file, requirement in cited if requirement not in listed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_cite_nothing_that_people_cannot_find(page: Path):
    text = without_code(page.read_text())
    assert not re.search(r"\.\./shared|\bissue \d", text)
    if page.name != "CHANGELOG.md":
        assert re.findall(r"\bR\d+\.\d+\b", text) == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_text_are_short(page: Path):
    text = without_code(page.read_text())
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
    assert long == []


def test_the_pages_can_be_read_in_an_hour():
    """Without what is filled when the site is built."""
    pages = [page for page in WRITTEN if (page.name == "README.md" and page.parent == ROOT) or "docs" in page.parts]
    words = {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in pages}
    counted = {name: number for name, number in words.items() if not name.startswith("docs/reference/")}
    assert sum(counted.values()) <= 16_000, counted
    assert {name: number for name, number in counted.items() if "tutorials/" in name and number > 700} == {}


def test_decisions_are_short_and_dated():
    records = (ROOT / "docs/decisions.md").read_text().split("\n## ")[1:]
    assert len(records) > 5
    for record in records:
        heading, words = record.split("\n", 1)
        assert re.match(r"20\d\d-\d\d-\d\d: ", heading)
        assert len(words.split()) <= 120, heading
