"""`relaxion report` of a folder of `relax-many`: failures first and with reasons, outcomes, the slowest, energies."""

from __future__ import annotations

import pytest
from ase import Atoms
from ase.build import bulk
from ase.io import write
from test_report import data_of, facts

from relaxion.apps.report import many as many_module
from relaxion.apps.report.many import many_page
from relaxion.apps.report.page import LARGEST_BYTES


def structures() -> list[Atoms]:
    """Seven metals, two of an element without parameters, one atom on top of another, one that needs many steps."""
    images = [bulk("Cu", a=3.5 + 0.02 * number, cubic=True) for number in range(7)]
    for number, image in enumerate(images):
        image.rattle(0.05, seed=number)
    images += [bulk("Ti"), bulk("Ti", a=3.0), Atoms("Cu", cell=[3, 3, 3], positions=[[0, 0, float("nan")]], pbc=True)]
    slow = bulk("Cu", cubic=True) * (2, 1, 1)
    slow.rattle(0.5, seed=0)
    for number, image in enumerate([*images, slow]):
        image.info["material_id"] = f"mp-{number}"
    return [*images, slow]


@pytest.fixture
def parts(relaxion) -> dict[str, dict]:
    """The parts of the page by id, and the whole as "page"."""
    write("all.extxyz", structures())
    assert relaxion("relax-many", "all.extxyz", "--calc", "emt", "--workers", "local:1", "--out", "out").code == 1
    assert relaxion("report", "out").code == 0
    data = data_of("out/report.html")
    return {"page": data, **{one["id"]: one for one in data["parts"]}}


def test_failures_come_first_with_their_reasons(parts) -> None:
    assert parts["page"]["title"] == "out: 8 of 11 structures relaxed, 3 failed"
    assert [one["id"] for one in parts["page"]["parts"]][:2] == ["outcomes", "failures"]
    reasons = [row["cells"] for row in parts["failures"]["rows"]]
    assert reasons[0][0].startswith("EMT has no parameters for Ti")
    assert reasons[0][1:] == ["2", "all.extxyz#7 (mp-7), all.extxyz#8 (mp-8)"]
    assert "not finite" in reasons[1][0]
    assert [row["tone"] for row in parts["structures"]["rows"]][:4] == ["bad", "bad", "bad", ""]


def test_outcomes_are_counted(parts) -> None:
    counted = {tile["label"]: (tile["value"], tile["tone"]) for tile in parts["outcomes"]["tiles"]}
    assert counted == {"Failed": ("3", "bad"), "Converged": ("8", "good")}


def test_the_slowest_and_the_energies(parts) -> None:
    heads = [column["label"] for column in parts["slowest"]["columns"]]
    first = dict(zip(heads, parts["slowest"]["rows"][0]["cells"], strict=True))
    assert (first["Structure"], first["Id"]) == ("all.extxyz#10", "mp-10")
    calls = [int(row["cells"][heads.index("Force calls")]) for row in parts["slowest"]["rows"]]
    assert calls == sorted(calls, reverse=True)
    per_atom = float(first["Energy (eV/atom)"].replace("−", "-"))
    assert per_atom == pytest.approx(float(first["Energy (eV)"].replace("−", "-")) / 8, abs=1e-4)
    (series,) = parts["energies"]["series"]
    assert series["x"] == [1, 2, 3, 4, 5, 6, 7, 11]
    assert series["y"][-1] == pytest.approx(per_atom, abs=1e-4)
    assert len(parts["structures"]["rows"]) == 11


def test_pressure_is_shown_with_enthalpies(relaxion) -> None:
    write("cu.extxyz", [bulk("Cu", a=a, cubic=True) for a in (3.5, 3.6)])
    options = ("--calc", "emt", "--cell", "--pressure", "5", "--workers", "local:1", "--out", "out")
    assert relaxion("relax-many", "cu.extxyz", *options).code == 0
    assert relaxion("report", "out").code == 0
    data = data_of("out/report.html")
    assert facts(data)["Pressure (GPa)"] == "5.0"
    table = next(one for one in data["parts"] if one["id"] == "structures")
    assert "Enthalpy (eV)" in [column["label"] for column in table["columns"]]
    assert next(one for one in data["parts"] if one["id"] == "energies")["title"] == "Final enthalpy per atom"


def test_a_large_folder_still_fits(parts, monkeypatch, own_folder) -> None:
    rows = many_module.read_rows(own_folder / "out") * 20_000
    monkeypatch.setattr(many_module, "read_rows", lambda _: rows)
    page = many_page(own_folder / "out")
    assert len(page.html.encode()) < LARGEST_BYTES
    table = next(one for one in page.parts if one.get("id") == "structures")
    assert table["caption"].startswith("The first 1\u202f500 of 220\u202f000")
    assert parts["structures"]["caption"].startswith("All 11")
