"""`relaxion relax` where all goes well: sentences, JSON, files, comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms, FixCartesian
from ase.io import read, write
from ase.optimize import BFGS

from relaxion.optimizer.choice import Chooser

KEYS = {
    "file", "formula", "converged", "outcome", "force_calls", "energy_ev", "enthalpy_ev", "pressure_gpa",
    "fmax_ev_per_angstrom", "policy", "policy_steps", "fallback_used", "end_check", "wall_time_seconds", "written_to",
}  # fmt: skip


def largest_emt_force(atoms: Atoms) -> float:
    atoms = atoms.copy()
    atoms.calc = EMT()
    return float(np.linalg.norm(atoms.get_forces(), axis=1).max())


def test_sentence_and_files(relaxion, alloy_file, alloy):
    answer = relaxion("relax", alloy_file)
    assert answer.code == 0
    assert answer.out.startswith("alloy.xyz: Au2Cu6 relaxed in ")
    assert answer.out.endswith("written to relaxed/alloy/\n")
    assert answer.out.count("\n") == 1
    files = {file.name for file in Path("relaxed/alloy").iterdir()}
    assert files == {"alloy.xyz", "alloy.extxyz", "alloy.log", "alloy.traj", "relaxion.json"}
    assert [entry.name for entry in Path("relaxed").iterdir()] == ["alloy"], "the staging folder must be gone"
    relaxed = read("relaxed/alloy/alloy.extxyz")
    assert largest_emt_force(relaxed) < 0.05 < largest_emt_force(alloy)
    assert np.linalg.norm(relaxed.get_forces(), axis=1).max() < 0.05
    assert "stress" not in relaxed.calc.results


def test_json_says_what_the_files_say(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--json")
    (report,) = answer.objects
    assert set(report) == KEYS
    relaxed = read("relaxed/alloy/alloy.extxyz")
    assert (report["file"], report["formula"]) == ("alloy.xyz", "Au2Cu6")
    assert report["policy"] == Chooser("auto").decide_for(relaxed).name
    assert (report["converged"], report["outcome"]) == (True, "converged")
    assert report["energy_ev"] == pytest.approx(relaxed.get_potential_energy(), abs=1e-6)
    assert report["fmax_ev_per_angstrom"] == pytest.approx(largest_emt_force(relaxed), abs=1e-5)
    assert report["wall_time_seconds"] > 0
    assert report["written_to"] == "relaxed/alloy"
    assert len(read("relaxed/alloy/alloy.traj", ":")) == report["force_calls"]
    assert len(Path("relaxed/alloy/alloy.log").read_text().splitlines()) == report["force_calls"] + 1


@pytest.mark.parametrize("cell", [False, True])
def test_force_calls_are_what_the_calculator_did(relaxion, alloy_file, cell):
    """An independent count inside the user's calculator: ours and theirs must add up to it exactly."""
    options = ["--calc", "calculators_for_test:Counted", "--compare", "BFGS,BFGSLineSearch,CG", *["--cell"] * cell]
    answer = relaxion("relax", alloy_file, "--json", *options)
    (report,) = answer.objects
    counted = report["force_calls"] + sum(other["force_calls"] for other in report["compare"].values())
    # EMT keeps its last answer, so a comparison whose start is the last structure asked costs it nothing
    assert len(Path("evaluations.txt").read_text().split()) == counted
    assert "please report this" not in answer.err


def test_compare_equals_ase_itself(relaxion, alloy_file, alloy):
    alloy.calc = EMT()
    bfgs = BFGS(alloy, logfile=None)
    bfgs.run(fmax=0.05, steps=500)
    report = relaxion("relax", alloy_file, "--json", "--compare", "bfgs").objects[0]
    assert set(report) == KEYS | {"compare"}
    ((name, other),) = report["compare"].items()
    assert name == "BFGS"
    assert set(other) == {
        "converged", "force_calls", "energy_ev", "enthalpy_ev", "fmax_ev_per_angstrom", "wall_time_seconds",
    }  # fmt: skip
    assert other["converged"]
    assert other["force_calls"] == bfgs.nsteps + 1
    assert other["energy_ev"] == pytest.approx(alloy.get_potential_energy(), abs=1e-5)


def test_compare_sentence(relaxion, alloy_file):
    report = relaxion("relax", alloy_file, "--json", "--compare", "BFGS,FIRE").objects[0]
    ours, bfgs = report["force_calls"], report["compare"]["BFGS"]["force_calls"]
    fire = report["compare"]["FIRE"]["force_calls"]
    answer = relaxion("relax", alloy_file, "--compare", "BFGS,FIRE", "--out", "other")
    assert f"in {ours} force calls (BFGS {bfgs}, FIRE {fire}: {bfgs / ours:.1f} × fewer than BFGS)" in answer.out


