"""`relaxion relax` where something is wrong: one sentence, the right code, nothing overwritten or half-written."""

from __future__ import annotations

import json
import lzma
import signal
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.io import read, write

from relaxion.apps.cli import relax as relax_command
from relaxion.optimizer.step import Stepper
from relaxion.relaxer import Relaxer

FILES: dict[str, tuple[object, list[str]]] = {
    "missing": (None, ["bad.xyz does not exist"]),
    "empty": ("", ["bad.xyz is empty"]),
    "unreadable": ("3\nnothing\nCu 0 0\n", ["bad.xyz cannot be read"]),
    "zero atoms": ("0\n\n", ["bad.xyz holds no structure with atoms"]),
    "nan": ("2\n\nCu 0 0 0\nCu nan 0 3\n", ["1 of 2 positions are not finite", "atom 1"]),
    "overlap": (Atoms("Cu3", positions=[[0, 0, 0], [3, 0, 0], [3, 0, 0.1]]), ["atoms 1 and 2", "0.1 Å apart"]),
    "identical": (Atoms("CuAu", positions=np.zeros((2, 3))), ["atoms 0 and 1 (Cu, Au)", " 0 Å apart"]),
    "image": (Atoms("Cu", cell=[4, 0.2, 4], pbc=True), ["atom 0 (Cu) and its own periodic image", "0.2 Å"]),
    "across the border": (
        Atoms("Cu2", positions=[[0, 0, 0], [3.9, 0, 0]], cell=[4, 4, 4], pbc=True),
        ["atoms 0 and 1", "0.1 Å apart"],
    ),
    "flat cell": ('1\nLattice="4 0 0 0 4 0 0 0 0" pbc="T T T"\nCu 0 0 0\n', ["periodic along 3 axes", "volume"]),
    "element": (bulk("Fe"), ["no parameters for Fe", "Cu"]),
}


def put(content: object) -> None:
    if isinstance(content, Atoms):
        write("bad.xyz", content)
    elif isinstance(content, str):
        Path("bad.xyz").write_text(content)


def one_sentence(text: str) -> None:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text


@pytest.mark.parametrize("case", FILES)
def test_bad_file(relaxion, case):
    content, words = FILES[case]
    put(content)
    answer = relaxion("relax", "bad.xyz", "--calc", "emt")
    assert answer.code == 1
    assert answer.out == ""
    one_sentence(answer.err)
    assert answer.err.count("bad.xyz") == 1 or case == "missing"
    for word in words:
        assert word in answer.err
    assert not Path("relaxed").exists(), "nothing to write, no folder"


@pytest.mark.parametrize("case", FILES)
def test_bad_file_in_json(relaxion, case):
    content, words = FILES[case]
    put(content)
    (report,) = relaxion("relax", "bad.xyz", "--calc", "emt", "--json", "--quiet").objects
    assert (report["file"], report["converged"], report["force_calls"]) == ("bad.xyz", False, 0)
    assert (report["outcome"], report["written_to"], report["energy_ev"]) == ("error", None, None)
    assert words[0] in report["error"]


def test_an_error_does_not_stop_the_others(relaxion, alloy_file):
    answer = relaxion("relax", "missing.cif", alloy_file, "--json")
    assert answer.code == 1
    assert [report["converged"] for report in answer.objects] == [False, True]
    assert "missing.cif does not exist" in answer.err
    assert Path("relaxed/alloy/alloy.extxyz").exists()


def test_error_counts_more_than_not_converged(relaxion, alloy_file):
    assert relaxion("relax", "missing.cif", alloy_file, "--steps", "1").code == 1


