"""`relaxion doctor`, completion and help: what is found, said and offered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from relaxion.apps.cli import command, installed
from relaxion.apps.cli.app import app
from relaxion.potentials.registry import BUILT_IN, EXTRAS
from relaxion.train.judge.runs import known_optimizers

COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_healthy_place(relaxion):
    answer = relaxion("doctor", "--json")
    assert answer.code == 0
    (result,) = answer.objects
    assert result["ok"] is True
    assert {"python", "relaxion", "ase", "torch", "calculators", "relaxation"} <= set(result["findings"])
    assert "force calls" in result["findings"]["relaxation"]
    assert "emt, eam, lj, morse" in result["findings"]["calculators"]


def test_table(relaxion):
    answer = relaxion("doctor")
    assert answer.code == 0
    assert "3." in answer.out
    assert answer.out.splitlines()[-1] == "All is well."


def test_missing_package(relaxion, monkeypatch):
    monkeypatch.setattr(installed, "PACKAGES", ("numpy", "no-such-package"))
    answer = relaxion("doctor")
    assert answer.code == 1
    assert "pip install no-such-package" in answer.out


def test_a_relaxation_that_fails(relaxion, monkeypatch):
    monkeypatch.setattr(installed, "COPPER_EV_PER_ATOM", 1.0)
    answer = relaxion("doctor")
    assert answer.code == 1
    assert "failed: four copper atoms" in answer.out


def test_completion_offers_what_there_is():
    assert {word.rstrip(":") for word in command.CALCULATORS} == {*BUILT_IN, *EXTRAS}
    assert set(command.OPTIMIZERS) <= set(known_optimizers())
    assert command.complete_optimizers("BF") == ["BFGS", "BFGSLineSearch"]
    assert command.complete_optimizers("bfgs,fi") == ["bfgs,FIRE", "bfgs,FIRE2"]
    assert "BFGS,BFGS" not in command.complete_optimizers("BFGS,")
    assert "pendulum" in command.complete_recipes("p")
    assert command.complete_policies("n") == ["none"]
    assert command.complete_agents("") == ["ddpg", "td3", "d4pg", "sac"]


def test_the_shell_is_told(tmp_path):
    """As bash asks: the words so far come by environment variables."""
    environment = {**os.environ, "_RELAXION_COMPLETE": "complete_bash", "COMP_WORDS": "relaxion relax --calc e",
                   "COMP_CWORD": "3"}  # fmt: skip
    code = "from relaxion.apps.cli.app import app; app(prog_name='relaxion')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert result.stdout.split() == ["emt", "eam", "eam:"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_below_its_help(relaxion, command):
    help_text = relaxion(command, "--help").out
    assert "Examples" in help_text
    assert f"relaxion {command}" in " ".join(help_text.split("Examples")[1].split())


@pytest.mark.parametrize("command", ["relax", "race", "bench", "report", "calculators"])
def test_help_has_units(relaxion, command):
    words = " ".join(relaxion(command, "--help").out.split())
    assert "forces eV/Å" in words


def test_the_json_of_doctor_is_one_line(relaxion):
    answer = relaxion("doctor", "--json")
    assert json.loads(answer.out)["findings"]
    assert answer.out.count("\n") == 1
    assert Path.cwd().exists()
