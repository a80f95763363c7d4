"""What a new user meets first: quick refusals, one thread, a calculator that fits, slices, help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.io import read, write
from ase.units import GPa

from relaxion import relax_batch
from relaxion.apps.cli import inputs
from relaxion.apps.cli import relax as relax_command
from relaxion.apps.cli.inputs import Choice, calculator_for
from relaxion.apps.report.page import space_group
from relaxion.errors import PotentialError
from relaxion.potentials.pairwise import LennardJones
from relaxion.train.data.dataset import reading_error

PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
LOADED = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
from relaxion.apps.cli.app import main
main()
"""


def call(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    how = ["-m", "relaxion"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *how, *words], capture_output=True, text=True, check=False, env=PLAIN | {"COLUMNS": "120"}
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["relax", "nope.cif"], 1, "nope.cif does not exist"),
        (["relax", "nope.cif", "--fmax", "-1"], 2, "--fmax is a force in eV/Å above 0, got -1.0"),
        (["race", "nope.cif@0:2"], 1, "nope.cif does not exist"),
        (["relax-many", "nope.cif"], 1, "nope.cif does not exist"),
        (["report", "nope"], 1, "nope does not exist"),
        (["train", "pendulun"], 2, "did you mean 'pendulum'?"),
    ],
)
def test_wrong_arguments_are_told_before_torch_is_loaded(words: list[str], code: int, said: str) -> None:
    answer = call(*words, code=LOADED)
    assert answer.returncode == code
    assert said in answer.stderr
    assert answer.stderr.endswith("False\n")


def test_every_command_takes_one_thread_unless_told_otherwise() -> None:
    code = (
        "import torch; from relaxion.apps.cli.command import use_one_thread as u; u(); print(torch.get_num_threads())"
    )
    many = subprocess.run(
        [sys.executable, "-c", code.replace("import torch;", "import torch; torch.set_num_threads(2);")],
        capture_output=True, text=True, check=True, env=PLAIN,
    )  # fmt: skip
    assert many.stdout.strip() == "1", "also where torch was loaded before"
    own = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=PLAIN | {"OMP_NUM_THREADS": "2"}
    )
    assert own.stdout.strip() == "2"


def test_python_m_relaxion() -> None:
    assert call("--version").stdout.startswith("relaxion ")