@pytest.mark.parametrize("name", ["LBFGS", "LBFGSLineSearch", "FIRE2", "GPMin", "MDMin", "QuasiNewton", "CG"])
def test_every_named_comparator_runs(relaxion, alloy_file, name):
    other = relaxion("relax", alloy_file, "--json", "--compare", name).objects[0]["compare"][name]
    assert other["converged"], other
    assert other["fmax_ev_per_angstrom"] < 0.05


def test_another_minimum_is_named(relaxion, alloy_file):
    """A calculator whose energies rise by 0.1 eV with every new start: nobody meets in the same minimum."""
    options = ["--calc", "calculators_for_test:OtherMinima", "--compare", "BFGS,FIRE"]
    answer = relaxion("relax", alloy_file, *options)
    assert "; BFGS found another minimum, 12." in answer.out
    assert "; FIRE found another minimum, 2" in answer.out
    assert "meV/atom higher" in answer.out
    assert "another minimum" not in relaxion("relax", alloy_file, "--compare", "BFGS", "--force").out


def test_comparison_that_does_not_converge(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--steps", "8", "--compare", "FIRE")
    assert answer.code == 0, "only our own result decides"
    assert "(FIRE not converged after 9)" in answer.out


def test_comparison_that_fails(relaxion, alloy_file):
    """The comparison is lost, not the result."""
    calls = relaxion("relax", alloy_file, "--json").objects[0]["force_calls"]
    with Path("calculators_for_test.py").open("a") as file:
        file.write(f"breaks_later = lambda: Breaks({calls + 3}, OSError('away'))\n")
    options = ["--calc", "calculators_for_test:breaks_later", "--compare", "BFGS", "--json", "--force"]
    answer = relaxion("relax", alloy_file, *options)
    assert answer.code == 0
    other = answer.objects[0]["compare"]["BFGS"]
    assert (other["converged"], other["force_calls"]) == (False, 3)
    assert "OSError: away" in other["error"]


def test_cell(relaxion, alloy_file, alloy):
    answer = relaxion("relax", alloy_file, "--cell", "--json", "--compare", "BFGS")
    relaxed = read("relaxed/alloy/alloy.extxyz")
    assert answer.code == 0
    assert abs(relaxed.get_volume() - alloy.get_volume()) > 1.0
    assert np.abs(relaxed.get_stress() * relaxed.get_volume()).max() < 0.05 * np.sqrt(len(relaxed)) * 3
    assert answer.objects[0]["energy_ev"] == pytest.approx(answer.objects[0]["compare"]["BFGS"]["energy_ev"], abs=0.008)
    assert np.allclose(read("relaxed/alloy/alloy.traj").cell, relaxed.cell)


@pytest.mark.parametrize("name", ["alloy.cif", "POSCAR", "alloy.vasp", "alloy.cif.gz", "alloy.json"])
def test_result_in_the_format_of_the_input(relaxion, alloy, name):
    write(name, alloy)
    assert relaxion("relax", name).code == 0
    (folder,) = Path("relaxed").iterdir()
    native, relaxed = read(folder / name), read(next(folder.glob("*.extxyz")))
    assert len(read(next(folder.glob("*.traj")), ":")) > 2
    assert largest_emt_force(native) == pytest.approx(largest_emt_force(relaxed), abs=0.01)
    assert "occupancy" not in relaxed.info


def test_trajectory_as_input_is_not_confused_with_the_trajectory_written(relaxion, alloy):
    write("alloy.traj", alloy)
    calls = relaxion("relax", "alloy.traj", "--json").objects[0]["force_calls"]
    assert len(read("relaxed/alloy/alloy.traj", ":")) == calls
    assert largest_emt_force(read("relaxed/alloy/alloy-relaxed.traj")) < 0.05


def test_format_ase_cannot_write(relaxion, alloy):
    Path("alloy.dat").write_text(_lammps_dump(alloy))
    answer = relaxion("relax", "alloy.dat")
    assert answer.code == 0
    assert "only extxyz was written" in answer.err
    assert not list(Path("relaxed/alloy").glob("*.dat"))


def _lammps_dump(atoms: Atoms) -> str:
    lines = ["ITEM: TIMESTEP", "0", "ITEM: NUMBER OF ATOMS", str(len(atoms)), "ITEM: BOX BOUNDS pp pp pp"]
    lines += [f"0.0 {length}" for length in atoms.cell.lengths()]
    lines += ["ITEM: ATOMS id type element x y z"]
    rows = zip(atoms.symbols, atoms.positions, strict=True)
    return "\n".join(lines + [f"{n} 1 {s} {x} {y} {z}" for n, (s, (x, y, z)) in enumerate(rows, 1)]) + "\n"


def test_several_structures_in_one_file(relaxion, alloy, copper):
    write("many.xyz", [alloy, copper])
    answer = relaxion("relax", "many.xyz", "--json")
    assert [(o["file"], o["index"], o["formula"]) for o in answer.objects] == [
        ("many.xyz", 0, "Au2Cu6"),
        ("many.xyz", 1, "Cu4"),
    ]
    assert sorted(str(path) for path in Path("relaxed").glob("*/*.extxyz")) == [
        "relaxed/many-0/many-0.extxyz",
        "relaxed/many-1/many-1.extxyz",
    ]


def test_files_of_one_stem_do_not_collide(relaxion, alloy, copper):
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write(f"{folder}/POSCAR", alloy if folder == "a" else copper)
    write("alloy.xyz", alloy)
    write("alloy.cif", copper)
    answer = relaxion("relax", "a/POSCAR", "b/POSCAR", "alloy.xyz", "alloy.cif", "--json")
    places = [report["written_to"] for report in answer.objects]
    assert places == ["relaxed/a-POSCAR", "relaxed/b-POSCAR", "relaxed/alloy.xyz", "relaxed/alloy.cif"]
    formulas = [str(read(next(Path(place).glob("*.extxyz"))).symbols) for place in places]
    assert formulas[1] == formulas[3] == "Cu4"
    assert formulas[0] == formulas[2] != "Cu4"


def test_constraints_hold(relaxion, alloy):
    alloy.set_constraint(FixAtoms([0, 3]))
    write("alloy.vasp", alloy, format="vasp")
    assert relaxion("relax", "alloy.vasp", "--rattle", "0.02").code == 0
    relaxed = read("relaxed/alloy/alloy.vasp")
    shifts = np.linalg.norm(relaxed.positions - read("alloy.vasp").positions, axis=1)
    assert shifts[[0, 3]] == pytest.approx(0.0, abs=1e-10)
    assert shifts[[1, 2]].min() > 1e-3
    assert sorted(relaxed.constraints[0].index) == [0, 3]


def test_rattle_keeps_every_constraint_and_follows_the_seed(relaxion, copper):
    copper.set_constraint(FixCartesian([1], mask=(True, True, False)))
    write("copper.traj", copper)
    energies = {}
    for seed, out in ((1, "first"), (1, "again"), (2, "other")):
        options = ["--rattle", "0.1", "--seed", seed, "--steps", "0", "--json", "--out", out]
        energies[out] = relaxion("relax", "copper.traj", *options).objects[0]["energy_ev"]
    assert energies["first"] == energies["again"] != energies["other"]
    moved = read("first/copper/copper.extxyz").positions - copper.positions
    assert moved[1, :2] == pytest.approx(0.0, abs=1e-8)
    assert abs(moved[1, 2]) > 1e-4


def test_not_converged(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--steps", "1")
    assert answer.code == 3
    assert "not converged (step limit) after 2 force calls" in answer.out
    assert "try --steps" in answer.out
    report = relaxion("relax", alloy_file, "--steps", "0", "--json", "--force").objects[0]
    assert (report["outcome"], report["force_calls"], report["converged"]) == ("step_limit", 1, False)


def test_answers_that_are_not_finite(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--calc", "calculators_for_test:NotFinite", "--json")
    assert answer.code == 3
    (report,) = answer.objects
    assert (report["outcome"], report["fmax_ev_per_angstrom"], report["energy_ev"]) == ("non_finite", None, None)
    assert report["written_to"] is None
    assert not list(Path("relaxed").iterdir()), "a structure without a finite answer is not a result"


@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize(("kind", "best"), [("NotFiniteLater", None), ("Uphill", 0), ("UphillInterrupted", 0)])
def test_what_is_written_is_the_best_point_and_not_the_last_one_tried(relaxion, alloy_file, kind, best, cell):
    """Numbers and structure belong together; a point that is not finite or was rejected is never written."""
    options = ["--calc", f"calculators_for_test:{kind}", "--steps", "4", "--json", *["--cell"] * cell]
    (report,) = relaxion("relax", alloy_file, *options).objects
    assert report["outcome"] == ("interrupted" if "Interrupted" in kind else "step_limit")
    frames = read("relaxed/alloy/alloy.traj", ":")
    energies = [frame.get_potential_energy() for frame in frames]
    best = int(np.argmin(energies[:2])) if best is None else best
    written = read("relaxed/alloy/alloy.extxyz")
    assert written.positions == pytest.approx(frames[best].positions, abs=1e-7)
    assert written.cell.array == pytest.approx(frames[best].cell.array, abs=1e-7)
    assert report["energy_ev"] == pytest.approx(energies[best], abs=1e-6)
    if not cell:
        assert report["fmax_ev_per_angstrom"] == pytest.approx(largest_emt_force(frames[best]), abs=1e-6)
    else:
        assert np.isfinite(report["fmax_ev_per_angstrom"])


def test_force_of_a_free_cell_is_that_of_the_filter(relaxion, alloy_file):
    report = relaxion("relax", alloy_file, "--cell", "--steps", "3", "--json").objects[0]
    logged = Path("relaxed/alloy/alloy.log").read_text().splitlines()[-1].split()
    assert report["fmax_ev_per_angstrom"] == pytest.approx(float(logged[-1]), abs=1e-6)
    assert report["energy_ev"] == pytest.approx(float(logged[-2]), abs=1e-6)


def test_a_calculator_that_greets_does_not_spoil_the_json(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--json", "--calc", "calculators_for_test:greets")
    assert len(answer.objects) == 1


def test_manifest_is_the_json_object(relaxion, alloy_file):
    report = relaxion("relax", alloy_file, "--json", "--compare", "BFGS").objects[0]
    manifest = json.loads(Path("relaxed/alloy/relaxion.json").read_text())
    assert manifest["result"] == report
    assert manifest["files"] == ["alloy.extxyz", "alloy.log", "alloy.traj", "alloy.xyz"]
    plain = relaxion("relax", alloy_file, "--json", "--out", "other").objects[0]
    assert json.loads(Path("other/alloy/relaxion.json").read_text())["result"] == plain


def test_input_called_like_the_manifest(relaxion, alloy):
    write("relaxion.json", alloy)
    assert relaxion("relax", "relaxion.json").code == 0
    assert json.loads(Path("relaxed/relaxion/relaxion.json").read_text())["format"] == "relaxion-result"
    assert len(read("relaxed/relaxion/relaxion-relaxed.json")) == 8


def test_force_replaces_what_an_earlier_run_wrote_and_nothing_else(relaxion, alloy, alloy_file):
    folder = Path("relaxed/alloy")
    write("alloy.cif", alloy)
    relaxion("relax", "alloy.cif")
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()
    assert relaxion("relax", alloy_file, "--force").code == 0
    ours = {"alloy.xyz", "alloy.extxyz", "alloy.log", "alloy.traj", "relaxion.json"}
    assert {file.name for file in folder.iterdir()} == ours | {"notes.txt", "plots"}
    assert [entry.name for entry in Path("relaxed").iterdir()] == ["alloy"]


def test_results_that_are_folders_are_replaced(relaxion, alloy, alloy_file):
    write("alloy.bundle", alloy, format="bundletrajectory")
    for _ in range(2):
        assert relaxion("relax", "alloy.bundle", "--force").code == 0
        assert largest_emt_force(read("relaxed/alloy/alloy.bundle")) < 0.05
    relaxion("relax", alloy_file, "--force")
    assert not Path("relaxed/alloy/alloy.bundle").exists()


@pytest.mark.parametrize(
    "content",
    ["", "[1]", '{"files": ["notes.txt"]}', '{"format": "relaxion-result", "files": 3}', "\udcff",
     '{"format": "relaxion-result", "files": ["../precious", "..", "", ".", "/tmp", 7, "deep/precious"]}'],
)  # fmt: skip
def test_a_foreign_or_damaged_manifest_deletes_nothing(relaxion, alloy_file, content):
    folder = Path("relaxed/alloy")
    (folder / "deep").mkdir(parents=True)
    mine = [Path("relaxed/precious"), folder / "notes.txt", folder / "deep/precious"]
    for file in mine:
        file.write_text("mine")
    (folder / "relaxion.json").write_bytes(content.encode(errors="surrogateescape"))
    assert relaxion("relax", alloy_file, "--force").code == 0
    assert all(file.read_text() == "mine" for file in mine)
    assert json.loads((folder / "relaxion.json").read_text())["result"]["converged"]


def test_elements_emt_knows_for_fun_are_mentioned_once_per_file(relaxion, alloy):
    water = molecule("H2O")
    water.rattle(0.05, seed=1)
    write("water.xyz", [water, water])
    answer = relaxion("relax", "water.xyz", "--json", "--calc", "emt")
    assert answer.err.count("EMT is made for metals") == 1
    assert "made for metals" not in answer.out
    assert "made for metals" not in relaxion("relax", "water.xyz", "--calc", "emt", "--quiet", "--force").err
    write("alloy.cif", alloy)
    assert "made for metals" not in relaxion("relax", "alloy.cif").err
    assert "made for metals" not in relaxion("relax", "water.xyz", "--calc", "ase.calculators.emt:EMT", "--force").err


def test_already_relaxed_and_symmetric(relaxion, copper):
    write("copper.xyz", copper)
    answer = relaxion("relax", "copper.xyz")
    assert answer.code == 0
    assert "Cu4 already relaxed (1 force call)" in answer.out
    assert "try --leave-saddles" in answer.err
    rattled = relaxion("relax", "copper.xyz", "--rattle", "0.05", "--force")
    assert "already relaxed" not in rattled.out
    assert "try --rattle" not in rattled.err


@pytest.mark.parametrize("periodic", [True, False])
def test_one_atom(relaxion, periodic):
    write("one.xyz", bulk("Cu") if periodic else Atoms("Cu"))
    answer = relaxion("relax", "one.xyz")
    assert answer.code == 0
    assert "Cu already relaxed (1 force call)" in answer.out
    assert "--rattle" not in answer.err


def test_molecule_without_a_cell(relaxion):
    water = molecule("H2O")
    water.rattle(0.05, seed=1)
    write("water.xyz", water)
    answer = relaxion("relax", "water.xyz", "--json")
    assert answer.code == 0
    assert not read("relaxed/water/water.extxyz").pbc.any()


@pytest.mark.usefixtures("shipped")
def test_policy_none_and_auto_where_none_ships_are_the_classical_core(relaxion, alloy_file):
    both = [relaxion("relax", alloy_file, "--policy", p, "--json", "--out", p) for p in ("auto", "none")]
    (auto,), (none,) = (answer.objects for answer in both)
    assert auto["policy"] == none["policy"] == "classical"
    assert auto["force_calls"] == none["force_calls"]
    assert (auto["fallback_used"], none["fallback_used"]) == (0, 0)
    assert "classical optimizer is used" not in both[0].err


def test_progress_on_stderr_only_and_quiet(relaxion, alloy_file):
    assert "alloy.xyz · Relaxion: call 1, energy " in relaxion("relax", alloy_file).err
    assert relaxion("relax", alloy_file, "--quiet", "--force").err == ""


def test_partial_occupation_is_mentioned(relaxion, alloy):
    write("alloy.cif", alloy)
    text = Path("alloy.cif").read_text()
    first = next(line for line in text.splitlines() if line.split()[:2] == ["Cu", "Cu1"])
    Path("alloy.cif").write_text(text.replace(first, first.replace("1.0000", "0.7500")))
    assert "1 sites are partly occupied" in relaxion("relax", "alloy.cif").err


def test_calculators(relaxion):
    table = relaxion("calculators")
    assert table.code == 0
    assert "module:factory" in table.out
    entries = {entry["spec"]: entry for entry in map(json.loads, relaxion("calculators", "--json").out.splitlines())}
    assert entries["emt"]["available"]
    assert "Cu" in entries["emt"]["elements"]
    assert entries["chgnet"]["how_to_install"] == "pip install 'relaxion[chgnet]'"


def test_a_saddle_point_is_left_if_asked(relaxion):
    write("flat.xyz", Atoms("Cu4", [(0, 0, 0), (2.4, 0, 0), (0, 2.4, 0), (2.4, 2.4, 0)]))
    (plain,) = relaxion("relax", "flat.xyz", "--json").objects
    assert plain["end_check"]["checked"] is False
    answer = relaxion("relax", "flat.xyz", "--json", "--leave-saddles", "--report", "--out", "left")
    (left,) = answer.objects
    assert left["end_check"]["checked"] is True
    assert left["end_check"]["saddle_energies_ev"][0] == pytest.approx(plain["energy_ev"], abs=1e-3)
    assert left["energy_ev"] < plain["energy_ev"] - 0.1
    assert left["end_check"]["lowest_curvature_ev_per_angstrom2"] > -0.05
    ended = read("left/flat/flat.extxyz")
    assert np.allclose(ended.positions, read("left/flat/flat.traj").positions, atol=1e-6)
    assert largest_emt_force(ended) < 0.05
    assert "lowest curvature" in Path("left/flat/report.html").read_text(encoding="utf-8")
    again = relaxion("report", "left/flat", "--out", "again.html")
    assert again.code == 0
    assert "lowest curvature" in Path("again.html").read_text(encoding="utf-8")
