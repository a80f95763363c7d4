"""Every tutorial of the documentation runs, and prints what its page shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import relaxion

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from tutorial_outputs import TUTORIALS, names  # noqa: E402  a script beside the package, not part of it

SMALL = {  # much less than on the page, so that the tests are quick
    "train_on_my_potential": ("--steps", "72", "--starts", "2"),
    "compare_agents": ("--pendulum-steps", "1004", "--atom-steps", "144", "--starts", "2"),
    "add_an_agent": ("--steps", "260"),
    "make_alloys": ("--number", "20"),
    "search_a_cluster": ("--calls", "150"),
}


def without_numbers(text: str) -> list[str]:
    """The words of each line; how many lines there are may depend on the number of force calls."""
    lines = (" ".join(re.sub(r"[-+]?\d[\d.e-]*", "0", line).split()) for line in text.splitlines())
    return list(dict.fromkeys(re.sub(r"by (policy|springs|plain|fire)", "by method", line) for line in lines))


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", text)]


def printed(name: str, *options: str) -> str:
    """What a tutorial prints; in this process, which has loaded torch and ASE already."""
    out, before, argv = io.StringIO(), list(sys.path), sys.argv
    sys.argv = [f"{name}.py", *options]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name="__main__")
    finally:
        sys.path[:], sys.argv = before, argv
    return out.getvalue()


@pytest.mark.parametrize("name", names())
def test_runs_and_says_what_its_page_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Words; and numbers to 2 % or 0.005, force calls exactly, where all of the page is run."""
    shown = (TUTORIALS / "outputs" / f"{name}.txt").read_text()
    monkeypatch.chdir(tmp_path)
    now = printed(name, *SMALL.get(name, ()))
    assert without_numbers(now) == without_numbers(shown)
    if name not in SMALL:
        assert numbers(now) == pytest.approx(numbers(shown), rel=0.02, abs=0.005)


def test_the_notebook_runs_and_shows_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "relaxion.ipynb").read_text())["cells"]
    codes, names_of_cells = [cell for cell in cells if cell["cell_type"] == "code"], {}
    for cell in codes:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec("".join(cell["source"]), names_of_cells)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert without_numbers(out.getvalue()) == without_numbers(shown)
        assert numbers(out.getvalue()) == pytest.approx(numbers(shown), rel=0.02)
    assert len(codes) == 4
    assert relaxion.report(names_of_cells["opt"])._repr_html_().startswith("<iframe")


def test_the_page_of_the_swap_shows_a_gain():
    shown = (TUTORIALS / "outputs" / "swap_bfgs.txt").read_text()
    calls = [int(count) for count in re.findall(r"(\d+) force calls", shown)]
    assert calls[1] < calls[0]


def test_every_tutorial_has_a_page_that_links_its_script_and_shows_code_and_output():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md"))
    for name in names():
        assert f"](../../examples/tutorials/{name}.py)" in pages
        assert f"<!-- code: examples/tutorials/{name}.py" in pages
        assert f"<!-- output: examples/tutorials/outputs/{name}.txt -->" in pages
