"""What the documents point at exists, and they read well: no long lines, nothing cited that people cannot find."""

import re
from pathlib import Path

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


def test_requirements_name_tests_that_exist():
    references = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/requirements.md").read_text())
    assert len(references) > 40
    for file, name in references:
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_requirement_cited_is_in_the_list():
    listed = set(re.findall(r"\*\*(R\d+\.\d+)\*\*", (ROOT / "docs/requirements.md").read_text()))
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
    if page.name not in ("requirements.md", "CHANGELOG.md"):
        assert re.findall(r"\bR\d+\.\d+\b", text) == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_text_are_short(page: Path):
    text = without_code(page.read_text())
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
    assert long == []
