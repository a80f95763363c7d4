"""`relaxion collect` from outside: summary, exit codes, signals, one sentence for every mistake."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from relaxion.database import RelaxationDatabase
from relaxion.errors import FileError

RECIPE = """
seed = 3
[kinds.alloy]
make = "metal"
engine = "emt"
number = 8
largest_n_atoms = 8
free_cell_share = 0.4
"""


def test_a_summary_and_a_store(relaxion: Callable[..., Any]) -> None:
    Path("recipe.toml").write_text(RECIPE)
    answer = relaxion("collect", "recipe.toml", "--out", "store", "--json", "-q")
    assert answer.code == 0, answer.err
    found = answer.objects[0]
    assert found["complete"]
    assert found["kinds"]["alloy"]["engine"] == "emt"
    assert found["trajectories"] == len(RelaxationDatabase.open("store")) == 8 - sum(found["skipped"].values())
    words = relaxion("collect", "recipe.toml", "--out", "store", "--set", "alloy.number=9", "-q")
    assert words.code == 0
    assert "relaxations" in words.out
    assert "alloy (emt)" in words.out


def test_a_policy_may_collect(relaxion: Callable[..., Any]) -> None:
    Path("recipe.toml").write_text(RECIPE)
    answers = [
        relaxion("collect", "recipe.toml", "--out", out, "--json", "-q", *more)
        for out, more in (("core", ()), ("metals", ("--policy", "metals")))
    ]
    core, metals = (answer.objects[0]["kinds"]["alloy"] for answer in answers)
    assert metals["converged_share"] == 1.0
    assert metals["mean_calls_converged"] < core["mean_calls_converged"]


def test_time_is_up(relaxion: Callable[..., Any]) -> None:
    Path("recipe.toml").write_text(RECIPE)
    answer = relaxion("collect", "recipe.toml", "--out", "store", "--limit-minutes", "0", "-q")
    assert answer.code == 3
    assert "not complete: the same command continues" in answer.out


def test_mistakes(relaxion: Callable[..., Any]) -> None:
    Path("recipe.toml").write_text(RECIPE)
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("x")
    for code, sentence, words in (
        (2, "no recipe 'universal-dat'", ["universal-dat", "--out", "store"]),
        (2, "unknown setting 'numbr'", ["recipe.toml", "--out", "store", "--set", "numbr=3"]),
        (2, "section for each kind", ["pendulum", "--out", "store"]),
        (1, "holds no relaxation database", ["recipe.toml", "--out", "full"]),
        (1, "unknown potential 'emtt'", ["recipe.toml", "--out", "store", "--set", "engine=emtt"]),
        (1, "no policy", ["recipe.toml", "--out", "store", "--policy", "nobody"]),
    ):
        answer = relaxion("collect", *words, "-q")
        assert answer.code == code, answer.err
        assert sentence in answer.err
        assert len(answer.err.strip().splitlines()) == 1


def test_an_old_store_is_refused(relaxion: Callable[..., Any]) -> None:
    Path("recipe.toml").write_text(RECIPE)
    Path("store").mkdir()
    Path("store/manifest.json").write_text("{}")
    answer = relaxion("collect", "recipe.toml", "--out", "store", "-q")
    assert answer.code == 1
    assert "convert it once" in answer.err


def test_sigterm_writes_what_is_finished(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("number = 8", "number = 5000") + "\n")
    words = ["collect", "recipe.toml", "--out", "store", "-q"]
    code = "from relaxion.apps.cli.app import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 600
    while time.monotonic() < end:
        with suppress(FileError):
            if len(RelaxationDatabase.open(tmp_path / "store")):
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "not complete" in out
    assert len(RelaxationDatabase.open(tmp_path / "store")) > 0