USAGE = {
    "calculator": (["--calc", "emtt"], "unknown potential 'emtt': did you mean 'emt'?"),
    "module": (["--calc", "no_such_module:make"], "no_such_module"),
    "fmax 0": (["--fmax", "0"], "--fmax is a force in eV/Å above 0, got 0.0"),
    "fmax nan": (["--fmax", "nan"], "--fmax is a force in eV/Å above 0, got nan"),
    "fmax inf": (["--fmax", "inf"], "--fmax is a force in eV/Å above 0, got inf"),
    "steps": (["--steps", "-1"], "--steps is 0 or more, got -1"),
    "rattle": (["--rattle", "-0.1"], "--rattle is a length in Å, 0 or more, got -0.1"),
    "policy": (["--policy", "aut"], "no policy named 'aut': did you mean 'auto'?"),
    "compare": (["--compare", "BFGS,FIRRE"], "ASE has no optimizer 'FIRRE'; did you mean 'FIRE'?"),
    "compare far": (["--compare", "xyzzy"], "known: BFGS, BFGSLineSearch, CG"),
    "twice": (["alloy.xyz"], "alloy.xyz is given twice"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(relaxion, alloy_file, case):
    options, words = USAGE[case]
    answer = relaxion("relax", alloy_file, *options)
    assert answer.code == 2
    assert answer.out == ""
    one_sentence(answer.err)
    assert words in answer.err
    assert not Path("relaxed").exists()


@pytest.mark.parametrize("options", [["--fmx", "0.1"], ["--steps", "many"], ["--seed", "-1"]])
def test_usage_errors_of_typer(relaxion, alloy_file, options):
    answer = relaxion("relax", alloy_file, *options)
    assert (answer.code, answer.out) == (2, "")
    assert options[0] in answer.err
    assert "Traceback" not in answer.err
    if options[0] == "--fmx":
        assert "--fmax" in answer.err, "the nearest flag is named"


def test_no_file_and_unknown_command(relaxion):
    assert relaxion("relax").code == 2
    assert "'relax'" in relaxion("relx").err


def test_calculator_that_cannot_be_made(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--calc", "calculators_for_test:cannot_be_made")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "FileNotFoundError: no weights here" in answer.err


def test_missing_extra(relaxion, alloy_file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "chgnet", None)
    answer = relaxion("relax", alloy_file, "--calc", "chgnet")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "pip install 'relaxion[chgnet]'" in answer.err


def test_cell_without_stress(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--cell", "--calc", "calculators_for_test:NoStress")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "NoStress gives no stress" in answer.err
    assert relaxion("relax", alloy_file, "--calc", "calculators_for_test:NoStress").code == 0


def test_cell_of_a_cluster(relaxion):
    write("cluster.xyz", Atoms("Cu2", positions=[[0, 0, 0], [2.5, 0, 0]]))
    answer = relaxion("relax", "cluster.xyz", "--cell")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "periodic along 0 of 3 axes" in answer.err


def test_calculator_breaks_in_the_middle(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--calc", "calculators_for_test:breaks_in_the_middle", "--quiet")
    assert (answer.code, answer.out) == (1, "")
    one_sentence(answer.err)
    assert "failed at force call 3: OSError: license server is away" in answer.err
    assert "the structure reached so far is saved in relaxed/alloy/" in answer.err
    frames = read("relaxed/alloy/alloy.traj", ":")
    assert len(frames) == 2
    kept = read("relaxed/alloy/alloy.extxyz")
    assert kept.positions == pytest.approx(frames[1].positions, abs=1e-7)
    assert kept.get_potential_energy() == pytest.approx(frames[1].get_potential_energy(), abs=1e-6)


@pytest.mark.parametrize("cell", [False, True])
def test_a_relaxation_cut_short_goes_on_where_it_was(relaxion, alloy_file, cell):
    options = ["--quiet", "--policy", "none", "--fmax", "0.01", *(["--cell"] if cell else [])]
    (straight,) = relaxion("relax", alloy_file, *options, "--json", "--out", "straight").objects
    assert not list(Path("straight").rglob("*.restart.json"))
    answer = relaxion("relax", alloy_file, *options, "--calc", "calculators_for_test:breaks_in_the_middle")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "the same command with --resume continues from alloy.restart.json there" in answer.err
    assert "alloy.restart.json" in json.loads(Path("relaxed/alloy/relaxion.json").read_text())["files"]
    kept = read("relaxed/alloy/alloy.traj")  # the last accepted point, to all digits
    kept.calc = EMT()
    target = FrechetCellFilter(kept) if cell else kept
    optimizer = Relaxer(target, restart="relaxed/alloy/alloy.restart.json", logfile=None, policy=None)
    assert optimizer.run(fmax=0.01)
    # the second point is read once more from a fresh calculator, the step from it is not thought over again
    assert optimizer.force_calls == straight["force_calls"] + 1
    assert kept.get_potential_energy() == pytest.approx(straight["energy_ev"], abs=1e-6)


def test_calculator_breaks_in_json(relaxion, alloy_file):
    options = ["--calc", "calculators_for_test:breaks_in_the_middle", "--json"]
    (report,) = relaxion("relax", alloy_file, *options).objects
    assert (report["outcome"], report["converged"], report["force_calls"]) == ("error", False, 3)
    assert report["written_to"] == "relaxed/alloy"
    assert "OSError" in report["error"]


def test_calculator_breaks_at_once(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--calc", "calculators_for_test:breaks_at_once")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "failed at force call 1: KeyError: 'Cu'" in answer.err
    assert "kept" not in answer.err
    assert not list(Path("relaxed").iterdir())


def test_ctrl_c_keeps_what_was_reached(relaxion, alloy_file, alloy):
    write("next.xyz", alloy)
    options = ["--calc", "calculators_for_test:interrupted", "--compare", "BFGS"]
    answer = relaxion("relax", alloy_file, "next.xyz", *options)
    assert answer.code == 130
    assert "interrupted after 3 force calls, the structure reached so far is saved" in answer.out
    assert "written to relaxed/alloy/" in answer.out
    assert "1 of 2 structures were not started" in answer.err
    assert "BFGS" not in answer.out + answer.err, "who interrupts does not want a comparison either"
    assert len(read("relaxed/alloy/alloy.traj", ":")) == 2
    assert read("relaxed/alloy/alloy.extxyz").get_forces().shape == (8, 3)
    assert Path("relaxed/alloy/alloy.log").stat().st_size > 0
    assert not Path("relaxed/next").exists()


def test_ctrl_c_before_the_first_answer_keeps_nothing_and_says_so(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--calc", "calculators_for_test:interrupted_at_once")
    assert answer.code == 130
    assert "interrupted after 1 force call, nothing was saved" in answer.out
    assert "kept" not in answer.out + answer.err
    assert not list(Path("relaxed").iterdir())


def test_ctrl_c_while_reading(relaxion, alloy_file, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(relax_command, "read_jobs", interrupt)
    answer = relaxion("relax", alloy_file)
    assert (answer.code, answer.out, answer.err) == (130, "", "relaxion: interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_results_are_written_waits(relaxion, alloy, alloy_file, monkeypatch, number, code):
    write("next.xyz", alloy)

    def interrupted(path, atoms, format):
        if path.suffix == ".extxyz":
            signal.raise_signal(number)
        write(path, atoms, format=format)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("relaxion.apps.result_folder.ase.io.write", interrupted)
    answer = relaxion("relax", "next.xyz", alloy_file, "--json", "--calc", "calculators_for_test:Counted")
    assert answer.code == code
    assert answer.objects[0]["converged"]
    assert len(read("relaxed/next/next.extxyz")) == 8
    assert "1 of 2 structures were not started" in answer.err
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_ctrl_c_during_a_comparison_keeps_the_result(relaxion, alloy_file):
    options = ["--calc", "calculators_for_test:interrupted_in_comparison", "--compare", "BFGS", "--json"]
    answer = relaxion("relax", alloy_file, *options)
    assert answer.code == 130
    assert answer.objects[0]["converged"]
    assert answer.objects[0]["compare"] == {}
    assert "comparison interrupted" in answer.err
    assert Path("relaxed/alloy/alloy.extxyz").exists()


def test_nothing_is_overwritten_without_force(relaxion, alloy_file):
    folder = Path("relaxed/alloy")
    folder.mkdir(parents=True)
    (folder / "alloy.extxyz").write_text("precious")
    (folder / "notes.txt").write_text("mine")
    counted = ["--calc", "calculators_for_test:Counted"]
    answer = relaxion("relax", alloy_file, *counted)
    assert (answer.code, answer.out) == (1, "")
    one_sentence(answer.err)
    assert "--force replaces them" in answer.err
    assert (folder / "alloy.extxyz").read_text() == "precious"
    assert not Path("evaluations.txt").exists(), "refused before a force call is spent"
    assert relaxion("relax", alloy_file, *counted, "--force").code == 0
    assert len(read(folder / "alloy.extxyz")) == 8
    assert (folder / "notes.txt").read_text() == "mine", "what is not ours stays"
    assert [entry.name for entry in Path("relaxed").iterdir()] == ["alloy"]


@pytest.mark.parametrize("out", ["taken", "taken/deeper"])
def test_output_folder_is_a_file(relaxion, alloy_file, out):
    Path("taken").write_text("precious")
    answer = relaxion("relax", alloy_file, "--out", out)
    assert (answer.code, answer.out) == (1, "")
    one_sentence(answer.err)
    assert "taken is a file, not a folder" in answer.err
    assert Path("taken").read_text() == "precious"


def test_result_folder_is_a_file(relaxion, alloy):
    write("POSCAR", alloy)
    answer = relaxion("relax", "POSCAR", "--out", ".")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "POSCAR is a file where the result folder should go" in answer.err
    assert len(read("POSCAR")) == 8


def test_output_folder_without_permission(relaxion, alloy_file, monkeypatch):
    """Tests may run as root, whom no permission stops: so the answer of the system is replaced."""
    monkeypatch.setattr("os.access", lambda *_: False)
    answer = relaxion("relax", alloy_file)
    assert answer.code == 1
    one_sentence(answer.err)
    assert "no permission to write" in answer.err


def test_disk_full(relaxion, alloy_file, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relaxion.apps.result_folder.ase.io.write", full)
    answer = relaxion("relax", alloy_file, "--quiet", "--policy", "none")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "alloy.extxyz could not be written as extxyz (OSError: [Errno 28] No space left on device)" in answer.err
    assert {file.name for file in Path("relaxed/alloy").iterdir()} == {"alloy.log", "alloy.traj", "relaxion.json"}
    calls = json.loads(Path("relaxed/alloy/relaxion.json").read_text())["result"]["force_calls"]
    assert len(read("relaxed/alloy/alloy.traj", ":")) == calls > 1, "what was paid for is kept"


def test_results_that_cannot_be_moved_are_not_lost(relaxion, alloy_file, monkeypatch):
    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("relaxion.apps.result_folder._replace_earlier", refuse)
    relaxion("relax", alloy_file)
    answer = relaxion("relax", alloy_file, "--force", "--json", "--quiet")
    assert answer.code == 1
    one_sentence(answer.err)
    assert "could not be moved into relaxed/alloy/ (PermissionError: [Errno 13] Permission denied)" in answer.err
    (rescued,) = Path("relaxed").glob("alloy-*")
    assert f"they are in {rescued}/" in answer.err
    assert len(read(rescued / "alloy.extxyz")) == 8
    assert (answer.objects[0]["outcome"], answer.objects[0]["written_to"]) == ("error", None)


def test_damaged_files_do_not_stop_the_others(relaxion, alloy_file):
    Path("random.db").write_bytes(bytes(range(256)) * 20)
    Path("broken.cif.xz").write_bytes(b"\xfd7zXZ\x00 and then nonsense")
    Path("OUTCAR").write_text(" vasp.6.3.0\n POTCAR:    PAW_PBE Cu\n")
    names = ["random.db", "broken.cif.xz", "n" * 300 + ".xyz", "OUTCAR"]
    answer = relaxion("relax", *names[:2], alloy_file, *names[2:], "--json", "--quiet")
    assert answer.code == 1
    assert [report["converged"] for report in answer.objects] == [False, False, True, False, False]
    assert len(answer.err.splitlines()) == 4
    for name, line in zip(names, answer.err.splitlines(), strict=True):
        assert line.startswith(f"{name} cannot be read: ")


def test_a_defect_met_by_one_structure_does_not_stop_the_others(relaxion, alloy, alloy_file, monkeypatch):
    """Whatever raises whatever in the middle of a run: what was reached is kept, the rest goes on."""
    write("first.xyz", alloy)
    judge, calls = Stepper.judge, iter(range(100))

    def breaks(self, point):
        if next(calls) == 2:
            raise ZeroDivisionError("a defect\nof ours")
        return judge(self, point)

    monkeypatch.setattr(Stepper, "judge", breaks)
    answer = relaxion("relax", "first.xyz", alloy_file, "--json", "--quiet", "--policy", "none")
    assert answer.code == 1
    one_sentence(answer.err)
    sentence = "first.xyz: ZeroDivisionError: a defect of ours; the structure reached so far is saved in relaxed/first/"
    assert answer.err.startswith(sentence)
    first, second = answer.objects
    assert (first["outcome"], first["force_calls"], first["converged"]) == ("error", 3, False)
    assert second["converged"]
    assert first["energy_ev"] == pytest.approx(read("relaxed/first/first.extxyz").get_potential_energy(), abs=1e-6)
    assert len(read("relaxed/first/first.traj", ":")) == 3
    assert Path("relaxed/first/first.log").stat().st_size > 0


@pytest.mark.parametrize("where", ["checked_start", "run_relaxer", "write_structure"])
def test_a_defect_anywhere_is_one_sentence(relaxion, alloy, alloy_file, monkeypatch, where):
    write("first.xyz", alloy)
    original, calls = getattr(relax_command, where), iter(range(100))

    def breaks(*arguments, **options):
        if next(calls) == 0:
            raise LookupError("a defect")
        return original(*arguments, **options)

    monkeypatch.setattr(relax_command, where, breaks)
    answer = relaxion("relax", "first.xyz", alloy_file, "--json", "--quiet")
    assert answer.code == 1
    assert answer.err == "first.xyz: LookupError: a defect\n"
    assert [report["converged"] for report in answer.objects] == [False, True]


def test_a_defect_in_a_comparison_leaves_the_result(relaxion, alloy_file, monkeypatch):
    def breaks(*_args):
        raise LookupError("a defect")

    monkeypatch.setattr(relax_command, "run_ase_optimizer", breaks)
    answer = relaxion("relax", alloy_file, "--compare", "BFGS", "--json")
    assert (answer.code, answer.objects[0]["converged"], answer.objects[0]["compare"]) == (0, True, {})
    assert "comparison failed after 0 of 1: LookupError: a defect" in answer.err


def test_writers_may_raise_anything(relaxion, alloy, monkeypatch):
    write("alloy.cif", alloy)
    monkeypatch.setattr("relaxion.apps.result_folder.filetype", lambda _: {}["no such format"])
    answer = relaxion("relax", "alloy.cif")
    assert answer.code == 0
    assert "not recognised for writing (KeyError: 'no such format'), so only extxyz was written" in answer.err


@pytest.mark.parametrize("error", [ValueError("no such luck"), lzma.LZMAError("no such luck")])
def test_half_written_copy_in_the_format_of_the_input_is_removed(relaxion, alloy, monkeypatch, error):
    write("alloy.cif", alloy)

    def breaks(path, atoms, format):
        if format == "cif":
            Path(path).write_text("data_half")
            raise error
        write(path, atoms, format=format)

    monkeypatch.setattr("relaxion.apps.result_folder.ase.io.write", breaks)
    answer = relaxion("relax", "alloy.cif")
    assert answer.code == 0
    assert f"could not be written as cif ({type(error).__name__}: no such luck), so only" in answer.err
    assert {file.suffix for file in Path("relaxed/alloy").iterdir()} == {".extxyz", ".log", ".traj", ".json"}


def test_others_may_read_the_results(relaxion, alloy_file):
    Path("usual").mkdir()
    relaxion("relax", alloy_file)
    assert Path("relaxed/alloy").stat().st_mode == Path("usual").stat().st_mode
