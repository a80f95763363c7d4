"""`relax --report`, `relaxion report` and `relaxion.report(opt)`: what is in the page, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.optimize import BFGS

import relaxion
import relaxion as package
from relaxion import Relaxer, __version__
from relaxion.apps.report.page import (
    LARGEST_BYTES,
    Page,
    Reel,
    as_data_block,
    closest_pair,
    film_parts,
    own_bytes,
    space_group,
)
from relaxion.errors import FileError, SettingsError
from relaxion.optimizer.point import Frame

FILM_BYTES = 330_000


def data_of(page: Path | str) -> dict:
    text = Path(page).read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    return json.loads(block.group(1))


def part(data: dict, kind: str, title: str | None = None) -> dict:
    return next(one for one in data["parts"] if one["kind"] == kind and title in (None, one.get("title")))


def facts(data: dict) -> dict[str, str]:
    return {fact["label"]: fact["value"] for one in data["parts"] if one["kind"] == "facts" for fact in one["facts"]}


def positions(film: dict, index: int) -> np.ndarray:
    return (np.array(film["start"]) + np.array(film["shifts"][index])).reshape(-1, 3) / 1000


def test_page_says_what_the_result_says(relaxion, alloy_file, alloy):
    answer = relaxion("relax", alloy_file, "--compare", "BFGS,FIRE", "--report", "--json")
    (result,) = answer.objects
    assert result["report"] == "relaxed/alloy/report.html"
    manifest = json.loads(Path("relaxed/alloy/relaxion.json").read_text())
    assert "report.html" in manifest["files"]
    assert Path(result["report"]).stat().st_size < LARGEST_BYTES
    data = data_of(result["report"])
    assert data["title"] == f"Au2Cu6 relaxed in {result['force_calls']} force calls"
    rows = {row["cells"][0]: row["cells"] for row in part(data, "table")["rows"]}
    assert [rows[name][1] for name in ("Relaxion", "BFGS", "FIRE")] == [
        str(calls) for calls in (result["force_calls"], *(one["force_calls"] for one in result["compare"].values()))
    ]
    film = part(data, "film")["films"][0]
    images = read("relaxed/alloy/alloy.traj", ":")
    assert film["calls"] == list(range(1, result["force_calls"] + 1))
    for index, image in enumerate(images):
        assert positions(film, index) == pytest.approx(image.positions, abs=6e-4)
    assert [film["symbols"][kind] for kind in film["species"]] == alloy.get_chemical_symbols()
    assert film["cells"] == [pytest.approx(alloy.cell.array.ravel().tolist(), abs=1e-4)]


def test_curves_are_those_of_the_runs(relaxion, alloy_file, alloy):
    relaxion("relax", alloy_file, "--compare", "BFGS", "--report")
    data = data_of("relaxed/alloy/report.html")
    ours, bfgs = part(data, "plot", "Largest force")["series"]
    images = read("relaxed/alloy/alloy.traj", ":")
    expected = [np.linalg.norm(image.get_forces(), axis=1).max() for image in images]
    assert ours["y"] == pytest.approx(expected, rel=1e-4)
    assert part(data, "plot", "Largest force")["log"] is True
    assert part(data, "plot", "Largest force")["limits"][0]["value"] == 0.05
    alloy.calc = EMT()
    fmax = []
    optimizer = BFGS(alloy, logfile=None)
    optimizer.attach(lambda: fmax.append(np.linalg.norm(alloy.get_forces(), axis=1).max()))
    optimizer.run(fmax=0.05)
    assert bfgs["y"] == pytest.approx(fmax, rel=1e-3)
    energies = part(data, "plot", "Energy above the final energy of Relaxion")["series"][0]["y"]
    assert energies[-1] == pytest.approx(0, abs=1e-9)
    assert energies[0] == pytest.approx(images[0].get_potential_energy() - images[-1].get_potential_energy(), rel=1e-4)


def test_facts(relaxion, alloy_file):
    relaxion("relax", alloy_file, "--report", "--cell")
    told = facts(data_of("relaxed/alloy/report.html"))
    assert told["Outcome"].startswith("converged, fmax 0.0")
    assert told["Space group before"].startswith("P1 (1) within 0.01 Å")
    assert told["Closest pair after"].endswith(")")
    assert told["Calculator"] == "emt"
    assert f"relaxion {__version__}" in told["Versions"]
    assert "Command" in told
    assert "@software{relaxion" in told["BibTeX"]
    assert len(part(data_of("relaxed/alloy/report.html"), "film")["films"][0]["cells"]) > 1


def test_a_molecule_has_no_row_of_symmetry():
    atoms = molecule("H2O")
    atoms.calc = EMT()
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.05, steps=2)
    told = facts(relaxion.report(opt).data)
    assert "Closest pair before" in told
    assert "Space group before" not in told
    assert "Space group after" not in told


def test_moves_executed_and_proposed(alloy):
    alloy.calc = EMT()
    opt = Relaxer(alloy, logfile=None, maxstep=0.05)
    opt.run(fmax=0.05, steps=4)
    film = part(relaxion.report(opt).data, "film")["films"][0]
    assert film["bases"][:3] == [None, 1, 2]
    proposed = np.array(film["proposed"][1]).reshape(-1, 3) / 1000
    executed = positions(film, 1) - positions(film, 0)
    assert np.linalg.norm(executed, axis=1).max() == pytest.approx(0.05, abs=2e-3)
    assert np.linalg.norm(proposed, axis=1).max() > 0.06
    share = np.linalg.norm(executed) / np.linalg.norm(proposed)
    assert executed == pytest.approx(share * proposed, abs=3e-3)


def test_no_report_unless_asked(relaxion, alloy_file):
    answer = relaxion("relax", alloy_file, "--json")
    assert "report" not in answer.objects[0]
    assert not Path("relaxed/alloy/report.html").exists()


def test_a_run_that_does_not_converge_or_fails_has_a_page_too(relaxion, alloy_file):
    assert relaxion("relax", alloy_file, "--steps", "1", "--report").code == 3
    assert data_of("relaxed/alloy/report.html")["title"] == "Au2Cu6 after 2 force calls: step limit reached"
    broken = ["--calc", "calculators_for_test:breaks_in_the_middle", "--report", "--force"]
    assert relaxion("relax", alloy_file, *broken).code == 1
    data = data_of("relaxed/alloy/report.html")
    assert data["title"].endswith("failed")
    assert "license server is away" in facts(data)["Error"].replace("\n", " ")


def test_not_finite_answers_are_gaps_not_nan(relaxion, alloy_file):
    relaxion("relax", alloy_file, "--calc", "calculators_for_test:NotFiniteLater", "--steps", "5", "--report")
    series = part(data_of("relaxed/alloy/report.html"), "plot")["series"][0]["y"]
    assert series[0] is not None
    assert None in series


def test_a_page_that_cannot_be_written_is_an_error_but_the_result_is_kept(relaxion, alloy_file, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relaxion.apps.report.page.replace_file", full)
    monkeypatch.setattr("relaxion.apps.result_folder._write_manifest", lambda *_: None)
    answer = relaxion("relax", alloy_file, "--report")
    assert answer.code == 1
    assert "the report could not be written" in answer.err
    assert "No space left" in answer.err
    assert "Traceback" not in answer.err
    assert Path("relaxed/alloy/alloy.extxyz").exists()


def test_report_of_a_folder_says_the_same(relaxion, alloy_file):
    relaxion("relax", alloy_file, "--compare", "BFGS", "--report", "--cell")
    first = data_of("relaxed/alloy/report.html")
    refused = relaxion("report", "relaxed/alloy")
    assert refused.code == 1
    assert "report.html exists; --force replaces" in refused.err
    answer = relaxion("report", "relaxed/alloy", "--out", "again.html")
    assert answer.code == 0, answer.err
    again = data_of("again.html")
    assert again["title"] == first["title"]
    assert part(again, "table")["rows"] == part(first, "table")["rows"]
    ours, then = (part(data, "plot", "Largest force")["series"][0] for data in (again, first))
    assert ours == then
    for index in range(len(part(first, "film")["films"][0]["calls"])):
        one, other = (positions(part(data, "film")["films"][0], index) for data in (again, first))
        assert one == pytest.approx(other, abs=2e-3)
    assert facts(again)["Command"] == facts(first)["Command"]


def test_report_of_a_trajectory(relaxion, alloy):
    alloy.calc = EMT()
    BFGS(alloy, logfile=None, trajectory="bfgs.traj").run(fmax=0.05)
    answer = relaxion("report", "bfgs.traj")
    assert (answer.code, answer.out) == (0, "bfgs.traj: written to bfgs.html\n")
    data = data_of("bfgs.html")
    assert len(part(data, "film")["films"][0]["calls"]) == len(read("bfgs.traj", ":"))
    assert any("line searches" in note for note in part(data, "notes")["notes"])


def test_bad_input_of_report(relaxion, alloy_file, alloy):
    Path("empty").mkdir()
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("")
    relaxion("relax", alloy_file)
    Path("broken").mkdir()
    Path("broken/relaxion.json").write_text('{"format": "relaxion-res')
    Path("lost").mkdir()
    Path("lost/relaxion.json").write_text('{"format": "relaxion-result", "files": ["../alloy.traj"], "result": {}}')
    write("two.extxyz", [alloy, bulk("Cu")])
    Path("nothing.traj").write_text("no trajectory")
    cases = {
        "missing": "does not exist",
        "empty": "holds neither a result",
        "run": "has nothing to report",
        "relaxed": "holds 1 results; name one of them, such as relaxed/alloy",
        "broken": "cannot be read",
        "lost": "trajectory is missing",
        "two.extxyz": "different structures",
        "nothing.traj": "cannot be read",
    }
    for path, words in cases.items():
        answer = relaxion("report", path, "--out", "x.html")
        assert answer.code == 1, path
        assert words in answer.err
        assert answer.err.count("\n") == 1
        assert not Path("x.html").exists()
    manifest = json.loads(Path("relaxed/alloy/relaxion.json").read_text())
    del manifest["result"]["outcome"]
    Path("relaxed/alloy/relaxion.json").write_text(json.dumps(manifest))
    assert "damaged" in relaxion("report", "relaxed/alloy").err
    assert "is a folder" in relaxion("report", "relaxed/alloy", "--out", "empty").err


def test_view_and_report_in_python(alloy, tmp_path):
    alloy.calc = EMT()
    opt = Relaxer(FrechetCellFilter(alloy), logfile=None)
    with pytest.raises(SettingsError, match=r"call run\(\) first"):
        relaxion.report(opt)
    opt.run(fmax=0.05)
    calls = opt.force_calls
    page = relaxion.report(opt)
    assert opt.force_calls == calls, "looking costs nothing"
    assert page.title == f"Au2Cu6 relaxed in {calls} force calls"
    assert package.report(opt).data == page.data
    assert page.view() is page
    saved = page.save(tmp_path / "view.html")
    assert package.report(opt).html == saved.read_text(encoding="utf-8")
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert 'sandbox="allow-scripts"' in shown
    assert shown.count("<script") == 0, "escaped inside srcdoc"
    with pytest.raises(SettingsError, match="got BFGS"):
        package.report(BFGS(alloy, logfile=None))


def test_text_cannot_become_markup():
    evil = "</script><script>alert(1)</script><!--\u2028"
    block = as_data_block({"x": evil})
    assert "<" not in block
    assert json.loads(block) == {"x": evil}
    html = Page(evil, evil, evil, [{"kind": "notes", "title": evil, "notes": [evil]}]).html
    assert "alert(1)</script>" not in html
    with pytest.raises(ValueError, match="JSON"):
        as_data_block({"x": float("nan")})


def test_only_our_scripts_may_run_and_no_request_may_leave(alloy):
    alloy.calc = EMT()
    opt = Relaxer(alloy, logfile=None)
    opt.run(fmax=0.05)
    html = relaxion.report(opt).html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy.group(1).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.group(1).split("style-src")[0]
    assert "Redistributions in binary form must reproduce the above copyright" in html
    assert not re.search(r'(?:src|href)="(?!#|data:)', html)


def test_a_page_without_a_film_carries_no_library():
    assert len(Page("t", "e", "l", [{"kind": "notes", "notes": []}]).html) < 120_000  # 3Dmol has 500 kB
    assert own_bytes() + FILM_BYTES < LARGEST_BYTES


@pytest.mark.parametrize("n_atoms", [1000, 40_000])
def test_large_structures_are_thinned_out_and_it_is_said(n_atoms):
    rng = np.random.default_rng(0)
    start = rng.uniform(0, 60, (n_atoms, 3))
    way = rng.normal(size=start.shape)
    frames = [
        Frame(call, (start + 0.01 * call * way).astype(np.float32), np.eye(3) * 60, call - 1 or None)
        for call in range(1, 121)
    ]
    numbers = np.where(np.arange(n_atoms) % 2, 29, 79)
    (film,), (note,) = film_parts([Reel("Relaxion", numbers, True, frames, [], "done", True)])
    assert len(json.dumps(film, separators=(",", ":"))) <= FILM_BYTES
    assert film["bases"] == [None, *film["calls"][:-1]]
    assert (film["calls"][0], film["calls"][-1]) == (1, 120)
    assert f"only {len(film['calls'])} of 120 force calls are shown" in note
    assert ("atoms that move farthest are drawn" in note) is (n_atoms > 1000)


def test_fixed_atoms_are_marked(relaxion):
    slab = fcc111("Cu", (1, 1, 3), vacuum=6.0)
    slab.set_constraint(FixAtoms([0, 1]))
    write("slab.traj", slab)
    relaxion("relax", "slab.traj", "--report")
    film = part(data_of("relaxed/slab/report.html"), "film", "Relaxation")
    assert film["films"][0]["fixed"] == [0, 1]
    assert "Faint atoms are held fixed." in film["notes"]
    assert "fixed" in film["films"][0]


def test_the_energy_has_a_logarithmic_axis(relaxion, alloy_file):
    relaxion("relax", alloy_file, "--report")
    data = data_of("relaxed/alloy/report.html")
    assert part(data, "plot", "Energy above the final energy of Relaxion")["log"] is True


def test_molecules_get_sticks_and_no_cell():
    frame = Frame(1, np.asarray(molecule("CH3CH2OH").positions, np.float32), np.zeros((3, 3)))
    reel = Reel("Relaxion", molecule("CH3CH2OH").numbers, False, [frame], [], "done", True)
    ((film,), notes) = film_parts([reel])
    assert (film["sticks"], film["cells"], notes) == (True, None, [])


def test_space_group_and_closest_pair():
    assert space_group(bulk("Cu", cubic=True)) == "Fm-3m (225) within 0.01 Å"
    nearly = bulk("Cu", cubic=True)
    nearly.rattle(0.012, seed=1)
    assert space_group(nearly) == "P1 (1) within 0.01 Å; Pmmn (59) within 0.05 Å; Fm-3m (225) within 0.1 Å"
    assert space_group(Atoms("Cu2", positions=[[0, 0, 0], [2, 0, 0]])) == "none: periodic along 0 of 3 axes"
    assert closest_pair(bulk("Cu", a=3.6)) == "Cu–Cu 2.546 Å (atom 0 and its image)"
    assert closest_pair(Atoms("HAu", positions=[[0, 0, 0], [0, 0, 1.6]])) == "H–Au 1.600 Å (atoms 0 and 1)"
    assert closest_pair(Atoms("H")) == "none within 20 Å"


def test_saving_is_whole_or_nothing(tmp_path):
    page = Page("t", "e", "l", [])
    with pytest.raises(FileError, match="cannot be written"):
        page.save(tmp_path / "no" / "x.html")
    page.save(tmp_path / "x.html")
    with pytest.raises(FileError, match="exists"):
        page.save(tmp_path / "x.html", force=False)
    assert [file.name for file in tmp_path.iterdir() if "x.html" in file.name] == ["x.html"]
