"""From words and objects to potentials, and what is said when that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ase import Atoms
from ase.calculators.emt import EMT

import relaxion
from relaxion.errors import FileError, MissingExtraError, SettingsError, UnknownPotentialError
from relaxion.potentials import AsePotential, Emt, LennardJones, Morse, Potential, PotentialCalculator, ZhouEam
from relaxion.potentials.counting import details_of, fingerprint
from relaxion.potentials.registry import EXTRAS, known_potentials, potential, with_options, without_options
from relaxion.structures import Structures


@pytest.mark.parametrize(("spec", "kind"), [("emt", Emt), ("eam", ZhouEam), ("lj", LennardJones), ("morse", Morse)])
def test_names(spec: str, kind: type) -> None:
    assert type(relaxion.potential(spec)) is kind


def test_objects() -> None:
    ready = Emt()
    assert potential(ready) is ready
    wrapped = potential(EMT())
    assert isinstance(wrapped, AsePotential)
    assert wrapped.name == "EMT"
    assert potential(PotentialCalculator(ready)) is ready  # no calculator around a calculator


def test_foreign_calculator_that_does_not_inherit_from_ase() -> None:
    class Foreign:
        def get_potential_energy(self, atoms, force_consistent=False):  # noqa: ARG002
            return 1.5

        def get_forces(self, atoms):
            return 0.0 * atoms.positions

    evaluation = potential(Foreign())(Structures.from_ase(Atoms("H")), stresses=False)  # type: ignore[arg-type]
    assert float(evaluation.energies) == 1.5


@pytest.mark.parametrize("thing", [3, None, ["emt"], Atoms("H"), EMT, Emt])
def test_other_things_are_refused(thing: object) -> None:
    with pytest.raises(UnknownPotentialError, match="cannot make a potential from"):
        potential(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("etm", "did you mean 'emt'?"),
        ("EMT", "did you mean 'emt'?"),
        ("chgnett", "did you mean 'chgnet'?"),
        ("mores", "did you mean 'morse'?"),
        ("", "known: "),
        ("eam:", "did you mean 'eam'?"),
        (":factory", "did you mean 'module:factory'?"),
        ("qqqqqqqqq", "known: chgnet, eam"),
    ],
)
def test_unknown_name_gets_the_nearest(spec: str, word: str) -> None:
    with pytest.raises(UnknownPotentialError) as caught:
        potential(spec)
    assert word in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_missing_table_is_a_file_error() -> None:
    with pytest.raises(FileError, match=r"no file nowhere\.fs"):
        potential("eam:nowhere.fs")


@pytest.mark.parametrize("spec", EXTRAS)
def test_missing_extra_names_the_command(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXTRAS[spec].package, None)  # as if it were not installed
    with pytest.raises(MissingExtraError) as caught:
        potential(spec)
    assert f"'{spec}' needs the package {EXTRAS[spec].package}" in str(caught.value)
    assert str(caught.value).endswith(f"try: {EXTRAS[spec].how_to_install}")
    assert EXTRAS[spec].how_to_install.startswith("pip install ")
    assert str(caught.value).count("\n") == 0
    (entry,) = [entry for entry in known_potentials() if entry.spec == spec]
    assert not entry.available


def test_an_extra_whose_own_import_fails_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tblite.ase", None)  # the package lies there, but a part of it does not load
    with pytest.raises(MissingExtraError, match=r"try: pip install 'relaxion\[molecules\]'"):
        potential("gfn2")


def write_module(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(
        "from ase.calculators.emt import EMT\n"
        "from relaxion.potentials import Morse\n"
        "def calculator(): return EMT()\n"
        "def own(): return Morse(r0=2.0)\n"
        "def nothing(): return None\n"
        "number = 3\n"
    )


def test_factory_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "my_calculators_a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    made = potential("my_calculators_a:calculator")
    assert isinstance(made, AsePotential)
    own = potential("my_calculators_a:own")
    assert isinstance(own, Morse)
    assert own.r0 == 2.0
    assert sys.path == [*before, str(tmp_path)], "once, and behind everything that is installed"


def test_a_calculator_may_import_its_neighbours_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour_for_test.py").write_text("SHIFT = 0.5\n")
    (tmp_path / "lazy_for_test.py").write_text(
        "from ase.calculators.emt import EMT\n"
        "class Lazy(EMT):\n"
        "    def calculate(self, *arguments):\n"
        "        from neighbour_for_test import SHIFT\n"
        "        super().calculate(*arguments)\n"
        "        self.results['energy'] += SHIFT\n"
    )
    made = potential("lazy_for_test:Lazy")
    copper = Structures.from_ase(Atoms("Cu2", positions=[[0, 0, 0], [0, 0, 2.3]]))
    assert float(made(copper).energies) == pytest.approx(float(Emt()(copper).energies) + 0.5, abs=1e-6)


def test_a_factory_from_elsewhere_leaves_the_path_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert potential("ase.calculators.emt:EMT").name == "EMT"
    with pytest.raises(UnknownPotentialError):
        potential("no_such_module_for_test:make")
    assert sys.path == before


@pytest.mark.parametrize("thing", [Emt(), AsePotential(EMT())])
def test_a_potential_as_calculator(thing: Potential) -> None:
    atoms = Atoms("Cu2", positions=[[0, 0, 0], [0, 0, 2.3]])
    atoms.calc = thing.as_calculator()
    assert isinstance(atoms.calc, PotentialCalculator)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = EMT()
    assert energy == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
    assert forces == pytest.approx(atoms.get_forces(), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("my_calculators_b:absent", "has no 'absent'"),
        ("my_calculators_b:number", "cannot call its 'number'"),
        ("my_calculators_b:nothing", "nothing() returned NoneType, expected an ASE calculator"),
        ("my_calculators_x:calculator", "module 'my_calculators_x' cannot be imported"),
        ("a..b:calculator", "cannot be imported"),
        (".a:calculator", "cannot be imported"),
        ("emt2:thing", "did you mean 'emt'?"),
    ],
)
def test_factory_that_fails(name: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "my_calculators_b")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownPotentialError) as caught:
        potential(name)
    assert word in str(caught.value)


def test_list_of_known_potentials() -> None:
    entries = {entry.spec: entry for entry in known_potentials()}
    assert list(entries) == [
        "emt", "eam", "lj", "morse", "eam:FILE", "chgnet", "gfn2", "sevennet", "mace", "orb", "mattersim", "uma",
        "fairchem", "nequip", "matgl", "lammps", "gpaw", "module:factory",
    ]  # fmt: skip
    assert entries["emt"].elements is not None
    assert "Pt" in entries["emt"].elements
    assert entries["eam"].elements is not None
    assert len(entries["eam"].elements) == 16
    assert entries["lj"].elements is None
    assert entries["emt"].available
    assert entries["emt"].how_to_install is None
    assert entries["gfn2"].how_to_install == "pip install 'relaxion[molecules]'"
    assert all(entry.description for entry in entries.values())


def test_availability_follows_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaxion.potentials.registry.is_installed", lambda name: name == "tblite")
    available = {entry.spec: entry.available for entry in known_potentials()}
    assert available["gfn2"]
    assert not available["chgnet"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"a": 1},
        {"a": 1e-3, "b": True},
        {"text": "true"},
        {"x": "a&b=c?d%e f"},
        {"many": [1, 2]},
        {"words": ["a", "b"]},
    ],
)
def test_options_are_part_of_the_word(options: dict) -> None:
    assert without_options(with_options("my:make", options)) == ("my:make", options)


def test_options_reach_what_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = potential("lj?sigma=2.5&smooth=true")
    assert isinstance(made, LennardJones)
    assert (made.sigma, made.smooth) == (2.5, True)
    assert fingerprint(details_of(made)) != fingerprint(details_of(potential("lj?sigma=2.4")))
    monkeypatch.chdir(tmp_path)
    Path("mine_with_options.py").write_text("from relaxion.potentials import Morse as make\n")
    assert potential("mine_with_options:make?r0=2.5").r0 == 2.5
    with pytest.raises(SettingsError, match="does not take these options: got an unexpected keyword argument 'a'"):
        potential("emt?a=1")


def test_engines_take_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    class TBLite(EMT):
        def __init__(self, **options: object) -> None:
            seen.update(options)
            super().__init__()

    pytest.importorskip("tblite.ase")
    monkeypatch.setattr("tblite.ase.TBLite", TBLite)
    potential("gfn2?charge=1")
    assert (seen["charge"], seen["method"]) == (1, "GFN2-xTB")
    with pytest.raises(SettingsError, match="model is not an option here"):
        potential("sevennet?model=x")
