"""The folder of results stays true whatever happens to it."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.constraints import FixAtoms
from ase.io import read

from relaxion.apps.relax_many.results import ResultFolder, failures, is_locked, results, written
from relaxion.apps.relax_many.settings import ManySettings, calculator_details, policy_weights, structure_key
from relaxion.errors import FileError, SettingsError


def record(number: int) -> dict[str, str]:
    key = f"s{number:032x}"
    frame = written(Atoms("CuAu", [[0, 0, 0], [0, 0, 2.5]]), {"key": key, "outcome": "converged"})
    return {"key": key, "outcome": "converged", "frame": frame}


def opened(path: Path, settings: ManySettings) -> ResultFolder:
    return ResultFolder(path, settings, [])


def test_frames_are_read_by_ase_and_tell_their_facts(tmp_path):
    atoms = Atoms("CuAu", [[0, 0, 0], [0, 0, 2.5]], info={"name": "a b", "huge": np.zeros(5), "relaxion_key": "old"})
    atoms.set_constraint(FixAtoms([0]))
    text = written(atoms, {"key": "s1", "outcome": "step_limit", "force_calls": 3, "fmax": None})
    (tmp_path / "one.extxyz").write_text(text)
    back = read(tmp_path / "one.extxyz")
    assert back.info["name"] == "a b"
    assert back.info["relaxion_outcome"] == "step_limit"
    assert (back.constraints[0].index == [0]).all()
    assert back.info["relaxion_key"] == "s1"
    assert back.info["relaxion_force_calls"] == 3
    assert "relaxion_fmax" not in back.info


def test_a_key_has_one_result(tmp_path, settings):
    with opened(tmp_path, settings) as folder:
        folder.append([record(1), record(1)])
        folder.append([record(1)])
        folder.set_aside(record(1)["key"], "late", {}, {})
    assert len(results(tmp_path)) == 1
    assert not failures(tmp_path)


def test_what_was_set_aside_is_tried_again_when_asked_for(tmp_path, settings):
    with opened(tmp_path, settings) as folder:
        folder.append([record(1)])
        folder.set_aside(record(2)["key"], "licence server", {"force_calls": 3}, {"input": "frame"})
    with opened(tmp_path, settings) as folder:
        assert folder.has(record(2)["key"])
        assert folder.forget_failures() == 1
        assert not folder.has(record(2)["key"])
        assert folder.has(record(1)["key"])


def test_a_full_disk_loses_nothing(tmp_path, settings):
    """The limit of file sizes stands for a full disk: writes fail half-way through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, settings) as folder:
        folder.append([record(1)])
        size = (tmp_path / "results.sqlite-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            with pytest.raises(FileError, match=r"no space left.*free some space and run the same command again"):
                folder.append([record(2), record(3)])
            with pytest.raises(FileError, match="no space left"):
                folder.set_aside(record(4)["key"], "x" * 5000, {}, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [one["key"] for one in results(tmp_path)] == [record(1)["key"]]
        assert not failures(tmp_path)
        assert not folder.has(record(2)["key"])
        folder.append([record(2)])
        folder.set_aside(record(4)["key"], "x" * 5000, {}, {})
    assert len(results(tmp_path)) == 2
    assert len(failures(tmp_path)) == 1


def test_a_damaged_file_is_a_sentence(tmp_path, settings):
    with opened(tmp_path, settings) as folder:
        folder.append([record(number) for number in range(50)])
    file = tmp_path / "results.sqlite"
    file.write_bytes(b"no database at all" * 500)
    with pytest.raises(FileError, match=r"results\.sqlite"):
        results(tmp_path)
    with pytest.raises(FileError, match="cannot be written"):
        opened(tmp_path, settings)


def test_one_driver_at_a_time(tmp_path, settings):
    with opened(tmp_path, settings):
        assert is_locked(tmp_path) == os.getpid()
        with pytest.raises(FileError, match="another relax-many uses"):
            opened(tmp_path, settings)
    assert is_locked(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"fmax_ev_per_angstrom": 0.01}, "fmax_ev_per_angstrom = 0.05, now it is 0.01"),
        ({"calculator": "lj"}, "calculator"),
        ({"policy_weights": {"metals": "other"}}, "policy_weights"),
        ({"free_cell": True}, "free_cell"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, settings, change, name):
    opened(tmp_path, settings).close()
    with pytest.raises(SettingsError, match=name):
        opened(tmp_path, settings.model_copy(update=change))


def test_foreign_and_damaged_manifests_are_refused(tmp_path, settings):
    for content in (
        "{",
        "[]",
        '{"format": "other"}',
        json.dumps({"format": "relaxion-many", "version": 9, "files": []}),
    ):
        (tmp_path / "relaxion-many.json").write_text(content)
        with pytest.raises(FileError):
            opened(tmp_path, settings)


def test_the_key_tells_apart_what_changes_the_result(structures):
    atoms = structures[0]
    key = structure_key(atoms, b"context")
    same = atoms.copy()
    same.info["name"] = "another name"
    assert structure_key(same, b"context") == key
    assert structure_key(atoms, b"other") != key
    for change in (
        lambda a: a.set_positions(a.positions + 1e-9),
        lambda a: a.set_pbc(False),
        lambda a: a.set_cell(a.cell * 1.001),
        lambda a: a.set_constraint(FixAtoms([0])),
        lambda a: a.set_initial_charges([1, 0, 0, 0]),
        lambda a: a.info.update(charge=1),
        lambda a: a.symbols.__setitem__(0, "Ag"),
    ):
        other = atoms.copy()
        change(other)
        assert structure_key(other, b"context") != key


def test_settings_know_calculator_and_policy(tmp_path, monkeypatch):
    assert list(policy_weights("auto")) == ["metals", "universal"]
    assert policy_weights("none") == {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "my_calculator_of_many.py"
    module.write_text("from ase.calculators.emt import EMT\ndef make():\n    return EMT(asap_cutoff=True)\n")
    details = calculator_details("my_calculator_of_many:make")
    assert details["parameters"]["asap_cutoff"] is True
    module.write_text(module.read_text() + "# changed\n")
    assert calculator_details("my_calculator_of_many:make")["sha256"] != details["sha256"]
