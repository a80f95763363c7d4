"""Journals: what goes in comes out, a kill costs at most a torn record, damage costs what it touches."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones

from relaxion import Relaxer
from relaxion.database.journal import HEAD, Beginning, JournalPoint, read_journal
from relaxion.database.recording import Memory
from relaxion.database.store import TrajectoryStore
from relaxion.errors import FileError
from relaxion.structures import Outcome


def beginning(key: str, n_atoms: int = 3, *, cell_free: bool = False, fmax: float = 0.05) -> Beginning:
    random = np.random.default_rng(n_atoms)
    return Beginning(
        key=key,
        kind="memory",
        calculator={"name": "EMT", "parameters": {"asap_cutoff": False}},
        fmax=fmax,
        cell_free=cell_free,
        numbers=random.integers(1, 100, n_atoms),
        pbc=np.array([True, False, True]),
        movable=np.array([True] * (n_atoms - 1) + [False]),
        cell=random.normal(0, 5, (3, 3)),
        positions=random.normal(0, 1000, (n_atoms, 3)),
    )


def told(start: Beginning, number: int, scale: float = 1.0) -> JournalPoint:
    random = np.random.default_rng(number)
    n_atoms = len(start.numbers)
    return JournalPoint(
        base=number - 1,
        energy=-1.5 * number,
        positions=start.positions + random.normal(0, 0.1, (n_atoms, 3)),
        forces=scale * random.normal(0, 1, (n_atoms, 3)),
        stress=random.normal(0, 0.01, 6) if start.cell_free else None,
        cell=start.cell + random.normal(0, 0.1, (3, 3)) if start.cell_free else None,
    )


def write(memory: Memory, key: str, points: int, *, end: Outcome | None = Outcome.CONVERGED, **kind) -> None:
    start = beginning(key, **kind)
    recording = memory.begin(start)
    for number in range(points):
        recording.point(number, told(start, number))
    if end is not None:
        recording.end(end)


@pytest.mark.parametrize("cell_free", [False, True], ids=["fixed", "free"])
def test_what_goes_in_comes_out(tmp_path: Path, cell_free: bool) -> None:
    memory = Memory(tmp_path / "memory")
    write(memory, "a", 4, cell_free=cell_free)
    (found,) = TrajectoryStore.open(tmp_path / "memory")
    start = beginning("a", cell_free=cell_free)
    for number in range(4):
        point = told(start, number)
        assert found.positions[number].numpy() == pytest.approx(point.positions, abs=1e-7)
        assert found.forces[number].numpy() == pytest.approx(point.forces, rel=1e-6)
        if point.cell is not None:
            assert np.array_equal(found.cells[number].numpy(), point.cell)
    assert found.energies.tolist() == [0.0, -1.5, -3.0, -4.5]
    assert found.bases is not None
    assert found.bases.tolist() == [-1, 0, 1, 2]
    assert (found.key, found.engine, found.outcome, found.cell_free) == ("a", "EMT", Outcome.CONVERGED, cell_free)
    assert found.settings["parameters"] == {"asap_cutoff": False}
    assert found.movable.tolist() == [True, True, False]


def test_a_kill_leaves_at_most_a_torn_record(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    write(memory, "a", 4)
    write(memory, "b", 3, end=None)
    (journal,) = TrajectoryStore.open(tmp_path / "memory").journals()
    whole = journal.read_bytes()
    for kept in range(len(whole) - 60, len(whole)):
        journal.write_bytes(whole[:kept])
        notes = list[str]()
        found = list(TrajectoryStore.open(tmp_path / "memory").trajectories(notes.append))
        assert [one.key for one in found] == ["a", "b"]
        assert len(found[1]) == 2
        assert notes == []


def test_damage_costs_what_it_touches(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    write(memory, "a", 4)
    write(memory, "b", 4)
    (journal,) = TrajectoryStore.open(tmp_path / "memory").journals()
    content = bytearray(journal.read_bytes())
    content[len(content) // 2 - 60] ^= 255
    journal.write_bytes(content)
    notes = list[str]()
    found = list(TrajectoryStore.open(tmp_path / "memory").trajectories(notes.append))
    assert [one.key for one in found] == ["a", "b"]
    assert sum(map(len, found)) == 7
    assert "damaged bytes were left out, all else was read" in notes[0]
    journal.write_bytes(b"RXJ1" * 100 + b"\xff" * HEAD.size)
    assert list(TrajectoryStore.open(tmp_path / "memory")) == []


def test_a_journal_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "memory")
    write(memory, "a", 2, end=None)
    (journal,) = memory.store.journals()
    known = read_journal(journal)
    write(memory, "b", 3)
    again = read_journal(journal, known)
    assert {entry.beginning.key: len(entry.points) for entry in again.entries.values()} == {"a": 2, "b": 3}


def test_made_again_after_a_kill_it_is_there_once_and_whole(tmp_path: Path) -> None:
    write(Memory(tmp_path / "memory"), "a", 2, end=None)
    write(Memory(tmp_path / "memory"), "a", 4)
    store = TrajectoryStore.open(tmp_path / "memory")
    assert len(store.journals()) == 2  # one for each writer
    assert [(one.key, len(one)) for one in store] == [("a", 4)]
    assert [entry["n_steps"] for entry in store.about()] == [4]


def test_points_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    memory, start = Memory(tmp_path / "memory"), beginning("a")
    recording = memory.begin(start)
    recording.point(1, told(start, 0))
    recording.point(2, told(start, 1, scale=np.nan))
    recording.point(3, JournalPoint(1, -3.0, start.positions, np.zeros((3, 3))))
    (found,) = TrajectoryStore.open(tmp_path / "memory")
    assert found.bases is not None
    assert found.bases.tolist() == [-1, 0]
    assert found.outcome == Outcome.CONVERGED  # nobody said so, but its last forces do


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileError, match="is not empty and holds no store"):
        Memory(tmp_path)


def rattled(seed: int = 0):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = EMT()
    return atoms


def test_a_full_disk_is_a_sentence_and_relaxing_goes_on(tmp_path, monkeypatch, caplog) -> None:
    relaxer = Relaxer(rattled(), memory=tmp_path / "memory", logfile=None, policy=None)
    real, calls = os.write, [0]

    def full(file: int, content: bytes) -> int:
        calls[0] += 1
        if calls[0] > 2:
            real(file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content)

    monkeypatch.setattr("relaxion.database.recording.os.write", full)
    with caplog.at_level(logging.WARNING):
        assert relaxer.run(fmax=0.05)
    assert caplog.text.count("No space left on device") == 1
    assert "the relaxation continues" in caplog.text
    monkeypatch.undo()
    (found,) = TrajectoryStore.open(tmp_path / "memory")
    assert len(found) == 2  # what was there before is whole


def test_several_calculators_in_one_memory_are_told_apart(tmp_path: Path) -> None:
    for calculator in (EMT(), LennardJones(sigma=2.3, epsilon=0.4), LennardJones(sigma=2.3, epsilon=0.5)):
        atoms = rattled()
        atoms.calc = calculator
        Relaxer(atoms, memory=tmp_path / "memory", logfile=None, policy=None).run(fmax=0.1, steps=5)
    found = list(TrajectoryStore.open(tmp_path / "memory"))
    assert [one.engine for one in found] == ["EMT", "LennardJones", "LennardJones"]
    assert found[1].settings["parameters"]["epsilon"] == 0.4
