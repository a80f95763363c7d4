"""`relaxion relax --calc chgnet`, `sevennet`, `gfn2` and `mace`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.io import read, write

from relaxion.potentials.registry import EXTRAS


def start_for(name: str) -> Atoms:
    atoms = molecule("CH3OH") if name == "gfn2" else bulk("MgO", "rocksalt", a=4.3, cubic=True)
    atoms.rattle(0.05, seed=2)
    return atoms


@pytest.mark.parametrize("name", ["chgnet", "sevennet", "gfn2"])
def test_relaxed(relaxion, name):
    write("start.xyz", start_for(name))
    answer = relaxion("relax", "start.xyz", "--calc", name, "--json", "--quiet")
    (report,) = answer.objects
    assert (answer.code, answer.err) == (0, "")
    assert report["converged"]
    assert report["force_calls"] < 25
    relaxed = read("relaxed/start/start.extxyz")
    assert np.linalg.norm(relaxed.get_forces(), axis=1).max() < 0.05


def test_free_cell(relaxion):
    write("start.xyz", start_for("chgnet"))
    answer = relaxion("relax", "start.xyz", "--calc", "chgnet", "--cell", "--quiet")
    assert answer.code == 0
    volume = read("relaxed/start/start.extxyz").get_volume()
    assert volume == pytest.approx(4.25**3, rel=0.02), "MgO by CHGNet: about 4.25 Å, where we began with 4.3"


@pytest.mark.parametrize("name", EXTRAS)
def test_missing_extra_is_one_sentence_with_the_command(relaxion, alloy_file, monkeypatch, name):
    monkeypatch.setitem(sys.modules, EXTRAS[name].package, None)
    answer = relaxion("relax", alloy_file, "--calc", name)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.count("\n") == 1
    assert answer.err.strip().endswith(f"try: {EXTRAS[name].how_to_install}")
    assert not Path("relaxed").exists()


@pytest.mark.parametrize(("name", "symbol"), [("chgnet", "Po"), ("gfn2", "U")])
def test_an_element_the_engine_does_not_know(relaxion, name, symbol):
    write("start.xyz", Atoms([symbol] * 2, positions=[[0, 0, 0], [0, 0, 3]]))
    answer = relaxion("relax", "start.xyz", "--calc", name)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.count("\n") == 1
    assert f"has no parameters for {symbol}; it covers H to " in answer.err


def test_gfn2_of_a_slab_is_refused_before_any_call(relaxion):
    slab = fcc111("Al", (1, 1, 2), vacuum=5.0)
    slab.info.clear()  # of its sites, which the format cannot hold
    write("slab.xyz", slab)
    answer = relaxion("relax", "slab.xyz", "--calc", "gfn2")
    assert answer.code == 1
    assert "periodic along 2 of 3 axes, but GFN2-xTB along all or none" in answer.err


def test_charges_of_the_file_reach_the_calculator(relaxion):
    """OH and OH⁻ differ by an electron, which is worth more than 1 eV."""
    energies = {}
    for charge in (0.0, -1.0):
        atoms = molecule("OH")
        atoms.set_initial_magnetic_moments([0.0, 0.0])
        atoms.set_initial_charges([charge, 0.0])
        atoms.rattle(0.05, seed=1)
        write("ion.extxyz", atoms)
        answer = relaxion("relax", "ion.extxyz", "--calc", "gfn2", "--json", "--quiet", "--out", f"out{charge}")
        assert answer.code == 0
        energies[charge] = answer.objects[0]["energy_ev"]
        kept = read(f"out{charge}/ion/ion.extxyz")
        assert kept.get_initial_charges() == pytest.approx([charge, 0.0])
    assert abs(energies[-1.0] - energies[0.0]) > 1.0


def test_doctor_and_calculators_know_them(relaxion, monkeypatch):
    monkeypatch.setitem(sys.modules, "tblite", None)
    entries = {entry["spec"]: entry for entry in map(json.loads, relaxion("calculators", "--json").out.splitlines())}
    assert entries["chgnet"]["available"]
    assert (entries["gfn2"]["available"], entries["gfn2"]["how_to_install"]) == (
        False, "pip install 'relaxion[molecules]'",
    )  # fmt: skip
