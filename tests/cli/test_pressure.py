"""Energy and enthalpy under pressure: each under its own name in history, log, JSON, manifest, page and batch."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.units import GPa
from test_report import data_of, facts, part

import relaxion
from relaxion import Relaxer, relax_batch
from relaxion.apps.comparison import compared
from relaxion.apps.report.view import report
from relaxion.database import RelaxationDatabase
from relaxion.errors import FileError
from relaxion.train.judge.runs import Run

PRESSURE = 30  # GPa; with EMT copper the energy rises by more than 0.2 eV while the enthalpy falls


def copper() -> Atoms:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.05, seed=0)
    return atoms


def enthalpy(atoms: Atoms) -> float:
    return atoms.get_potential_energy() + PRESSURE * GPa * atoms.get_volume()


@pytest.fixture
def pressed(relaxion) -> dict:
    """One relaxation with comparison and report, as --json tells it."""
    write("cu.extxyz", copper())
    options = ("--cell", "--pressure", PRESSURE, "--fmax", "0.005", "--compare", "BFGS,FIRE", "--report", "--json")
    answer = relaxion("relax", "cu.extxyz", "--calc", "emt", *options)
    assert answer.code == 0, answer.err
    return answer.objects[0]


def test_the_history_tells_energy_and_enthalpy_apart() -> None:
    atoms, log = copper(), StringIO()
    atoms.calc = EMT()
    start = atoms.get_potential_energy(), enthalpy(atoms)
    opt = Relaxer(FrechetCellFilter(atoms, scalar_pressure=PRESSURE * GPa), logfile=log)
    opt.run(fmax=0.005)
    first, last = opt.history[0], opt.history[-1]
    assert (first.energy_ev, first.enthalpy_ev) == pytest.approx(start)
    assert (last.energy_ev, last.enthalpy_ev) == pytest.approx((atoms.get_potential_energy(), enthalpy(atoms)))
    assert last.energy_ev > first.energy_ev
    assert last.enthalpy_ev < first.enthalpy_ev
    heading, line, *_ = log.getvalue().splitlines()
    assert heading.split() == ["Step", "Time", "Energy", "Enthalpy", "fmax"]
    assert [float(word) for word in line.split()[3:5]] == pytest.approx(start, abs=1e-5)
    assert opt.pressure_gpa == pytest.approx(PRESSURE)
    tiles = {tile["label"]: tile["value"] for tile in part(relaxion.report(opt).data, "tiles")["tiles"]}
    assert float(tiles["Energy change"].replace("−", "-")) == pytest.approx(last.energy_ev - start[0], abs=6e-4)


def test_without_pressure_both_are_the_same_and_the_log_is_that_of_ase() -> None:
    atoms, log = copper(), StringIO()
    atoms.calc = EMT()
    opt = Relaxer(FrechetCellFilter(atoms), logfile=log)
    opt.run(fmax=0.05)
    assert all(entry.energy_ev == entry.enthalpy_ev for entry in opt.history)
    assert log.getvalue().split()[:4] == ["Step", "Time", "Energy", "fmax"]


def test_the_result_names_both_and_the_pressure(pressed: dict) -> None:
    final = read("relaxed/cu/cu.extxyz")
    assert pressed["energy_ev"] == pytest.approx(final.get_potential_energy(), abs=1e-6)
    assert pressed["enthalpy_ev"] == pytest.approx(enthalpy(final), abs=1e-6)
    assert pressed["pressure_gpa"] == PRESSURE
    for other in pressed["compare"].values():
        assert other["enthalpy_ev"] == pytest.approx(pressed["enthalpy_ev"], abs=1e-3)
    calls = json.loads(Path("relaxed/cu/relaxion.json").read_text())["calls"]
    images = read("relaxed/cu/cu.traj", ":")
    assert calls["energy_ev"] == pytest.approx([image.get_potential_energy() for image in images], abs=1e-6)
    assert calls["enthalpy_ev"] == pytest.approx([enthalpy(image) for image in images], abs=1e-6)


def test_the_page_shows_one_quantity_per_curve_and_tile(pressed: dict, relaxion) -> None:
    images = read("relaxed/cu/cu.traj", ":")
    assert relaxion("report", "relaxed/cu", "--out", "again.html").code == 0
    for page, n_curves in ((pressed["report"], 3), ("again.html", 1)):
        data = data_of(page)
        tiles = {tile["label"]: tile["value"].replace("−", "-") for tile in part(data, "tiles")["tiles"]}
        first, last = images[0], read("relaxed/cu/cu.extxyz")
        energies = last.get_potential_energy() - first.get_potential_energy()
        assert energies > 0.2, "a pressure costs energy"
        assert float(tiles["Energy change"]) == pytest.approx(energies, abs=6e-4)
        assert float(tiles["Enthalpy change"]) == pytest.approx(enthalpy(last) - enthalpy(first), abs=6e-4)
        curves = part(data, "plot", "Enthalpy above the final enthalpy of Relaxion")["series"]
        assert len(curves) == n_curves
        for curve in curves:
            assert curve["y"][0] == pytest.approx(enthalpy(first) - enthalpy(last), abs=1e-4), curve["name"]
            assert abs(curve["y"][-1]) < 1e-3
        table = part(data, "table")
        assert "Enthalpy at 30 GPa (eV)" in [column["label"] for column in table["columns"]]
        assert [row["cells"][-1] for row in table["rows"]] == ["", "yes", "yes"]
        assert facts(data)["Pressure"] == "30 GPa"


def test_words_and_terminal_name_the_enthalpy(relaxion) -> None:
    write("cu.extxyz", copper())
    answer = relaxion("relax", "cu.extxyz", "--calc", "emt", "--cell", "--pressure", PRESSURE)
    final = read("relaxed/cu/cu.extxyz")
    assert f"energy {final.get_potential_energy():.4f} eV, enthalpy {enthalpy(final):.4f} eV at 30 GPa" in answer.out


def test_minima_are_compared_by_enthalpy() -> None:
    dense = Run("converged", 5, -10.0, 0.01, 1.0, pressure_gpa=20, pressure_volume_ev=4.0)
    loose = Run("converged", 5, -11.0, 0.01, 1.0, pressure_gpa=20, pressure_volume_ev=5.0)
    assert not compared("BFGS", loose, dense, 4).other_minimum
    assert compared("BFGS", Run("converged", 5, -10.0, 0.01, 1.0), loose, 4).other_minimum


def test_what_an_unfinished_run_leaves_is_lowest_in_enthalpy(relaxion) -> None:
    """The energy is lowest at the start here: the pressure costs energy."""
    write("cu.extxyz", copper())
    options = ("--cell", "--pressure", PRESSURE, "--calc", "calculators_for_test:interrupted", "--json")
    answer = relaxion("relax", "cu.extxyz", *options)
    images = read("relaxed/cu/cu.traj", ":")
    enthalpies = [enthalpy(image) for image in images]
    assert int(np.argmin(enthalpies)) != int(np.argmin([image.get_potential_energy() for image in images]))
    assert answer.objects[0]["enthalpy_ev"] == pytest.approx(min(enthalpies), abs=1e-6)


def test_batches_tell_them_apart() -> None:
    (alone,) = relax_batch([copper()], "emt", fmax=0.005, cell=True, pressure_gpa=PRESSURE)
    assert alone.converged
    assert alone.energy_ev == pytest.approx(alone.atoms.get_potential_energy())
    assert alone.enthalpy_ev == pytest.approx(enthalpy(alone.atoms))
    assert alone.atoms.get_stress()[:3] == pytest.approx([-PRESSURE * GPa] * 3, rel=0.02)
    (free,) = relax_batch([copper()], "emt", cell=True)
    assert free.enthalpy_ev == free.energy_ev


@pytest.mark.usefixtures("pressed")
def test_a_folder_that_mixes_them_is_not_shown() -> None:
    manifest = Path("relaxed/cu/relaxion.json")
    plain = json.loads(manifest.read_text())
    del plain["result"]["enthalpy_ev"]
    manifest.write_text(json.dumps(plain))
    with pytest.raises(FileError, match="mixed up energy and enthalpy"):
        report("relaxed/cu")


def test_a_memory_keeps_energies_and_tells_pressures_apart() -> None:
    found = []
    for pressure in (0, 10, 20):
        atoms = copper()
        atoms.calc = EMT()
        opt = Relaxer(FrechetCellFilter(atoms, scalar_pressure=pressure * GPa), logfile=None, database="memory")
        opt.run(fmax=0.02)
        found = list(RelaxationDatabase.open(Path("memory")))
        energies = [entry.energy_ev for entry in opt.history]
        assert any(one.energies.tolist() == pytest.approx(energies) for one in found), pressure
    assert len(found) == 3
