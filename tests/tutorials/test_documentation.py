"""Pages show the code as it is; links, navigation, the pictures."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_links  # noqa: E402  scripts beside the package, not part of it
import fill_pages  # noqa: E402
from documentation.api import described, wrapped  # noqa: E402
from documentation.command_line import reference  # noqa: E402
from documentation.learning import below, runs_of, table, turned, worst_later  # noqa: E402
from documentation.outside import everything_linked, pages, relinked  # noqa: E402
from documentation.pieces import filled  # noqa: E402
from documentation.prose import anchors, links  # noqa: E402
from documentation.sources import NoSuchName, code_of  # noqa: E402
from relaxion.apps.cli.app import app  # noqa: E402
from relaxion.train.diagnostics import DIAGNOSTICS, RULES  # noqa: E402


def repository(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class TestPieces:
    def test_code_is_cut_out_by_name(self):
        text = filled(ROOT, "before\n\n<!-- code: src/relaxion/train/agents/sac.py SAC.explore -->\n\nafter")
        assert code_of(ROOT / "src/relaxion/train/agents/sac.py", "SAC.explore") in text
        assert "@torch.no_grad()\ndef explore(self" in text
        assert "def update" not in text
        assert text.endswith("```\n\n<!-- end -->\n\nafter")

    def test_an_old_piece_is_replaced_and_a_page_filled_twice_is_the_same(self):
        first, second = ("<!-- code: tools/documentation/sources.py text_of -->", "<!-- brief -->")
        once = filled(ROOT, f"{first}\n\nof yesterday\n\n<!-- end -->\n\nwords\n{second}")
        assert "of yesterday" not in once
        assert once.count("<!-- end -->") == 2
        assert "\n\nwords\n" in once
        assert filled(ROOT, once) == once

    def test_a_name_that_is_gone_is_an_error(self):
        with pytest.raises(NoSuchName, match=r"has no 'TD3\.gone'; there are: .*explore"):
            filled(ROOT, "<!-- code: src/relaxion/train/agents/td3.py TD3.gone -->")

    @pytest.mark.parametrize("page", fill_pages.pages(), ids=lambda page: page.name)
    def test_a_page_shows_the_code_as_it_is(self, page: Path):
        assert filled(ROOT, page.read_text()) == page.read_text(), "run python tools/fill_pages.py"

    def test_a_learning_curve_tells_how_fast_and_how_surely(self):
        curve = [[0, 60.0, 50.0], [4000, 9.0, 8.0], [8000, 5.0, 6.0], [12000, 12.0, 9.0], [16000, 5.5, 7.0]]
        assert below({"curve": curve}, 10.0) == 4000
        assert below({"curve": curve}, 5.0) is None
        assert worst_later({"curve": curve}) == 1.5  # by the validation starts

    def test_seeds_that_never_got_there_are_counted(self, tmp_path: Path):
        def run(calls: float) -> str:
            seconds = 90 if calls == 4.0 else None  # of some runs it was not kept
            own = {"kept_force_calls_mean": calls, "kept_success_rate": 0.98, "cpu_seconds": seconds, "steps": 8064}
            return json.dumps(own | {"curve": [[0, 60.0, 60.0], [8064, calls, calls]]})

        rivals = {name: {"mean_force_calls": calls} for name, calls in (("BFGSLineSearch", 10.0), ("core", 5.0))}
        folder = "benchmarks/atoms/results/learning"
        files = {f"{folder}/al-fe-td3-{seed}.json": run(calls) for seed, calls in enumerate((4.0, 9.0))}
        text = table(repository(tmp_path, **files, **{f"{folder}/al-fe-classical.json": json.dumps(rivals)}), "al-fe")
        assert "| 8 100 | **4.00, 9.00** | 2% | 8 100 | 8 100, 1 never | 1.00 | 1.5 |" in text
        assert "expert" not in text  # not run

    def test_the_first_steps_of_a_run_keep_what_was_best_until_then(self, tmp_path: Path):
        run = {
            "columns": ["step", "force_calls_mean", "validation_force_calls_mean", "force_calls_p95", "success_rate"],
            "curve": [[0, 60, 50, 60, 0.5], [4000, 9, 8, 12, 0.9], [8000, 7, 8.5, 9, 1], [12000, 5, 4, 6, 1]],
            "steps": 12000, "cpu_seconds": 90,
        }  # fmt: skip
        root = repository(tmp_path, **{"benchmarks/atoms/results/learning/one-0.json": json.dumps(run)})
        [first] = runs_of(root, "one 8000")
        assert (first["kept_force_calls_mean"], first["kept_success_rate"]) == (9, 0.9)
        assert (first["steps"], first["cpu_seconds"]) == (8000, 60)

    def test_what_a_setting_did_is_compared_seed_by_seed(self, tmp_path: Path):
        def run(row: str, seed: int, *calls: float):
            curve = [[2500 * number, value] for number, value in enumerate(calls)]
            return {"system": "emt", "row": row, "seed": seed, "curve": curve, "cpu_seconds": 40}

        runs = [run("base", 20, 60, 20), run("base", 21, 60, 10), run("five critics", 20, 60, 10),
                run("five critics", 21, 5, 10), run("SAC", 21, 60, 5)]  # fmt: skip
        folder = "benchmarks/atoms/results/learning/tuning-guide"
        root = repository(tmp_path, **{f"{folder}.json": json.dumps(runs), f"{folder}-classical.json": '{"emt": 6}'})
        assert "| base |  | 15.0 calls |  |" in turned(root)
        assert "| five critics |  | 0.50 (0.50–0.50) |  |" in turned(root)
        assert "| SAC |  | 0.50* |  |" in turned(root)  # of its own seed
        assert "| five critics | 10.0, 5.0 | 1.00–2.00 | 0, 1 never | 40 |" in turned(root, "emt")

    def test_settings_show_default_and_meaning(self):
        text = described(ROOT, "relaxion.train.agents.td3", "TD3Settings")
        assert "- `policy_delay` (`int`, default `2`): Critic updates per policy update" in text

    def test_signatures_and_methods(self):
        text = described(ROOT, "relaxion.relaxer", "Relaxer")
        assert "policy: str | Path | None = 'auto'" in text
        assert "- **`force_calls`**: Structures evaluated" in text
        assert "_propose" not in text

    def test_every_number_and_alarm_of_the_diagnostics_is_a_row(self):
        text = filled(ROOT, (ROOT / "docs/diagnostics.md").read_text())
        for one in DIAGNOSTICS:
            assert f"| `{one.name}` | {one.unit} | {one.meaning} | {one.healthy} |".replace("|  |", "| |") in text
        for rule in RULES:
            assert f"| `{rule.name}` | {rule.headline} | {rule.when} | {rule.remedy} |" in text

    def test_every_command_has_its_options(self):
        text = reference()
        assert "## relax\n" in text
        assert re.search(r"- `--fmax eV/Å`: .*\n?.*Default: `0.05`\.", text)
        assert "relaxion relax POSCAR --cell --fmax 0.01" in text

    def test_lists_are_wrapped_and_no_line_begins_another_item(self):
        lines = wrapped("a " * 59 + "- b", "- ", "  ").splitlines()
        assert max(map(len, lines)) <= 120
        assert lines[1] == "  \\- b"


class TestLinks:
    def test_code_is_not_looked_at(self):
        assert links("[a](b.md#c) `[d](e)`\n```\n[f](g)\n```\n[h](https://i.org) ![j](k.png)") == [
            ("b.md", "c"), ("k.png", ""),
        ]  # fmt: skip

    def test_anchors_are_those_of_github(self):
        text = "# Agents × policies\n## Same\n## Same\n```\n# no heading\n```\n### `code` and [words](x.md)\n"
        assert anchors(text) == {"agents--policies", "same", "same-1", "code-and-words"}

    def test_what_leads_nowhere_is_found(self, tmp_path: Path):
        root = repository(
            tmp_path,
            **{
                "README.md": "[a](docs/a.md#here) [b](docs/b.md) [c](docs/a.md#gone) [out](../up.md) "
                "`src/x.py` `src/*.py`",
                "docs/a.md": "# Here\n[home](../README.md)",
                "src/y.py": "",
            },
        )
        assert check_links.wrong_in_markdown(root, "docs/a.md") == []
        assert check_links.wrong_in_markdown(root, "README.md") == [
            "README.md: the link 'docs/b.md' leads to docs/b.md, which is not there",
            "README.md: docs/a.md has no heading for '#gone'",
            "README.md: the link '../up.md' leads to ../up.md, which is not there",
            "README.md: the path `src/x.py` is not there",
        ]

    def test_what_the_site_loads_from_elsewhere_is_found(self, tmp_path: Path):
        site = repository(
            tmp_path,
            **{
                "a.html": '<p id="x"><a href="b.html#y">b</a><a href="b.html#z">b</a><a href="c.html">c</a></p>'
                '<script src="https://cdn.org/s.js"></script><img src="gone.png">',
                "b.html": '<p id="y"><a href="https://else.org">fine</a></p>',
                "s.css": "@font-face { src: url(https://fonts.org/f) }",
            },
        )
        assert check_links.wrong_on_site(site) == [
            "a.html: loads https://cdn.org/s.js from elsewhere",
            "a.html: loads gone.png, which is not there",
            "a.html: b.html#z: that page has no such anchor",
            "a.html: the link c.html leads nowhere",
            "s.css: loads something from elsewhere",
        ]

    def test_files_outside_docs_become_pages(self, tmp_path: Path):
        root = repository(tmp_path, **{"docs/a.md": "[s](../src/x.py) [b](../bench/README.md)", "src/x.py": "x = 1\n"})
        repository(root, **{"bench/README.md": "[back](../docs/a.md) [data](r.json)", "bench/r.json": "{}"})
        found = everything_linked(root, {"docs/a.md": (root / "docs/a.md").read_text()})
        assert [one.uri for one in found] == ["bench/README.md", "bench/r.json", "source/src/x.py.md"]
        assert "x = 1" in (found[2].content or "")
        assert relinked(root, "docs/a.md", "[s](../src/x.py#l)") == "[s](source/src/x.py.md#l)"
        assert relinked(root, "bench/README.md", "[back](../docs/a.md)") == "[back](../a.md)"

    def test_all_links_of_the_repository(self):
        wrong = [s for name in check_links.markdown_files(ROOT) for s in check_links.wrong_in_markdown(ROOT, name)]
        assert wrong == []


def blocks(language: str) -> list[tuple[str, str]]:
    """Name of the page and code, of all fenced blocks of one language in README and docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pattern = re.compile(rf"^ *```{language}\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    return [(page.name, code) for page in pages for code in pattern.findall(page.read_text())]


def test_what_pages_import_exists():
    names = [
        (page, statement.module, name.name)
        for page, code in blocks("python")
        for statement in ast.walk(ast.parse(textwrap.dedent(code)))
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("relaxion")
        for name in statement.names
    ]
    assert len(names) > 5
    assert [one for one in names if not hasattr(importlib.import_module(one[1]), one[2])] == []


def test_commands_of_pages_have_their_options():
    group: Any = typer.main.get_command(app)
    known = {
        name: {word for option in command.params for word in (*option.opts, *option.secondary_opts)}
        for name, command in group.commands.items()
    }
    wrong = []
    for page, code in [*blocks(""), *blocks("bash")]:
        for line in code.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["relaxion"] and len(words) > 1 and not words[1].startswith("-"):
                asked = {word.split("=")[0] for word in words[2:] if re.match(r"-[-a-z]", word)}
                wrong += [(page, line)] * (words[1] not in known or not asked <= known.get(words[1], set()))
    assert wrong == []


def test_the_band_of_the_hosts_relaxes(capsys):
    runpy.run_path(str(ROOT / "examples/hosts/elastic_band.py"))
    barrier = float(capsys.readouterr().out.split()[1])
    assert 0.36 < barrier < 0.40


def test_navigation_names_every_page_once():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"]
    named = pages(nav)
    assert len(named) == len(set(named))
    assert [page for page in named if not ((ROOT / "docs" / page).exists() or (ROOT / page).exists())] == []
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written - set(named) == set()
    assert len(written) <= 29  # a tutorial for each kind of user took three more pages


def script(name: str) -> Any:
    """One of `docs/pictures`, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_design_is_the_scripts():
    design = script("design")
    assert design.PICTURE.read_text() == design.picture(), "run python docs/pictures/design.py"


def test_the_picture_of_the_readme_shows_the_results():
    gain = script("gain")
    assert gain.PICTURE.read_text() == gain.drawn(gain.rows()), "run python docs/pictures/gain.py"
    assert gain.PICTURE.stat().st_size < 60_000
    for row in gain.rows():
        assert f"{row.policy:.1f}" in gain.PICTURE.read_text()
