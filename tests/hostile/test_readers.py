"""Readers of our own formats before any bytes at all."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
import torch
from ase.build import bulk
from ase.io import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaxion import relax_batch
from relaxion.apps.relax_many.results import ResultFolder, read_manifest, results
from relaxion.apps.relax_many.settings import ManySettings
from relaxion.database import RelaxationDatabase
from relaxion.errors import FileError, RelaxionError, SettingsError
from relaxion.files import Format, decoded
from relaxion.optimizer.records import read_restart
from relaxion.potentials.eam import read_eam_tables
from relaxion.train.data.dataset import read
from relaxion.train.tasks.settings import read_toml, settings_from_recipe

FORMAT = Format(version=1, error=FileError)
SHARED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters='"\\'), max_size=30)


@SHARED
@given(content=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_a_database_of_any_bytes_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "relaxations-a.sqlite").write_bytes(content)
    with pytest.raises(FileError):
        RelaxationDatabase.open(tmp_path)


@SHARED
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.integers(0, 10**6))
def test_a_damaged_database_is_refused_or_read(place: int, bit: int, cut: int, tmp_path: Path) -> None:
    folder = tmp_path / f"{place}-{bit}-{cut}"
    relax_batch([bulk("Cu", cubic=True)], "emt", policy=None, database=RelaxationDatabase.open_or_create(folder, {}))
    (file,) = RelaxationDatabase(folder).files()
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    for damaged in (bytes(content), bytes(content)[: cut % len(content)]):
        file.write_bytes(damaged)
        try:
            found = list(RelaxationDatabase.open(folder))
        except FileError:
            continue
        assert len(found) <= 1


@SHARED
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.integers(0, 10**6))
def test_damaged_tensors_are_refused_or_whole(place: int, bit: int, cut: int, tmp_path: Path) -> None:
    file, tensors, values = tmp_path / "a.safetensors", {"a": torch.arange(5.0), "b": torch.zeros(2, 3)}, {"n": 1}
    FORMAT.write(file, "something", tensors, values)
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    for damaged in (bytes(content), bytes(content)[: cut % len(content)]):
        file.write_bytes(damaged)
        try:
            stored = FORMAT.read(file, "something")
        except FileError:
            continue
        assert stored.values == values
        assert all(stored.tensors[name].equal(tensor) for name, tensor in tensors.items())


@SHARED
@given(values=PLAIN)
def test_any_json_is_no_manifest_and_no_restart(values: object, tmp_path: Path) -> None:
    text = json.dumps(values)
    (tmp_path / "relaxion-many.json").write_text(text)
    with pytest.raises(FileError):
        read_manifest(tmp_path)
    with pytest.raises(RelaxionError):
        read_restart(tmp_path / "relaxion-many.json", bulk("Cu"))


@SHARED
@given(content=st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_any_bytes_as_recipe_and_as_table(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(content)
    try:
        table = read_toml(file)
    except (SettingsError, FileError):
        pass
    else:
        assert isinstance(table, dict)
        with pytest.raises(RelaxionError):
            settings_from_recipe(file, None, {})
    with pytest.raises(FileError):
        read_eam_tables(file)


def test_what_is_nested_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        decoded("[" * 100_000)


def test_a_link_in_place_of_the_database_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "precious.sqlite"
    sqlite3.connect(outside).close()
    with ResultFolder(tmp_path / "out", ManySettings(), []):
        pass
    (tmp_path / "out" / "results.sqlite").unlink()
    (tmp_path / "out" / "results.sqlite").symlink_to(outside)
    with pytest.raises(FileError, match="cannot be written"):
        ResultFolder(tmp_path / "out", ManySettings(), [])
    with pytest.raises(FileError, match="is a link"):
        results(tmp_path / "out")


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "precious.txt"
    outside.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lock").symlink_to(outside)
    with pytest.raises(FileError, match="name a folder that can be written"):
        ResultFolder(tmp_path / "out", ManySettings(), [])
    assert outside.read_text() == "mine"


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.xyz")
    with pytest.raises(FileError, match="neither a file nor a folder"):
        read(tmp_path / "a.xyz")


def test_an_at_sign_is_part_of_the_name(tmp_path: Path) -> None:
    write(tmp_path / "Cu.xyz", bulk("Cu"), format="extxyz")
    write(tmp_path / "Au.xyz", bulk("Au"), format="extxyz")
    (tmp_path / "Au.xyz").rename(tmp_path / "Cu.xyz@0")
    with pytest.raises(FileError, match="xyz@0"):  # no kind that ASE knows; never the other file
        read(tmp_path / "Cu.xyz@0")
