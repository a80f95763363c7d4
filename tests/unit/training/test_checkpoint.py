"""Files of tensors: exact, in one go, and refused in one sentence when they are not what they should be (R10.3)."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from relaxion.errors import CheckpointError
from relaxion.files import Stored, digest
from relaxion.train.tasks.progress import CHECKPOINTS

KIND = "test file"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.safetensors"


def write(path: Path, number: float = 1.0) -> None:
    CHECKPOINTS.write(path, KIND, {"a.x": torch.full((300,), number), "b.y": torch.tensor(3)}, {"steps": 5})


def test_there_and_back(path: Path) -> None:
    shared = torch.arange(6.0)
    tensors = {
        "part.half": shared[:3],
        "part.same": shared[:3],
        "part.column": shared.reshape(2, 3).T,
        "other.empty": torch.zeros(0, 4),
        "other.flag": torch.tensor(True),
        "other.bytes": torch.Generator().manual_seed(3).get_state(),
        "other.nan": torch.tensor([float("nan"), -0.0]),
    }
    CHECKPOINTS.write(path, KIND, tensors, {"position": 7, "settings": {"x": None}})
    stored = CHECKPOINTS.read(path, KIND)
    assert stored.values == {"position": 7, "settings": {"x": None}}
    assert digest(stored.tensors) == digest(tensors)
    assert set(stored.part("part")) == {"half", "same", "column"}


def test_replaced_in_one_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks while the new file is written, the old one stays whole."""
    write(path)

    def killed(_file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(path, 2.0)
    assert CHECKPOINTS.read(path, KIND).tensors["a.x"][0] == 1.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    write(path, 2.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_missing(path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        CHECKPOINTS.read(path, KIND)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(path: Path, keep: int) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged"):
        CHECKPOINTS.read(path, KIND)


def test_one_changed_bit(path: Path) -> None:
    write(path)
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not match their digest"):
        CHECKPOINTS.read(path, KIND)


def test_plain_values_are_part_of_the_digest(path: Path) -> None:
    write(path)
    path.write_bytes(path.read_bytes().replace(rb"{\"steps\": 5}", rb"{\"steps\": 6}"))
    with pytest.raises(CheckpointError, match="do not match their digest"):
        CHECKPOINTS.read(path, KIND)


def test_a_missing_folder_and_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written .*does its folder exist"):
        write(path / "missing" / "file.safetensors")
    write(path)

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left"):
        write(path, 2.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert CHECKPOINTS.read(path, KIND).tensors["a.x"][0] == 1.0


def test_foreign(path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="not written by relaxion"):
        CHECKPOINTS.read(path, KIND)


def test_pickle_is_never_read(path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="damaged or not a safetensors file"):
        CHECKPOINTS.read(path, KIND)


def test_other_kind(path: Path) -> None:
    write(path)
    with pytest.raises(CheckpointError, match="holds a test file, not a story"):
        CHECKPOINTS.read(path, "story")


@pytest.mark.parametrize(("version", "advice"), [(3, "update"), (10, "update"), (1, "read it with the relaxion that")])
def test_other_version(path: Path, version: int, advice: str) -> None:
    replace(CHECKPOINTS, version=version).write(path, KIND, {}, {})
    with pytest.raises(CheckpointError, match=f"has format version {version}, this relaxion reads 2; {advice}"):
        CHECKPOINTS.read(path, KIND)


def test_old_versions_are_upgraded_step_by_step(path: Path) -> None:
    write(path)

    def second(stored: Stored) -> Stored:
        return Stored(stored.tensors, {"lines": stored.values["steps"] * 10})

    def third(stored: Stored) -> Stored:
        return Stored(stored.tensors, {"words": stored.values["lines"] + 1})

    newer = replace(CHECKPOINTS, version=4, upgrades={2: second, 3: third})
    assert newer.read(path, KIND).values == {"words": 51}
    with pytest.raises(CheckpointError, match="has format version 2, this relaxion reads 4; read it with"):
        replace(newer, upgrades={3: third}).read(path, KIND)


def test_digest_sees_names_shapes_and_bits_but_no_order() -> None:
    one, two = torch.tensor([0.0, 1.0]), torch.tensor([[0.0, 1.0]])
    digests = [digest(tensors) for tensors in ({"a": one}, {"b": one}, {"a": two}, {"a": -one}, {"a": one.double()})]
    assert len(set(digests)) == 5
    assert digest({"a": one, "b": two}) == digest({"b": two, "a": one})
