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

from relaxion.apps.relax_many.folder import Folder, failures, is_locked, results
from relaxion.apps.relax_many.frames import ResultFrame, scan, sealed, written
from relaxion.apps.relax_many.settings import ManySettings, calculator_details, policy_weights, structure_key
from relaxion.errors import FileError, SettingsError


def frame(number: int) -> tuple[str, str]:
    key = f"s{number:032x}"
    return key, written(Atoms("CuAu", [[0, 0, 0], [0, 0, 2.5]]), {"key": key, "outcome": "converged"})


def opened(path: Path, settings: ManySettings) -> Folder:
    return Folder(path, settings, [])


def test_frames_are_read_by_ase_and_tell_their_facts(tmp_path):
    atoms = Atoms("CuAu", [[0, 0, 0], [0, 0, 2.5]], info={"name": "a b", "huge": np.zeros(5), "relaxion_key": "old"})
    atoms.set_constraint(FixAtoms([0]))
    text = written(atoms, {"key": "s1", "outcome": "step_limit", "force_calls": 3, "fmax": None})
    (tmp_path / "one.extxyz").write_text(text)
    back = read(tmp_path / "one.extxyz")
    assert back.info["name"] == "a b"
    assert back.info["relaxion_outcome"] == "step_limit"
    assert (back.constraints[0].index == [0]).all()
    found, end = list(scan(tmp_path / "one.extxyz"))
    assert isinstance(found, ResultFrame)
    assert end == len(text)
    assert found.facts == {"key": "s1", "outcome": "step_limit", "force_calls": 3}


@pytest.mark.parametrize("cut", [1, 20, 150, 190])
def test_a_torn_frame_is_cut_off_and_nothing_else(tmp_path, settings, cut):
    with opened(tmp_path, settings) as folder:
        folder.append([frame(1), frame(2)])
    shard = tmp_path / "shards" / "00001.extxyz"
    whole = shard.read_bytes()
    shard.write_bytes(whole + frame(3)[1].encode()[:cut])
    with opened(tmp_path, settings) as folder:
        assert folder.torn_bytes == cut
        assert len(folder.done) == 2
        assert shard.read_bytes() == whole
        folder.append([frame(3)])
    assert [found.key for found in results(tmp_path)] == [frame(number)[0] for number in (1, 2, 3)]


def test_a_damaged_frame_is_no_result(tmp_path, settings):
    with opened(tmp_path, settings) as folder:
        folder.append([frame(1), frame(2), frame(3)])
    shard = tmp_path / "shards" / "00001.extxyz"
    content = bytearray(shard.read_bytes())
    place = len(frame(1)[1]) + len(frame(2)[1]) - 30  # a digit of the second frame
    content[place] ^= 1
    shard.write_bytes(content)
    with opened(tmp_path, settings) as folder:
        assert not folder.has(frame(2)[0])
        assert folder.has(frame(3)[0])


def test_a_key_has_one_result(tmp_path, settings):
    with opened(tmp_path, settings) as folder:
        folder.append([frame(1), frame(1)])
        folder.append([frame(1)])
        folder.set_aside(frame(1)[0], {"reason": "late"}, {})
    assert len(list(results(tmp_path))) == 1
    assert not list(failures(tmp_path))


def test_shards_are_of_bounded_size(tmp_path, settings, monkeypatch):
    monkeypatch.setattr("relaxion.apps.relax_many.folder.LARGEST_SHARD", 400)
    for start in (0, 10):
        with opened(tmp_path, settings) as folder:
            for number in range(start, start + 5):
                folder.append([frame(number)])
    assert len(list((tmp_path / "shards").iterdir())) == 5
    assert len(list(results(tmp_path))) == 10


def test_a_full_disk_loses_nothing(tmp_path, settings):
    """The limit of file sizes stands for a full disk: writes fail half-way through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, settings) as folder:
        folder.append([frame(1)])
        size = (tmp_path / "shards" / "00001.extxyz").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            with pytest.raises(FileError, match=r"no space left.*free some space and run the same command again"):
                folder.append([frame(2), frame(3)])
            with pytest.raises(FileError, match="no space left"):
                folder.set_aside(frame(4)[0], {"reason": "x" * 5000}, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "shards" / "00001.extxyz").stat().st_size == size
        assert not list((tmp_path / "failed").iterdir())
        assert not folder.has(frame(2)[0])
        folder.append([frame(2)])
        folder.set_aside(frame(4)[0], {"reason": "x" * 5000}, {})
    assert len(list(results(tmp_path))) == 2
    assert len(list(failures(tmp_path))) == 1


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


def test_sealing_is_stable():
    assert sealed("1\nkey=1\nCu 0 0 0\n") == sealed("1\nkey=1\nCu 0 0 0\n")
