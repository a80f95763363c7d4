"""`relaxion relax-many`, `status`, `merge` as a user meets them, and as a killed process leaves them."""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixSymmetry
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.units import GPa

from relaxion import Relaxer
from relaxion import potential as relaxion_potential
from relaxion.apps.cli import inputs
from relaxion.apps.cli.progress import declared_options
from relaxion.apps.relax_many.results import results
from relaxion.apps.relax_many.run import atoms_of, places, task_line
from relaxion.errors import RelaxionError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from relaxion.apps.cli.app import main; main()"]
HELD = "calculators_for_test:Held"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def alloys(number: int) -> Path:
    images = []
    for seed in range(number):
        atoms = bulk("Cu", a=3.8, cubic=True)
        generator = np.random.default_rng([8800, seed])
        atoms.symbols[generator.random(4) < 0.4] = "Au"
        atoms.positions += generator.normal(0, 0.12, (4, 3))
        images.append(atoms)
    write("many.extxyz", images)
    return Path("many.extxyz")


@pytest.mark.parametrize(
    ("words", "numbers"),
    [("0:2", [0, 1]), ("4", [4]), ("-1", [4]), ("-2:", [3, 4]), ("::2", [0, 2, 4]), ("::-2", [0, 2, 4]), ("9", None)],
)
def test_slices_of_files(tmp_path, monkeypatch, words, numbers):
    monkeypatch.chdir(tmp_path)
    found = list(places(Path(f"{alloys(5)}@{words}")))
    if numbers is None:
        assert [place.error for place in found] == ["many.extxyz@9 selects no structure: it has fewer structures"]
    else:
        assert [(place.file, place.index) for place in found] == [(Path("many.extxyz"), n) for n in numbers]
        assert all(place.atoms is not None for place in found)


def test_from_files_to_one_file(relaxion):
    alloys(12)
    answer = relaxion("relax-many", "many.extxyz@:10", "--out", "out", "--workers", "local:1", "--json", "-q")
    assert answer.code == 0
    (told,) = answer.objects
    assert (told["relaxed"], told["converged"], told["waiting"], told["doubles"]) == (10, 10, 0, 0)
    assert told["this_run"]["relaxed"] == 10

    status = relaxion("status", "out")
    assert status.code == 0
    assert "10 relaxed (10 converged); 10 structures in the input; no process is running" in status.out
    (plain,) = relaxion("status", "out", "--json").objects
    assert plain["running"] is False
    assert plain["settings"]["policy_weights"].keys() == {"metals", "universal"}

    assert relaxion("merge", "out", "all.extxyz").code == 0
    assert [atoms.info["relaxion_outcome"] for atoms in read("all.extxyz", ":")] == ["converged"] * 10
    again = relaxion("merge", "out", "all.extxyz")
    assert again.code == 1
    assert "--force" in again.err
    assert Path("out/summary.csv").read_text().count("\n") == 11

    other = relaxion("relax-many", "many.extxyz", "--out", "out", "--fmax", "0.01")
    assert other.code == 2
    assert "fmax_ev_per_angstrom = 0.05, now it is 0.01" in other.err
    other = relaxion("relax-many", "many.extxyz", "--out", "out", "--policy", "none")
    assert other.code == 2
    assert "policy" in other.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "local:none"], "local:2"),
        (["--time-limit", "0"], "--time-limit"),
        (["--fmax", "-1"], "--fmax"),
        (["--calc", "emmt"], "did you mean 'emt'"),
        (["--policy", "metalls"], "metals"),
    ],
)
def test_bad_options_are_refused_before_anything_is_begun(relaxion, arguments, words):
    answer = relaxion("relax-many", alloys(1), "--out", "out", *arguments)
    assert answer.code == 2
    assert words in answer.err
    assert not Path("out").exists()


def test_missing_files_and_folders_get_a_sentence(relaxion):
    answer = relaxion("relax-many", "nowhere.xyz", "--out", "out")
    assert answer.code == 1
    assert "does not exist" in answer.err
    assert relaxion("relax-many", "--out", "out").code == 2
    for command in (["status", "out"], ["merge", "out", "all.extxyz"]):
        answer = relaxion(*command)
        assert answer.code == 1
        assert "holds no results" in answer.err


def wait_for_results(process: subprocess.Popen) -> None:
    until = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < until:
        with suppress(RelaxionError):
            if results(Path("out")):
                return
        time.sleep(0.02)


