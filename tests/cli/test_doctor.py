"""`relaxion doctor`, completion and help: what is found, said and offered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from relaxion.bench.optimizers import known_optimizers
from relaxion.cli import completion
from relaxion.cli import doctor as doctor_checks
from relaxion.cli.app import app
from relaxion.cli.doctor import FAIL, NOTE, OK, WARN, Finding, examined, judged_threads, numbers
from relaxion.potentials.registry import BUILT_IN, EXTRAS

COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_a_healthy_place(relaxion):
    answer = relaxion("doctor", "--json")
    assert answer.code == 0
    (result,) = answer.objects
    assert result["ok"] is True
    found = {one["check"]: one for one in result["findings"]}
    expected = {"python", "relaxion", "ase", "torch", "packages", "calculators", "threads", "relaxation"}
    assert expected <= set(found)
    assert found["relaxation"]["state"] == OK
    assert "force calls" in found["relaxation"]["sentence"]
    assert any("emt, eam, lj, morse" in one["sentence"] for one in result["findings"])


def test_table(relaxion):
    answer = relaxion("doctor")
    assert answer.code == 0
    assert "ASE 3." in answer.out
    assert answer.out.splitlines()[-1].endswith(".")


def test_ase_too_old_is_a_failure(relaxion, monkeypatch):
    monkeypatch.setattr(doctor_checks, "version", lambda package: "3.22.1" if package == "ase" else "9.9")
    (finding,) = examined(doctor_checks.ase)
    assert (finding.state, "3.22.1 is too old" in finding.sentence) == (FAIL, True)
    answer = relaxion("doctor")
    assert answer.code == 1
    assert "1 thing to repair" in answer.out


def test_cuda_build_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    (finding,) = examined(doctor_checks.torch)
    assert finding.state == WARN
    assert "no GPU here" in finding.sentence
    assert "whl/cpu" in (finding.advice or "")


def test_missing_package(monkeypatch):
    monkeypatch.setattr(doctor_checks, "PACKAGES", ("numpy", "no-such-package"))
    (finding,) = examined(doctor_checks.packages)
    assert (finding.state, finding.advice) == (FAIL, "pip install no-such-package")


@pytest.mark.parametrize(
    ("count", "available", "environment", "expected"),
    [
        (1, 8, {"OMP_NUM_THREADS": "1"}, [OK]),
        (8, 2, {"OMP_NUM_THREADS": "8"}, [WARN]),
        (8, 8, {}, [NOTE]),
        (1, 1, {}, [OK]),
        (2, 2, {"OMP_NUM_THREADS": "two"}, [WARN, OK]),
    ],
)
def test_threads(count, available, environment, expected):
    assert [state for state, *_ in judged_threads(count, available, environment)] == expected


def test_a_file_that_hides_a_package(own_folder):
    assert states(examined(doctor_checks.working_directory)) == [OK]
    (own_folder / "torch.py").write_text("")
    (finding,) = examined(doctor_checks.working_directory)
    assert (finding.state, "torch.py" in finding.sentence) == (WARN, True)


def test_a_policy_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("RELAXION_POLICIES", str(tmp_path))
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    assert WARN in states(examined(doctor_checks.policies))


def test_a_check_that_breaks_is_a_finding():
    def strange():
        raise OSError("no such thing")
        yield

    assert states(examined(strange)) == [FAIL]


def test_versions_in_numbers():
    assert numbers("3.26.0rc1") == (3, 26)
    assert numbers("2.13.0+cpu") == (2, 13)
    assert numbers("3.9") < (3, 26)


def test_completion_offers_what_there_is():
    assert {word.rstrip(":") for word in completion.CALCULATORS} == {*BUILT_IN, *EXTRAS}
    assert set(completion.OPTIMIZERS) <= set(known_optimizers())
    assert completion.optimizers("BF") == ["BFGS", "BFGSLineSearch"]
    assert completion.optimizers("bfgs,fi") == ["bfgs,FIRE", "bfgs,FIRE2"]
    assert "BFGS,BFGS" not in completion.optimizers("BFGS,")
    assert "pendulum" in completion.recipes("p")
    assert completion.policies("n") == ["none"]
    assert completion.agents("") == ["ddpg", "td3", "d4pg", "sac"]


def test_the_shell_is_told(tmp_path):
    """As bash asks: the words so far come by environment variables."""
    environment = {**os.environ, "_RELAXION_COMPLETE": "complete_bash", "COMP_WORDS": "relaxion relax --calc e",
                   "COMP_CWORD": "3"}  # fmt: skip
    code = "from relaxion.cli.app import app; app(prog_name='relaxion')"
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
