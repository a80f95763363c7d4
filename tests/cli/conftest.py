"""Shared by the tests of the command line: a folder of their own, small files, calculators that misbehave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.io import write
from typer.testing import CliRunner

from relaxion.apps.cli.app import app

CALCULATORS = '''
from pathlib import Path
import sqlite3
import time
import numpy as np
from ase.calculators.calculator import all_changes
from ase.calculators.emt import EMT


class Counted(EMT):
    """Writes down each evaluation by itself, so that the command line can be checked against it."""

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        with open("evaluations.txt", "a") as file:
            file.write("one\\n")


class Breaks(Counted):
    def __init__(self, at, error):
        super().__init__()
        self.at, self.error, self.done = at, error, 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        self.done += 1
        if self.done == self.at:
            raise self.error
        super().calculate(atoms, properties, system_changes)


class OtherMinima(EMT):
    """The same forces, but energies 0.1 eV higher with every new start."""

    start, starts = None, 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        if self.start is None:
            self.start = atoms.positions.copy()
        self.starts += np.array_equal(atoms.positions, self.start)
        for kind in ("energy", "free_energy"):
            self.results[kind] = self.results[kind] + 0.1 * self.starts


class Slow(EMT):
    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        time.sleep(0.3)
        super().calculate(atoms, properties, system_changes)


class Stuck(EMT):
    """Answers three times, then hangs: a signal always finds it at work."""

    done = 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        self.done += 1
        if self.done > 3:
            time.sleep(3600)
        super().calculate(atoms, properties, system_changes)


class Held(EMT):
    """Waits after the first results for as long as there is a file named hold."""

    def has_results(self):
        try:
            with sqlite3.connect("file:out/results.sqlite?mode=ro", uri=True) as database:
                return database.execute("SELECT count(*) FROM results").fetchone() != (0,)
        except sqlite3.Error:
            return False

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        while Path("hold").exists() and self.has_results():
            time.sleep(0.05)
        super().calculate(atoms, properties, system_changes)


class NoStress(EMT):
    implemented_properties = ["energy", "forces"]


class NotFinite(EMT):
    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.results["forces"] = np.full_like(self.results["forces"], np.nan)


class NotFiniteLater(EMT):
    """Finite answers at first, then none any more."""

    done = 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.done += 1
        if self.done > 2:
            self.results["forces"] = np.full_like(self.results["forces"], np.nan)


class Uphill(EMT):
    """A wall on every side of the start, so that no step is ever accepted."""

    done = 0

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.done += 1
        if self.done == 1:
            self.first = dict(self.results)
            self.begun = self.atoms.positions.copy()
            return
        rise = 4.5 * float((self.first["forces"] * (self.atoms.positions - self.begun)).sum())
        energy = self.first["energy"] + abs(rise)
        self.results |= {"energy": energy, "free_energy": energy, "forces": -10 * self.first["forces"]}


class UphillInterrupted(Uphill):
    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        if self.done == 3:
            raise KeyboardInterrupt
        super().calculate(atoms, properties, system_changes)


def breaks_in_the_middle():
    return Breaks(3, OSError("license server\\nis away"))


def breaks_at_once():
    return Breaks(1, KeyError("Cu"))


def interrupted():
    return Breaks(3, KeyboardInterrupt())


def interrupted_at_once():
    return Breaks(1, KeyboardInterrupt())


def interrupted_in_comparison():
    return Breaks(12, KeyboardInterrupt())


def greets():
    print("model initialized with 412,525 parameters")
    return EMT()


def cannot_be_made():
    raise FileNotFoundError("no weights here")
'''


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is read from or written to the repository, and no file reaches the next test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # where calculators come from stays there
    (tmp_path / "calculators_for_test.py").write_text(CALCULATORS)
    yield tmp_path
    sys.modules.pop("calculators_for_test", None)


def rattled_alloy(seed: int = 3) -> Atoms:
    generator = np.random.default_rng(seed)
    atoms = bulk("Cu", a=3.7, cubic=True) * (2, 1, 1)
    atoms.symbols[[1, 6]] = "Au"
    atoms.positions += generator.normal(0, 0.15, atoms.positions.shape)
    return atoms


@pytest.fixture
def alloy() -> Atoms:
    return rattled_alloy()


@pytest.fixture
def alloy_file(own_folder: Path, alloy: Atoms) -> Path:
    write(own_folder / "alloy.xyz", alloy)
    return Path("alloy.xyz")


class Answer:
    """What a command printed and how it ended."""

    def __init__(self, result: Any) -> None:
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def relaxion() -> Callable[..., Answer]:
    """`relaxion("relax", "a.xyz")`; an exception nobody caught fails the test."""

    def call(*arguments: object) -> Answer:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        return Answer(result)

    return call
