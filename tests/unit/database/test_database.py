"""The relaxation database: what goes in comes out, whoever writes, whenever somebody is killed."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from relaxion.database import RelaxationDatabase
from relaxion.errors import FileError
from relaxion.potentials.registry import potential
from relaxion.structures.trajectory import Trajectory


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
    store = RelaxationDatabase.create(tmp_path / "store", {"seed": 6})
    written = [trajectory("a"), trajectory("b", 1, 1, cell_free=True), trajectory("c", 7, 2)]
    store.append(written[:2])
    store.append(written[2:])
    again = RelaxationDatabase.open(tmp_path / "store")
    assert again.description == {"seed": 6}
    assert all(same(a, b) for a, b in zip(written, again, strict=True))
    assert len(again) == 3
    assert again.keys() == {"a", "b", "c"}


def test_a_trajectory_is_structures_and_their_evaluation() -> None:
    one = trajectory("a", 3, 4, cell_free=True)
    structures, evaluation = one.structures, one.evaluation
    assert (structures.n_structures, structures.n_atoms) == (4, 12)
    assert torch.equal(structures.select(torch.tensor([2])).positions, one.positions[2])
    assert torch.equal(evaluation.select(structures.counts, torch.tensor([2])).forces, one.forces[2])
    assert structures.cell_free.all()


def test_the_same_key_twice_comes_once(tmp_path: Path) -> None:
    store = RelaxationDatabase.create(tmp_path / "store", {})
    store.append([trajectory("a")])
    store.append([trajectory("a"), trajectory("bb")])
    assert [one.key for one in store] == ["a", "bb"]
    assert len(store) == 2


def _write(path: Path, writer: int) -> None:
    store = RelaxationDatabase.open(path)
    for number in range(20):
        store.append([trajectory(f"{writer}-{number}")])


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    RelaxationDatabase.create(path, {})
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert RelaxationDatabase.open(path).keys() == {f"{w}-{n}" for w in range(2) for n in range(20)}


def test_foreign_old_and_damaged_databases_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no relaxation database"):
        RelaxationDatabase.open(tmp_path)
    database = RelaxationDatabase.create(tmp_path / "database", {})
    with pytest.raises(FileError, match="already"):
        RelaxationDatabase.create(tmp_path / "database", {})
    (file,) = database.files()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE description SET value = '99' WHERE name = 'format_version'")
    with pytest.raises(FileError, match="format version 99, this relaxion reads 2"):
        RelaxationDatabase.open(database.path)
    old = tmp_path / "old"
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    with pytest.raises(FileError, match=r"relaxion 0\.2.*convert"):
        RelaxationDatabase.open(old)
    other = tmp_path / "full"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(FileError, match="is not empty and holds no relaxation database"):
        RelaxationDatabase.create(other, {})


def test_files_of_two_machines_are_one_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("one", "two"):
        monkeypatch.setattr("relaxion.database.socket.gethostname", lambda host=host: host)
        database = RelaxationDatabase.open_or_create(tmp_path / "database", {"made_by": host})
        database.append([trajectory("a"), trajectory(host * 4)])
    assert len(database.files()) == 2
    assert database.keys() == {"a", "one" * 4, "two" * 4}
    assert database.description["made_by"] == "one"


def test_it_is_read_without_relaxion(tmp_path: Path) -> None:
    database = RelaxationDatabase.create(tmp_path / "database", {})
    written = trajectory("a", 3, 4)
    database.append([written])
    (file,) = database.files()
    with sqlite3.connect(file) as connection:
        rows = connection.execute(
            "SELECT energy_ev, positions FROM points JOIN relaxations ON relaxation = id ORDER BY number"
        ).fetchall()
    assert [energy for energy, _ in rows] == written.energies.tolist()
    assert np.array_equal(np.frombuffer(rows[2][1]).reshape(-1, 3), written.positions[2].numpy())


def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    database = RelaxationDatabase.create(tmp_path / "database", {})
    database.append([trajectory("a")])
    (database.path / "relaxations-zzz.sqlite").write_bytes(b"half a file" * 1000)
    with pytest.raises(FileError, match=r"relaxations-zzz\.sqlite"):
        list(database)
    notes = list[str]()
    assert [one.key for one in database.trajectories(notes.append)] == ["a"]
    assert "relaxations-zzz.sqlite" in notes[0]


def test_stored_forces_are_those_of_the_potential(tmp_path: Path) -> None:
    """A trajectory evaluated again gives the same numbers: nothing is turned, wrapped or rounded on its way."""
    from relaxion import relax_batch
    from relaxion.train.data.starts import MetalStarts

    starts = MetalStarts(free_share=0.0).sample(torch.Generator().manual_seed(6), 6).to_ase()
    for cell in (True, False):
        relax_batch(starts[3 * cell : 3 * cell + 3], "emt", cell=cell, database=tmp_path / "store")
    store = RelaxationDatabase.open(tmp_path / "store")
    emt = potential("emt")
    found = list(store)
    assert {one.cell_free for one in found} == {True, False}
    for one in found:
        evaluation = emt(one.structures)
        assert torch.allclose(evaluation.forces, one.evaluation.forces, atol=1e-10)
        stresses = evaluation.stresses if one.cell_free else torch.zeros_like(one.stresses)  # nobody asked
        assert stresses is not None
        assert torch.allclose(stresses, one.stresses, atol=1e-10)
        assert torch.allclose(evaluation.energies, one.energies, atol=1e-10)