def test_a_driver_killed_while_it_writes_is_followed_by_one_that_goes_on(relaxion):
    """The small fault test; the large one is benchmarks/faults/relax_many.py."""
    arguments = ["relax-many", str(alloys(60)), "--out", "out", "--workers", "local:1", "--calc", HELD, "-q"]
    Path("hold").touch()
    process = subprocess.Popen([*COMMAND, *arguments], env=ENVIRONMENT)
    wait_for_results(process)
    status = relaxion("status", "out", "--json").objects[0]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert status["running"] is True
    before = relaxion("status", "out", "--json").objects[0]
    assert before["running"] is False
    assert 0 < before["relaxed"] < 60
    Path("hold").unlink()
    answer = relaxion(*arguments, "--json")
    assert answer.code == 0
    (told,) = answer.objects
    assert (told["relaxed"], told["converged"], told["waiting"]) == (60, 60, 0)
    assert told["this_run"]["relaxed"] < 60
    assert relaxion("merge", "out", "all.extxyz").code == 0
    keys = [atoms.info["relaxion_key"] for atoms in read("all.extxyz", ":")]
    assert len(set(keys)) == len(keys) == 60


def _descendants(process: int) -> set[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {int(child) for child in children}.union(*(_descendants(int(child)) for child in children))


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_what_is_done_is_kept_and_nobody_is_left(relaxion, number):
    arguments = ["relax-many", str(alloys(60)), "--out", "out", "--workers", "local:1", "--calc", HELD, "-q"]
    Path("hold").touch()
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_results(process)
    workers = _descendants(process.pid)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: all of them hear it
    else:
        process.send_signal(number)  # as a batch system does
    _, said = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert "all results so far are saved; run the same command again to continue" in said
    assert workers
    until = time.monotonic() + 600
    while any(map(_alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_alive, workers))
    before = relaxion("status", "out", "--json").objects[0]
    assert (before["running"], before["failed"]) == (False, 0)
    assert 0 < before["relaxed"] < 60
    Path("hold").unlink()
    (told,) = relaxion(*arguments, "--json").objects
    assert (told["relaxed"], told["converged"], told["waiting"]) == (60, 60, 0)
    assert told["this_run"]["relaxed"] == 60 - before["relaxed"]


@pytest.mark.slow
def test_workers_on_ray(relaxion):
    """`ray:auto` starts a cluster on this machine where there is none; driver and cluster are gone afterwards."""
    pytest.importorskip("ray")
    command = [*COMMAND, "relax-many", str(alloys(30)), "--out", "out", "--workers", "ray:auto", "--json", "-q"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["relaxed"], told["converged"], told["waiting"]) == (30, 30, 0)
    assert relaxion("merge", "out", "all.extxyz").code == 0
    assert len(read("all.extxyz", ":")) == 30


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_under_faults():
    """150 structures: full disk, workers, their parent and the driver killed, hostile calculators."""
    options = "--number 150 --hostile 30 --seed 8700 --batch-size 2 --seconds-between 0.5 --workers-per-driver 2"
    script = ROOT / "benchmarks" / "faults" / "relax_many.py"
    command = [sys.executable, str(script), *options.split(), "--most-seconds", "30", "--json", "report.json"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(Path("report.json").read_text())
    compared = report["compared"]
    assert compared["places"] == 150
    assert (compared["lost"], compared["doubled"], compared["set_aside"], compared["different"]) == (0, 0, 0, 0)
    assert sum(report["kills"].get(kind, 0) for kind in ("worker", "server", "driver")) > 0
    assert report["full_disk"]["sentence"]
    assert not report["full_disk"]["traceback"]
    assert report["hostile_one_by_one"]["as_expected"]
    assert report["hostile_batches"]["as_expected"]


def rows(folder: str) -> list[dict[str, str]]:
    with Path(folder, "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_relax_and_relax_many_take_the_same_options_with_the_same_defaults():
    own = {"out", "as_json", "quiet"}  # of each command
    options = declared_options()
    one, many = ({option.name: option for option in options[name]} for name in ("relax", "relax-many"))
    assert set(one) - set(many) == {"compare", "report", "resume", "force", "rattle", "seed", "leave_saddles"}
    assert set(many) - set(one) == {"learn", "workers", "batch_size", "time_limit", "retry_failed"}
    for name in (set(one) & set(many)) - own:
        said = [(option.opts, option.default, option.help, option.metavar) for option in (one[name], many[name])]
        assert said[0] == said[1]


def test_a_calculator_is_chosen_and_kept(relaxion, monkeypatch):
    monkeypatch.setattr(inputs, "is_installed", lambda _: False)
    write("iron.extxyz", [bulk("Fe", a=a, cubic=True) for a in (2.8, 2.9)])
    first = relaxion("relax-many", "iron.extxyz", "--out", "out", "--workers", "1")
    assert first.code == 0, first.err
    assert "--calc is not given, so eam is used" in first.err
    again = relaxion("relax-many", "--out", "out", "--workers", "1")
    assert (again.code, "2 relaxed (2 converged)" in again.out) == (0, True), again.err
    (plain,) = relaxion("status", "out", "--json").objects
    assert plain["settings"]["calculator"] == "eam"


def test_pressure_and_mask(relaxion):
    images = [bulk("NiAl", "cesiumchloride", a=a) * (2, 1, 1) for a in (2.95, 3.1)]
    write("nial.extxyz", images)
    pressed = ("--cell", "--pressure", "20", "--workers", "local:1", "--fmax", "0.005")
    assert relaxion("relax-many", "nial.extxyz", "--out", "out", *pressed, "--cell-mask", "zz").code == 0
    assert relaxion("merge", "out", "all.extxyz").code == 0
    for start, end, row in zip(images, read("all.extxyz", ":"), rows("out"), strict=True):
        assert end.cell.lengths()[:2] == pytest.approx(start.cell.lengths()[:2])
        assert end.get_stress()[2] == pytest.approx(-20 * GPa, rel=0.05)
        energy, enthalpy = float(row["energy_ev"]), float(row["enthalpy_ev"])
        assert energy == pytest.approx(end.get_potential_energy(), abs=1e-6)
        assert enthalpy == pytest.approx(energy + 20 * GPa * end.get_volume(), abs=1e-4)
        assert end.info["relaxion_enthalpy_ev"] == pytest.approx(enthalpy)
    other = relaxion("relax-many", "nial.extxyz", "--out", "out", *pressed, "--cell-mask", "zz", "--pressure", "10")
    assert (other.code, "pressure_gpa = 20" in other.err) == (2, True)
    assert "add --cell" in relaxion("relax-many", "nial.extxyz", "--pressure", "5", "--out", "other").err


def test_symmetry_is_kept(relaxion):
    """Rattled by less than the tolerance of the space group: the same end as with ASE's constraint and Relaxer."""
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.symbols[0] = "Au"
    atoms.rattle(0.002, seed=1)
    write("many.extxyz", atoms)
    for out, more in {"kept": ["--keep-symmetry"], "free": []}.items():
        options = ("--cell", "--fmax", "0.01", "--workers", "local:1", "--calc", "emt", *more)
        assert relaxion("relax-many", "many.extxyz", "--out", out, *options).code == 0
        assert relaxion("merge", out, f"{out}.extxyz").code == 0
    atoms = read("many.extxyz")
    atoms.set_constraint(FixSymmetry(atoms, symprec=0.01))
    atoms.calc = relaxion_potential("emt").as_calculator()
    Relaxer(FrechetCellFilter(atoms), logfile=None).run(fmax=0.01)
    kept, free = read("kept.extxyz"), read("free.extxyz")
    assert kept.positions == pytest.approx(atoms.positions, abs=1e-6)
    assert np.abs(free.positions - atoms.positions).max() > 1e-4
    write("alone.extxyz", Atoms("Cu2", [[0, 0, 0], [0, 0, 2.3]]))
    assert relaxion("relax-many", "alone.extxyz", "--out", "alone", "--keep-symmetry", "--workers", "local:1").code == 1
    assert "periodic along all axes" in rows("alone")[0]["reason"]


def test_ids_are_kept(relaxion):
    images = [bulk("Cu", a=a) for a in (3.5, 3.6, 3.7)]
    images[0].info |= {"id": 17, "source": "paper"}
    images[1].info |= {"material_id": "mp-30", "name": "copper"}
    write("many.extxyz", images)
    assert relaxion("relax-many", "many.extxyz", "--out", "out", "--workers", "local:1").code == 0
    found = rows("out")
    assert [row["id"] for row in found] == ["17", "mp-30", ""]
    assert json.loads(found[0]["info"]) == {"id": 17, "source": "paper"}
    assert relaxion("merge", "out", "all.extxyz").code == 0
    assert [atoms.info.get("id") for atoms in read("all.extxyz", ":")] == [17, None, None]


def test_a_charge_in_a_file_reaches_the_calculator():
    """Numbers that ASE reads are NumPy's."""
    atoms = bulk("Cu")
    atoms.info["charge"] = np.int64(1)
    assert atoms_of(task_line("s0", atoms)).info == {"charge": 1}


def test_the_number_of_structures_is_told_only_where_it_is_known(relaxion):
    alloys(3)
    assert relaxion("relax-many", "many.extxyz", "--out", "out", "--workers", "local:1").code == 0
    assert "3 structures in the input;" in relaxion("status", "out").out
    with sqlite3.connect("out/results.sqlite") as database:  # as a kill leaves it
        database.execute("UPDATE files SET complete = 0")
        database.execute("DELETE FROM inputs WHERE place = 2")
    killed = relaxion("status", "out").out
    assert "2 structures read so far (the input is not read completely" in killed
    assert "the work is not finished" in killed
    assert relaxion("status", "out", "--json").objects[0]["input_read"] is False
