"""The store of evaluated structures: what goes in comes out, whoever writes, whenever somebody is killed."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from relaxion.database.store import MANIFEST, TrajectoryStore
from relaxion.database.trajectory import Trajectory
from relaxion.errors import FileError
from relaxion.potentials.registry import potential


def trajectory(key: str, n_atoms: int = 3, steps: int = 4, *, cell_free: bool = False) -> Trajectory:
    generator = torch.Generator().manual_seed(len(key) + 10 * n_atoms + steps)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Trajectory(
        key=key,
        kind="prototype",
        engine="emt",
        outcome=1,
        cell_free=cell_free,
        numbers=torch.randint(1, 90, (n_atoms,), generator=generator),
        pbc=torch.tensor([True, True, cell_free]),
        movable=torch.rand(n_atoms, generator=generator) > 0.5,
        cells=random(steps, 3, 3),
        positions=random(steps, n_atoms, 3),
        energies=random(steps),
        forces=random(steps, n_atoms, 3),
        stresses=random(steps, 3, 3),
    )


def same(first: Trajectory, second: Trajectory) -> bool:
    plain = ("key", "kind", "engine", "outcome", "cell_free")
    tensors = ("numbers", "pbc", "movable", "cells", "positions", "energies", "forces", "stresses")
    return all(getattr(first, name) == getattr(second, name) for name in plain) and all(
        getattr(first, name).dtype == getattr(second, name).dtype
        and torch.equal(getattr(first, name), getattr(second, name))
        for name in tensors
    )


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store", {"seed": 6})
    written = [trajectory("a"), trajectory("b", 1, 1, cell_free=True), trajectory("c", 7, 2)]
    store.append(written[:2], skipped={"x": "too large a force"}, cost={"force_calls": 9, "cpu_seconds": 1.5})
    store.append(written[2:], cost={"force_calls": 1, "cpu_seconds": 0.5})
    store.append([])  # no empty shards
    again = TrajectoryStore.open(tmp_path / "store")
    assert again.description == {"seed": 6}
    assert all(same(a, b) for a, b in zip(written, again, strict=True))
    assert len(again) == 3
    assert again.keys() == {"a", "b", "c", "x"}
    assert again.skipped() == {"x": "too large a force"}
    assert again.cost() == {"force_calls": 10, "cpu_seconds": 2.0}
    assert len(again.shards()) == 2


def test_a_trajectory_is_structures_and_their_evaluation() -> None:
    one = trajectory("a", 3, 4, cell_free=True)
    structures, evaluation = one.structures, one.evaluation
    assert (structures.n_structures, structures.n_atoms) == (4, 12)
    assert torch.equal(structures.select(torch.tensor([2])).positions, one.positions[2])
    assert torch.equal(evaluation.select(structures.counts, torch.tensor([2])).forces, one.forces[2])
    assert structures.cell_free.all()


def test_the_same_key_twice_comes_once(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store", {})
    store.append([trajectory("a")])
    store.append([trajectory("a"), trajectory("bb")])
    assert [one.key for one in store] == ["a", "bb"]
    assert len(store) == 2


def _write(path: Path, writer: int) -> None:
    store = TrajectoryStore.open(path)
    for number in range(20):
        store.append([trajectory(f"{writer}-{number}")])


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    TrajectoryStore.create(path, {})
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert TrajectoryStore.open(path).keys() == {f"{w}-{n}" for w in range(2) for n in range(20)}


def test_what_a_killed_writer_left_is_no_shard(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store", {})
    store.append([trajectory("a")])
    left = store.path / f".{store.shards()[0].name}.part"
    left.write_bytes(b"half a shard")
    assert len(store) == 1
    store.sweep(older_than_seconds=3600)
    assert left.exists()  # perhaps somebody is busy with it
    store.sweep(older_than_seconds=-1)
    assert not left.exists()
    assert len(store) == 1


def test_foreign_and_damaged_stores_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no store"):
        TrajectoryStore.open(tmp_path)
    store = TrajectoryStore.create(tmp_path / "store", {})
    with pytest.raises(FileError, match="holds a store already"):
        TrajectoryStore.create(tmp_path / "store", {})
    manifest = store.path / MANIFEST
    text = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(text) | {"format_version": 99}))
    with pytest.raises(FileError, match="format version 99, this relaxion reads 1; collect it again"):
        TrajectoryStore.open(store.path)
    manifest.write_text("{}")
    with pytest.raises(FileError, match="not written by relaxion"):
        TrajectoryStore.open(store.path)
    manifest.write_text(text)
    store.append([trajectory("a", 20)])
    shard = store.shards()[0]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FileError, match="damaged"):
        list(store)
    other = tmp_path / "full"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(FileError, match="is not empty and holds no store"):
        TrajectoryStore.create(other, {})


def test_stored_forces_are_those_of_the_potential(tmp_path: Path) -> None:
    """A trajectory evaluated again gives the same numbers: nothing is turned, wrapped or rounded on its way."""
    from relaxion.train.collecting.collect import Collector, jobs, stepper_maker
    from relaxion.train.collecting.settings import CollectSettings

    kind = {"make": "metal", "engine": "emt", "number": 6, "free_cell_share": 0.5}
    settings = CollectSettings.of({"kinds": {"alloy": kind}}, {})
    store = TrajectoryStore.create(tmp_path / "store", {})
    list(Collector(settings, store, jobs(settings), stepper_maker(None)).run(lambda: False))
    emt = potential("emt")
    found = list(store)
    assert {one.cell_free for one in found} == {True, False}
    for one in found:
        evaluation = emt(one.structures)
        assert torch.allclose(evaluation.forces, one.evaluation.forces, atol=1e-10)
        assert evaluation.stresses is not None
        assert torch.allclose(evaluation.stresses, one.stresses, atol=1e-10)
        assert torch.allclose(evaluation.energies, one.energies, atol=1e-10)
