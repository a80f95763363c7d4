"""`--policy` and `--allow-unseen` of relax, race and bench: who relaxes is what was asked for, and is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ase.build import molecule
from ase.io import read, write

Relaxion = Callable[..., Any]


@pytest.fixture
def water_file() -> Path:
    water = molecule("H2O")
    water.rattle(0.05, seed=1)
    write("water.xyz", water)
    return Path("water.xyz")


@pytest.fixture
def noble(shipped: Path, make_bundle: Callable, make_stiffness_policy: Callable) -> Path:
    """As if it shipped."""
    return make_bundle(shipped / "noble.safetensors", make_stiffness_policy(), ("Cu", "Au"))


def lines_about_the_core(answer: Any) -> list[str]:
    return [line for line in answer.err.splitlines() if "classical optimizer is used" in line]


def test_a_file(relaxion: Relaxion, alloy_file: Path, stiffness_file: Path) -> None:
    answer = relaxion("relax", alloy_file, "--policy", stiffness_file, "--report")
    assert answer.code == 0
    assert ", policy untrained" in answer.out
    assert lines_about_the_core(answer) == []
    manifest = json.loads(Path("relaxed/alloy/relaxion.json").read_text())
    assert manifest["result"]["policy"] == "untrained"
    assert "policy" in manifest["calls"]["method"]
    assert len(manifest["calls"]["reason"]) == manifest["result"]["force_calls"]
    assert f"{stiffness_file}: untrained" in Path("relaxed/alloy/report.html").read_text()
    assert read("relaxed/alloy/alloy.traj", ":")[-1].get_potential_energy() == pytest.approx(
        manifest["result"]["energy_ev"]
    )


def test_json_counts_the_steps_of_others(relaxion: Relaxion, alloy_file: Path, stiffness_file: Path) -> None:
    (told,) = relaxion("relax", alloy_file, "--policy", stiffness_file, "--json", "--fmax", "0.002").objects
    methods = json.loads(Path("relaxed/alloy/relaxion.json").read_text())["calls"]["method"]
    assert told["policy"] == "untrained"
    assert told["fallback_used"] == sum(method not in ("start", "policy") for method in methods)


def test_a_name_of_the_users_own(
    relaxion: Relaxion, alloy_file: Path, make_bundle: Callable, make_stiffness_policy: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Path("mine").mkdir()
    make_bundle(Path("mine/my-metals.safetensors"), make_stiffness_policy())
    monkeypatch.setenv("RELAXION_POLICIES", "mine")
    (told,) = relaxion("relax", alloy_file, "--policy", "my-metals", "--json").objects
    assert told["policy"] == "my-metals"
    answer = relaxion("relax", alloy_file, "--policy", "my-metal", "--out", "other")
    assert answer.code == 2
    assert "did you mean 'my-metals'?" in answer.err


@pytest.mark.usefixtures("noble")
def test_auto_decides_for_each_structure(relaxion: Relaxion, alloy_file: Path, water_file: Path) -> None:
    answer = relaxion("relax", alloy_file, water_file, "--json")
    assert [told["policy"] for told in answer.objects] == ["noble", "classical"]
    (line,) = lines_about_the_core(answer)
    assert line.startswith("water.xyz: ")
    assert "noble lacks H, O" in line
    insisting = relaxion("relax", alloy_file, water_file, "--json", "--allow-unseen", "--out", "other")
    assert [told["policy"] for told in insisting.objects] == ["noble", "noble"]
    assert lines_about_the_core(insisting) == []


@pytest.mark.usefixtures("noble")
def test_uncovered_elements_are_said_once_per_file(relaxion: Relaxion, water_file: Path) -> None:
    Path("two.xyz").write_text(water_file.read_text() * 2)
    answer = relaxion("relax", "two.xyz", "--policy", "noble", "--json")
    assert [told["policy"] for told in answer.objects] == ["classical", "classical"]
    (line,) = lines_about_the_core(answer)
    assert "noble was not trained on H, O" in line
    assert "--allow-unseen" in line
    assert "allow_unseen" not in line
    assert lines_about_the_core(relaxion("relax", "two.xyz", "--policy", "noble", "--quiet", "--force")) == []


@pytest.mark.parametrize("command", [["relax"], ["race", "--with", "BFGS"], ["bench", "--with", "none"]])
def test_files_that_are_no_policies(relaxion: Relaxion, alloy_file: Path, command: list[str]) -> None:
    Path("bad.safetensors").write_bytes(b"nonsense")
    for policy, words in (
        ("bad.safetensors", "bad.safetensors"),
        ("no.safetensors", "does not exist"),
        ("aut", "auto"),
    ):
        answer = relaxion(command[0], alloy_file, *command[1:], "--policy", policy)
        assert (answer.code, answer.out) == (2, "")
        assert words in answer.err
        assert answer.err.count("\n") == 1


def test_race(relaxion: Relaxion, alloy_file: Path, water_file: Path, noble: Path) -> None:
    (told,) = relaxion("race", alloy_file, "--with", "BFGS", "--policy", noble, "--json").objects
    assert told["policy"] == "noble"
    assert re.search('"label":"Policy","value":"[^"]*noble', Path("race.html").read_text())
    answer = relaxion("race", water_file, "--with", "BFGS", "--force")
    assert "by classical optimizer" in answer.out
    assert len(lines_about_the_core(answer)) == 1


def test_bench(relaxion: Relaxion, alloy_file: Path, water_file: Path, noble: Path) -> None:
    asked = ["--with", "none", "--policy", noble]
    answer = relaxion("bench", alloy_file, *asked, "--json", "a.json")
    plain = json.loads(Path("a.json").read_text())
    assert plain["policies_used"] == {"noble": 1}
    assert "relaxed by policy: noble 1." in answer.out
    assert lines_about_the_core(answer) == []
    uncovered = relaxion("bench", water_file, *asked, "--perturb", "rattle:0.02", "--number", "3", "--json", "b.json")
    plain = json.loads(Path("b.json").read_text())
    assert plain["policies_used"] == {"classical": 3}
    assert plain["force_calls"]["relaxion"] == plain["force_calls"]["core"]
    (line,) = lines_about_the_core(uncovered)
    assert "3 of 3 structures" in line
    relaxion("bench", water_file, *asked, "--allow-unseen", "--json", "c.json")
    assert json.loads(Path("c.json").read_text())["policies_used"] == {"noble": 1}
