"""Relaxations written point by point: what goes in comes out, also after a kill."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones

from relaxion import Relaxer
from relaxion.database import EvaluatedPoint, RelaxationDatabase, RelaxationStart
from relaxion.errors import FileError
from relaxion.structures import Outcome


def beginning(key: str, n_atoms: int = 3, *, cell_free: bool = False, fmax: float = 0.05) -> RelaxationStart:
    random = np.random.default_rng(n_atoms)
    return RelaxationStart(
        key=key,
        kind="relaxation",
        calculator={"name": "EMT", "parameters": {"asap_cutoff": False}},
        fmax=fmax,
        cell_free=cell_free,
        numbers=random.integers(1, 100, n_atoms),
        pbc=np.array([True, False, True]),
        movable=np.array([True] * (n_atoms - 1) + [False]),
        cell=random.normal(0, 5, (3, 3)),
    )


def told(start: RelaxationStart, number: int, scale: float = 1.0) -> EvaluatedPoint:
    random = np.random.default_rng(number)
    n_atoms = len(start.numbers)
    return EvaluatedPoint(
        base=number - 1,
        energy=-1.5 * number,
        positions=random.normal(0, 1000, (n_atoms, 3)),
        forces=scale * random.normal(0, 1, (n_atoms, 3)),
        stress=random.normal(0, 0.01, 6) if start.cell_free else None,
        cell=start.cell + random.normal(0, 0.1, (3, 3)) if start.cell_free else None,
    )


def database_at(path: Path) -> RelaxationDatabase:
    return RelaxationDatabase.open_or_create(path, {})


def write(
    memory: RelaxationDatabase, key: str, points: int, *, end: Outcome | None = Outcome.CONVERGED, **kind
) -> None:
    start = beginning(key, **kind)
    recording = memory.begin(start)
    for number in range(points):
        recording.point(number, told(start, number))
    if end is not None:
        recording.end(end)


@pytest.mark.parametrize("cell_free", [False, True], ids=["fixed", "free"])
def test_what_goes_in_comes_out(tmp_path: Path, cell_free: bool) -> None:
    memory = database_at(tmp_path / "memory")
    write(memory, "a", 4, cell_free=cell_free)
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
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


def _write_and_die(path: Path) -> None:
    memory = database_at(path)
    write(memory, "a", 4)
    write(memory, "b", 3, end=None)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_no_point(tmp_path: Path) -> None:
    killed = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(tmp_path / "memory",))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    found = list(RelaxationDatabase.open(tmp_path / "memory"))
    assert [(one.key, len(one)) for one in found] == [("a", 4), ("b", 3)]
    assert found[1].outcome == Outcome.RUNNING
    one = RelaxationDatabase.open(tmp_path / "memory").find("a")
    assert one is not None
    assert len(one) == 4


def test_made_again_after_a_kill_it_is_there_once_and_whole(tmp_path: Path) -> None:
    write(database_at(tmp_path / "memory"), "a", 2, end=None)
    write(database_at(tmp_path / "memory"), "a", 4)
    store = RelaxationDatabase.open(tmp_path / "memory")
    assert [(one.key, len(one)) for one in store] == [("a", 4)]
    assert [len(one) for one in store] == [4]


def test_points_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    memory, start = database_at(tmp_path / "memory"), beginning("a")
    recording = memory.begin(start)
    recording.point(1, told(start, 0))
    recording.point(2, told(start, 1, scale=np.nan))
    recording.point(3, EvaluatedPoint(1, -3.0, np.zeros((3, 3)), np.zeros((3, 3))))
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
    assert found.bases is not None
    assert found.bases.tolist() == [-1, 0]
    assert found.outcome == Outcome.CONVERGED  # nobody said so, but its last forces do


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileError, match="is not empty and holds no relaxation database"):
        database_at(tmp_path)


def rattled(seed: int = 0):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = EMT()
    return atoms


def test_a_full_disk_is_a_sentence_and_relaxing_goes_on(tmp_path, monkeypatch, caplog) -> None:
    relaxer = Relaxer(rattled(), database=tmp_path / "memory", logfile=None, policy=None)
    real = relaxer.step
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = tmp_path / "memory"
    calls = [0]

    def step(*arguments):
        calls[0] += 1
        if calls[0] == 3:
            (file,) = log.glob("*-wal")
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, hard))
        return real(*arguments)

    monkeypatch.setattr(relaxer, "step", step)
    try:
        with caplog.at_level(logging.WARNING):
            assert relaxer.run(fmax=0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written") == 1
    assert "the relaxation continues" in caplog.text
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
    assert 2 <= len(found) < relaxer.force_calls  # what was there before is whole


def test_several_calculators_in_one_memory_are_told_apart(tmp_path: Path) -> None:
    for calculator in (EMT(), LennardJones(sigma=2.3, epsilon=0.4), LennardJones(sigma=2.3, epsilon=0.5)):
        atoms = rattled()
        atoms.calc = calculator
        Relaxer(atoms, database=tmp_path / "memory", logfile=None, policy=None).run(fmax=0.1, steps=5)
    found = list(RelaxationDatabase.open(tmp_path / "memory"))
    assert [one.engine for one in found] == ["EMT", "LennardJones", "LennardJones"]
    assert found[1].settings["parameters"]["epsilon"] == 0.4