def test_help_shows_no_types_of_flags_and_loses_no_brackets(relaxion) -> None:
    assert "<bool>" not in relaxion("relax", "--help").out
    tune = relaxion("tune", "--help").out
    assert "KEY=LO:HI:log or KEY=A|B|C" in " ".join(tune.replace("│", " ").split())
    assert "--resume" not in tune.split("Exit codes")[0]
    train = " ".join(relaxion("train", "--help").out.split())
    assert "Recipes: al-fe, al-fe-stiffness, alfe-cubic" in train
    assert "universal-data" not in train


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if these packages were there, with engines for all elements."""
    monkeypatch.setattr(inputs, "is_installed", lambda package: package in packages)
    monkeypatch.setattr(inputs, "make_potential", lambda *_: LennardJones())


RUTILE = Atoms("TiO2", positions=[[0, 0, 0], [1.4, 1.4, 0], [2.9, 2.9, 0]], cell=[4.6, 4.6, 3], pbc=True)


@pytest.mark.parametrize(
    ("atoms", "packages", "name"),
    [
        (bulk("Cu"), ("chgnet",), "emt"),
        (RUTILE, ("sevenn", "chgnet"), "chgnet"),
        (RUTILE, ("sevenn", "mace"), "sevennet"),
        (RUTILE, ("mace",), "mace"),
        (molecule("H2O"), ("chgnet", "tblite"), "gfn2"),
        (molecule("H2O"), ("chgnet",), "emt"),
        (bulk("Fe"), (), "eam"),
        (bulk("MgO", "rocksalt", a=4.2), ("chgnet",), "chgnet"),
    ],
)
def test_a_calculator_that_fits(monkeypatch, atoms: Atoms, packages: tuple[str, ...], name: str) -> None:
    installed(monkeypatch, *packages)
    assert calculator_for([atoms]) == Choice(name, 1, 1)


def test_where_nothing_fits_all_engines_are_named(monkeypatch, relaxion) -> None:
    installed(monkeypatch)
    with pytest.raises(PotentialError, match=r"emt has no Ti.*chgnet.*sevennet.*mace"):
        calculator_for([RUTILE])
    write("rutile.cif", RUTILE)
    answer = relaxion("relax", "rutile.cif")
    assert (answer.code, answer.err.count("\n")) == (1, 1)


@pytest.mark.parametrize(("package", "name"), [("chgnet", "chgnet"), ("sevenn", "sevennet")])
def test_an_engine_is_chosen_only_for_elements_that_it_has(monkeypatch, relaxion, package: str, name: str) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(inputs, "is_installed", lambda asked: asked == package)
    write("po.extxyz", bulk("Po", "sc", a=3.35))
    answer = relaxion("relax", "po.extxyz")
    assert answer.code == 1
    assert "is used" not in answer.err
    assert f"{name} has no Po" in answer.err
    write("some.extxyz", [bulk("Po", "sc", a=3.35), RUTILE, RUTILE])
    assert calculator_for(read("some.extxyz", ":")) == Choice(name, 2, 3)
    assert "fits 2 of 3 structures" in str(Choice(name, 2, 3).in_words())


def test_the_choice_is_said_aloud(monkeypatch, relaxion) -> None:
    installed(monkeypatch)
    write("iron.cif", bulk("Fe", cubic=True))
    answer = relaxion("relax", "iron.cif")
    assert answer.code == 0
    assert "--calc is not given, so eam is used" in answer.err
    assert "--calc" not in relaxion("relax", "iron.cif", "--force", "-q").err


def test_results_in_the_way_are_told_before_a_calculator_is_loaded(monkeypatch, relaxion) -> None:
    write("cu.cif", bulk("Cu", cubic=True))
    assert relaxion("relax", "cu.cif", "-q").code == 0
    monkeypatch.setattr(relax_command, "make_potential", lambda *_: pytest.fail("the calculator was loaded"))
    answer = relaxion("relax", "cu.cif", "--calc", "chgnet", "--json")
    assert (answer.code, "holds earlier results" in answer.err) == (1, True)
    assert (answer.objects[0]["formula"], answer.objects[0]["force_calls"]) == ("Cu4", 0)


def test_what_gfn2_takes_for_granted_is_said(relaxion) -> None:
    pytest.importorskip("tblite")
    radical = molecule("CH3")
    write("told.xyz", radical)  # with the magnetic moments that ASE's molecules have
    radical.set_initial_magnetic_moments(None)
    write("radical.xyz", radical)
    write("water.xyz", molecule("H2O"))
    assert "one unpaired electron (multiplicity 2)" in relaxion("relax", "radical.xyz", "--calc", "gfn2").err
    assert "electron" not in relaxion("relax", "water.xyz", "told.xyz", "--calc", "gfn2").err
    options = ("--calc", "gfn2", "--calc-option", "charge=1", "--force")
    assert "electron" not in relaxion("relax", "radical.xyz", *options).err


def test_what_gfn2_takes_for_granted_is_said_once_in_batches(caplog) -> None:
    pytest.importorskip("tblite")
    radicals = [molecule(name) for name in ("CH3", "OH", "H2O")]
    for radical in radicals:
        radical.set_initial_magnetic_moments(None)
    relax_batch(radicals, "gfn2", max_force_calls=1)
    said = [record.getMessage() for record in caplog.records if "electron" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("CH3: ")
    assert "multiplicity 2" in said[0]


@pytest.fixture
def frames(alloy: Atoms) -> Path:
    images = []
    for seed in range(4):
        image = alloy.copy()
        image.rattle(0.02, seed=seed)
        images.append(image)
    write("frames.xyz", images)
    return Path("frames.xyz")


def test_several_frames_also_come_as_one_file(relaxion, frames: Path) -> None:
    answer = relaxion("relax", f"{frames}@1:3", "--json")
    assert [one["index"] for one in answer.objects] == [1, 2]
    together = read("relaxed/frames.extxyz", ":")
    assert [len(image) for image in together] == [8, 8]
    assert together[1].get_potential_energy() == pytest.approx(answer.objects[1]["energy_ev"])
    assert sorted(path.name for path in Path("relaxed").iterdir()) == ["frames-1", "frames-2", "frames.extxyz"]
    again = relaxion("relax", f"{frames}@-1", "--json")
    assert [one["index"] for one in again.objects] == [3]
    assert "frames.extxyz exists and was left as it is; --force" in again.err


def test_a_slice_that_means_nothing(relaxion, frames: Path) -> None:
    answer = relaxion("relax", f"{frames}@9")
    assert answer.code == 1
    assert "frames.xyz@9 selects no structure: frames.xyz has 4 structures, numbered 0 to 3" in answer.err


def test_a_file_that_has_such_a_name_is_that_file(relaxion, alloy: Atoms) -> None:
    write("alloy@0.xyz", alloy)
    Path("alloy@1").write_bytes(Path("alloy@0.xyz").read_bytes())
    assert relaxion("relax", "alloy@0.xyz", "--json").objects[0]["file"] == "alloy@0.xyz"


def test_race_and_bench_take_slices(relaxion, frames: Path) -> None:
    told = relaxion("race", f"{frames}@2", "--with", "BFGS", "--json")
    assert told.code == 0
    bench = relaxion("bench", f"{frames}@::2", "--with", "none", "--json", "-")
    assert '"structures": 2' in bench.out


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.xyz", "1\n\nXy 0 0 0\n", "'Xy' is not an element"),
        ("folder", None, "it is a folder, not an ASE trajectory"),
    ],
)
def test_what_readers_raise_becomes_a_sentence(relaxion, name: str, content: str | None, said: str) -> None:
    if content is None:
        Path(name).mkdir()
    else:
        Path(name).write_text(content)
    answer = relaxion("relax", name)
    assert answer.code == 1
    assert said in answer.err
    assert "Error" not in answer.err


def test_an_assertion_without_words_becomes_a_sentence() -> None:
    assert reading_error(AssertionError()) == "its content does not match its format (AssertionError)"


def test_pressure_shrinks_the_cell_and_masks_hold_it(relaxion) -> None:
    write("cu.cif", bulk("Cu", cubic=True))
    assert relaxion("relax", "cu.cif", "--cell", "--out", "free", "-q").code == 0
    assert relaxion("relax", "cu.cif", "--cell", "--pressure", "20", "--fmax", "0.005", "--out", "pressed").code == 0
    free, pressed = read("free/cu/cu.extxyz"), read("pressed/cu/cu.extxyz")
    assert pressed.get_volume() < 0.95 * free.get_volume()
    assert pressed.get_stress()[:3] == pytest.approx([-20 * GPa] * 3, rel=0.02)
    one = relaxion("relax", "cu.cif", "--cell", "--pressure", "20", "--cell-mask", "zz", "--out", "masked")
    assert one.code == 0
    lengths = read("masked/cu/cu.extxyz").cell.lengths()
    assert lengths[:2] == pytest.approx([3.61, 3.61])
    assert lengths[2] < 3.5


def test_cell_options_that_make_no_sense(relaxion) -> None:
    write("cu.cif", bulk("Cu", cubic=True))
    assert "add --cell" in relaxion("relax", "cu.cif", "--pressure", "5").err
    answer = relaxion("relax", "cu.cif", "--cell", "--cell-mask", "x")
    assert (answer.code, "xx,yy,zz,yz,xz,xy" in answer.err) == (2, True)


def test_symmetry_is_kept(relaxion) -> None:
    atoms = bulk("NiAl", "cesiumchloride", a=3.2) * (2, 1, 1)
    write("nial.cif", atoms)
    assert relaxion("relax", "nial.cif", "--cell", "--keep-symmetry", "--rattle", "0").code == 0
    relaxed = read("relaxed/nial/nial.extxyz")
    assert "221" in space_group(relaxed).split(";")[0]
    assert relaxed.constraints == []
    write("water.xyz", molecule("H2O"))
    answer = relaxion("relax", "water.xyz", "--calc", "emt", "--keep-symmetry")
    assert "the symmetry is kept only of structures that are periodic" in answer.err


SETTINGS = """
files = ["alloy.cif"]
calc = "lj"
fmax = 0.02
cell-mask = ""

