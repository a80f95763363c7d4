"""Files that relaxion 0.2 wrote (commit 2431da55) are converted by one command and used."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from ase.calculators.emt import EMT
from ase.io import read

from relaxion import Relaxer
from relaxion.apps.relax_many.results import failures, merge, results
from relaxion.database import RelaxationDatabase
from relaxion.errors import RestartError

OLD = Path(__file__).parent / "files_of_0_2"
SPEC = importlib.util.spec_from_file_location("convert_0_2", Path(__file__).parents[2] / "tools" / "convert_0_2.py")
assert SPEC is not None
assert SPEC.loader is not None
convert_0_2 = importlib.util.module_from_spec(SPEC)
sys.modules["convert_0_2"] = convert_0_2  # its dataclasses look there
SPEC.loader.exec_module(convert_0_2)


def converted(name: str, folder: Path) -> Path:
    new = folder / name
    convert_0_2.main(OLD / name, new)
    return new


def test_results_of_relax_many(tmp_path: Path) -> None:
    new = converted("many", tmp_path)
    assert sorted(result["force_calls"] for result in results(new)) == [3, 3, 3, 3]
    (failed,) = failures(new)
    assert "U" in failed["reason"]
    merge(new, tmp_path / "all.extxyz", force=False)
    images = read(tmp_path / "all.extxyz", ":")
    assert len(images) == 4
    for atoms in images:
        energy = atoms.get_potential_energy()
        atoms.calc = EMT()
        assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-6)


def test_a_memory_becomes_a_database(tmp_path: Path) -> None:
    database = RelaxationDatabase.open(converted("memory", tmp_path))
    found = list(database)
    assert sorted(len(trajectory.energies) for trajectory in found) == [3, 3, 3, 3]
    assert all(trajectory.engine == "EMT" for trajectory in found)


def test_a_restart_file_continues_as_if_never_stopped(tmp_path: Path) -> None:
    new = converted("restart.json", tmp_path)
    whole = read(OLD / "half.extxyz")
    with pytest.raises(RestartError, match="version 3"):
        Relaxer(whole.copy(), restart=OLD / "restart.json", logfile=None)
    whole.calc = EMT()
    optimizer = Relaxer(whole, restart=new, logfile=None)
    assert optimizer.run(fmax=0.01)
    assert optimizer.force_calls == 4  # as relaxion 0.2 from the start
    assert whole.get_potential_energy() == pytest.approx(0.09610951801281242, abs=1e-6)
