"""Every example of examples/hosts runs in its host: as deep a minimum as with the default optimizer, in fewer calls.

Hosts that are not installed are skipped with the command that installs them; `make hosts` runs all six, each in an
environment of its own. Scripts run as a user runs them: hosts change global things (default types, warnings, folders).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "hosts"
INSTALL = {
    "pymatgen": "pip install pymatgen",
    "chgnet": "pip install chgnet",
    "quacc": "pip install quacc",
    "matcalc": "pip install matcalc",
    "matgl": "python tools/hosts.py matgl",
    "atomate2": "python tools/hosts.py atomate2",
}
NEVER_SKIPPED_IN_CI = {"pymatgen", "chgnet"}
LINE = re.compile(r"(fixed|free) cell: \w+ (\d+) calls, (-?[\d.]+) eV; Relaxer (\d+) calls, (-?[\d.]+) eV")


@pytest.mark.parametrize("name", INSTALL)
def test_reaches_as_deep_a_minimum_with_fewer_calls(name: str, tmp_path: Path):
    if find_spec(name) is None and not (os.environ.get("CI") and name in NEVER_SKIPPED_IN_CI):
        pytest.skip(f"{name} is not installed; {INSTALL[name]}")
    said = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}_relax.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert said.returncode == 0, said.stderr[-2000:]
    print(said.stdout)  # noqa: T201  tools/hosts.py makes its table of it
    lines = [match.groups() for match in map(LINE.fullmatch, said.stdout.splitlines()) if match]
    assert [cell for cell, *_ in lines] == ["fixed", "free"], said.stdout
    for _, calls_of_default, energy_of_default, calls, energy in lines:
        assert int(calls) < int(calls_of_default)
        assert float(energy) <= float(energy_of_default) + 0.01  # both stop somewhere below fmax


def test_there_is_an_example_for_every_host():
    assert {file.stem.removesuffix("_relax") for file in EXAMPLES.glob("*_relax.py")} == set(INSTALL)