[calc_options]
sigma = 2.4
epsilon = 0.3
"""


def test_options_come_from_a_file_and_the_command_line_wins(relaxion, alloy_file: Path) -> None:
    Path("relax.toml").write_text(SETTINGS.replace("alloy.cif", alloy_file.name))
    assert relaxion("relax", "--settings", "relax.toml", "--fmax", "0.04").code == 0
    asked = json.loads(Path("relaxed", alloy_file.stem, "relaxion.json").read_text())["request"]
    assert asked["calculator"] == "lj?sigma=2.4&epsilon=0.3"
    assert asked["fmax_ev_per_angstrom"] == 0.04


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("fmx = 1", "unknown setting 'fmx': did you mean 'fmax'?"),
        ("fmax = 'x'", "--fmax"),
        ("fmax = ", "cannot be read"),
        ("settings = 'other.toml'", "unknown setting 'settings'"),
        ("calc = 'lj'\n[calc_options]\nsigm = 1", "does not take these options"),
        ("calc = 'lj'\n[calc_options.sigma]\na = 1", "option 'sigma' of a calculator is a number"),
    ],
)
def test_settings_files_that_make_no_sense(relaxion, alloy_file: Path, content: str, said: str) -> None:
    Path("relax.toml").write_text(content)
    answer = relaxion("relax", alloy_file, "--settings", "relax.toml")
    assert answer.code == 2
    assert said in " ".join(answer.err.replace("│", "").split())
