"""Relaxations as they are written and read: `RelaxationDatabase`.

A database is a folder with one SQLite file for each machine that writes (`relaxations-HOST.sqlite`: SQLite's log needs
the shared memory of one machine). All processes of a machine write to the same file, a row for every force call. Files
are only added to. Reading joins all files of the folder and takes the fullest relaxation of each key.

    relaxations  id, key, kind, calculator (JSON), policy, fmax_ev_per_angstrom, cell_free, formula, n_atoms, outcome,
                 numbers (uint8), pbc (3 × uint8), movable (uint8), cell (3 × 3 float64, Å)
    points       relaxation, number, base (the point at which the step began, -1 at a start, NULL unknown), energy_ev,
                 positions (n × 3 float64, Å), forces (n × 3 float64, eV/Å), stress (3 × 3 float64, eV/Å³, or NULL),
                 cell (3 × 3 float64, Å, or NULL: that of the relaxation)
    description  name, value (JSON): what made the database

Arrays are little-endian, row by row: `numpy.frombuffer(row["positions"]).reshape(-1, 3)`. Outcomes are the numbers of
`relaxion.structures.Outcome` (1: converged).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.stress import voigt_6_to_full_3x3_stress
from ase.symbols import Symbols
from numpy.typing import NDArray

from relaxion.errors import FileError
from relaxion.files import decoded, open_for_writing, reading, transaction
from relaxion.structures import Outcome
from relaxion.structures.trajectory import RelaxationStart, Trajectory

__all__ = [
    "EvaluatedPoint", "Note", "Recording", "RelaxationDatabase", "RelaxationStart", "Trajectory", "key_of",
]  # fmt: skip
logger = logging.getLogger(__name__)

USER = "relaxation"  # the kind of relaxations that users make
FORMAT_VERSION = 2  # 1: the folders of relaxion 0.2
OLD_MANIFEST = "manifest.json"  # of those folders
FILES = "relaxations*.sqlite"
TABLES = """
CREATE TABLE IF NOT EXISTS relaxations (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, kind TEXT NOT NULL, calculator TEXT NOT NULL, policy TEXT NOT NULL,
    fmax_ev_per_angstrom REAL NOT NULL, cell_free INTEGER NOT NULL, formula TEXT NOT NULL, n_atoms INTEGER NOT NULL,
    outcome INTEGER NOT NULL, numbers BLOB NOT NULL, pbc BLOB NOT NULL, movable BLOB NOT NULL, cell BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS relaxations_by_key ON relaxations (key);
CREATE TABLE IF NOT EXISTS points (
    relaxation INTEGER NOT NULL, number INTEGER NOT NULL, base INTEGER, energy_ev REAL NOT NULL,
    positions BLOB NOT NULL, forces BLOB NOT NULL, stress BLOB, cell BLOB, PRIMARY KEY (relaxation, number));
CREATE TABLE IF NOT EXISTS description (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
FULLNESS = """
SELECT id, key, outcome, (SELECT count(*) FROM points WHERE relaxation = relaxations.id) FROM relaxations ORDER BY id
"""
RELAXATION = """
SELECT key, kind, calculator, policy, fmax_ev_per_angstrom, cell_free, outcome, n_atoms, numbers, pbc, movable, cell
FROM relaxations WHERE id = ?
"""
POINTS = "SELECT base, energy_ev, positions, forces, stress, cell FROM points WHERE relaxation = ? ORDER BY number"
NEW_RELAXATION = f"INSERT INTO relaxations VALUES (NULL, {', '.join('?' * 13)})"
NEW_POINT = f"INSERT INTO points VALUES ({', '.join('?' * 8)})"

Array = NDArray[np.float64]
Note = Callable[[str], None]
"""Is called with a sentence about what cannot be read."""


@dataclass(frozen=True, eq=False)
class EvaluatedPoint:
    """One evaluated geometry."""

    base: int | None  # number of the point at which the step began; -1: a start, None: not known
    energy: float  # eV
    positions: Array  # (n_atoms, 3) Å
    forces: Array  # (n_atoms, 3) eV/Å
    stress: Array | None = None  # (6,) or (3, 3), eV/Å³
    cell: Array | None = None  # (3, 3) Å; None: that of the start

    @property
    def is_finite(self) -> bool:
        """Others are not written: nothing can be learned from them."""
        return bool(np.isfinite(self.energy) and np.isfinite(self.forces).all() and np.isfinite(self.positions).all())


class RelaxationDatabase:
    """`create`, `open` or `open_or_create` a folder; then `begin` a relaxation, `append` whole ones, or iterate.

    `RelaxationDatabase.at(path)` gives all relaxers of a process the same object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()
        self.working = True  # False: the disk refused a point, and no more are written

    @classmethod
    def create(cls, path: str | Path, description: Mapping[str, Any]) -> RelaxationDatabase:
        """A new, empty database.

        path: folder; it is created.
        description: plain values that state what fills the database.
        """
        database = cls(Path(path))
        if database.files():
            raise FileError(f"{path} holds a relaxation database already; open it, or choose another folder")
        database._make(description)
        return database

    @classmethod
    def open(cls, path: str | Path) -> RelaxationDatabase:
        """An existing database; FileError where there is none that this relaxion reads."""
        database = cls(Path(path))
        if database.files():
            version = database._described().get("format_version")
            if version != FORMAT_VERSION:
                raise FileError(
                    f"the database {path} has format version {str(version)[:40]}, this relaxion reads {FORMAT_VERSION}"
                )
            return database
        _refuse_old(database.path)
        missing = "holds no relaxation database" if database.path.exists() else "does not exist"
        raise FileError(f"{path} {missing}; relaxing with `database={path}` makes one")

    @classmethod
    def open_or_create(cls, path: str | Path, description: Mapping[str, Any]) -> RelaxationDatabase:
        """The existing database or a new one; several processes may do this at the same time."""
        database = cls(Path(path))
        if database.files():
            return cls.open(path)
        database._make(description)
        return database

    @classmethod
    def at(cls, path: str | Path) -> RelaxationDatabase:
        """The same object for every call with this folder in this process."""
        place = Path(path).absolute()
        if place not in _DATABASES:
            _DATABASES[place] = cls.open_or_create(place, {"made_by": USER})
        return _DATABASES[place]

    def _make(self, description: Mapping[str, Any]) -> None:
        _refuse_old(self.path)
        values = {"format_version": FORMAT_VERSION, **description}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            ours = set(self.path.glob(f"{FILES}*"))  # another process may have been faster
            if any(entry not in ours and not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise FileError(f"{self.path} is not empty and holds no relaxation database; choose another folder")
            self._write_description(values)
        except (OSError, sqlite3.Error) as error:
            raise FileError(f"the database {self.path} cannot be made: {error}; choose another folder") from error

    def _write_description(self, values: Mapping[str, Any]) -> None:
        rows = [(name, json.dumps(value)) for name, value in values.items()]
        with self._lock:
            self._writer().executemany("INSERT OR IGNORE INTO description VALUES (?, ?)", rows)

    # ---- writing

    def _writer(self) -> sqlite3.Connection:
        """The connection of this process. A connection must not be used after a fork: the child opens its own."""
        if self._connection is None or self._process != os.getpid():
            host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
            new = not self.files()
            self._process = os.getpid()
            self.working = True
            self._connection = open_for_writing(self.path / f"relaxations-{host}.sqlite", TABLES)
            if not new:  # every file states its format
                row = ("format_version", json.dumps(FORMAT_VERSION))
                self._connection.execute("INSERT OR IGNORE INTO description VALUES (?, ?)", row)
        return self._connection

    def begin(self, start: RelaxationStart) -> Recording:
        """A relaxation whose points will be written one by one."""
        return Recording(self, start)

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Whole relaxations, all or none of them; sqlite3's errors become FileErrors."""
        try:
            with self._lock, transaction(self._writer()):
                writer = self._writer()
                for trajectory in trajectories:
                    number = _insert_start(writer, trajectory.start, trajectory.outcome)
                    writer.executemany(NEW_POINT, trajectory_rows(number, trajectory))
        except (sqlite3.Error, OSError) as error:
            raise FileError(f"the database {self.path} cannot be written ({error})") from error

    def write_or_warn(self, write: Callable[[sqlite3.Connection], Any]) -> Any:
        """What `write` returns. Where the disk refuses, one warning, and this process writes no more.

        A database never stops a relaxation.
        """
        with self._lock:
            if self._process != os.getpid():
                self.working = True
            if not self.working:
                return None
            try:
                writer = self._writer()
                with transaction(writer):
                    return write(writer)
            except (sqlite3.Error, OSError) as error:
                self.working = False
                logger.warning(
                    "the database %s cannot be written (%s): this process stops writing to it; what it holds "
                    "is kept and the relaxation continues",
                    self.path, error,
                )  # fmt: skip
                return None

    def close(self) -> None:
        """Everything is in the file itself afterwards, nothing in its log; writing opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    # ---- reading

    def files(self) -> list[Path]:
        """The SQLite files, one for each machine that wrote."""
        return sorted(self.path.glob(FILES))

    def _described(self) -> dict[str, Any]:
        """Of the files that can be read; FileError where none can."""
        found: dict[str, Any] = {}
        failure: FileError | None = None
        for file in self.files():
            try:
                with reading(file) as connection:
                    for name, value in connection.execute("SELECT name, value FROM description"):
                        found.setdefault(name, decoded(value))
            except FileError as error:
                failure = error
            except (TypeError, ValueError) as error:
                failure = FileError(f"{file} is damaged (its description is not JSON: {error})")
        if failure is not None and not found:
            raise failure
        return found

    @property
    def description(self) -> dict[str, Any]:
        """What made the database."""
        return {name: value for name, value in self._described().items() if name != "format_version"}

    def keys(self) -> set[str]:
        """Of all relaxations."""
        return set(self._best(None))

    def _best(self, note: Note | None) -> dict[str, tuple[Path, int, tuple[bool, int]]]:
        """By key: the file with its fullest relaxation, its number there, and how full it is.

        note: is called with a sentence about each damaged file; None: FileError at the first.
        """
        best: dict[str, tuple[Path, int, tuple[bool, int]]] = {}
        for file in self.files():
            for number, key, fullness in self._noting(_fullness(file), note):
                if key not in best or fullness > best[key][2]:
                    best[key] = file, number, fullness
        return best

    def _noting(self, found: Iterator[Any], note: Note | None) -> Iterator[Any]:
        try:
            yield from found
        except FileError as error:
            if note is None:
                raise
            note(f"{error}; what could not be read was left out")

    def __len__(self) -> int:
        return len(self._best(None))

    def __iter__(self) -> Iterator[Trajectory]:
        return self.trajectories()

    def trajectories(self, note: Note | None = None) -> Iterator[Trajectory]:
        """The fullest relaxation of each key, in the order they were begun.

        note: is called with a sentence about each damaged file; None: FileError at the first.
        """
        heard = set[str]()

        def once(sentence: str) -> None:
            if note is not None and sentence not in heard:
                heard.add(sentence)
                note(sentence)

        by_file: dict[Path, list[int]] = {}
        for file, number, _ in self._best(None if note is None else once).values():
            by_file.setdefault(file, []).append(number)
        for file, numbers in sorted(by_file.items()):
            yield from self._noting(_trajectories(file, sorted(numbers)), None if note is None else once)

    def find(self, key: str) -> Trajectory | None:
        """The fullest relaxation of this key; None: there is none."""
        found = [one for file in self.files() for one in _trajectories_of(file, key)]
        return max(found, key=lambda one: (one.outcome == Outcome.CONVERGED, len(one)), default=None)


_DATABASES: dict[Path, RelaxationDatabase] = {}


class Recording:
    """One relaxation that is being written, point by point, in a fraction of a millisecond each."""

    def __init__(self, database: RelaxationDatabase, start: RelaxationStart) -> None:
        self.database = database
        self.start = start
        self._id: int | None = None
        self._process = 0
        self._numbers: dict[int, int] = {}  # by the caller's number of a point: its number in the database

    def point(self, number: int, point: EvaluatedPoint) -> None:
        """The caller's point `number`; `point.base` counts as the caller does."""
        if not point.is_finite:
            return
        if self._process != os.getpid():
            self._process = os.getpid()
            self._id = None
            self._numbers = {}
        base = None if point.base is None else self._numbers.get(point.base, -1)
        own_number = len(self._numbers)
        self._numbers[number] = own_number
        self._id = self.database.write_or_warn(lambda writer: self._written(writer, own_number, base, point))

    def _written(self, writer: sqlite3.Connection, number: int, base: int | None, point: EvaluatedPoint) -> int:
        known = _insert_start(writer, self.start, Outcome.RUNNING) if self._id is None else self._id
        writer.execute(NEW_POINT, (known, number, base, *_point_values(point)))
        return known

    def end(self, outcome: int) -> None:
        """How it stands; more points may follow, and another end."""
        if self._id is not None and self._process == os.getpid():
            row = (int(outcome), self._id)
            self.database.write_or_warn(
                lambda writer: writer.execute("UPDATE relaxations SET outcome = ? WHERE id = ?", row)
            )


def key_of(start: Mapping[str, Any]) -> str:
    """Of a relaxation: what it began with, as arrays and plain values by name. The same start is the same key."""
    hasher = hashlib.sha256()
    for name in sorted(start):
        value = start[name]
        if isinstance(value, np.ndarray):
            hasher.update(name.encode() + (np.ascontiguousarray(value, dtype=np.float64) + 0.0).tobytes())
        else:
            hasher.update(f"{name} {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    return hasher.hexdigest()[:24]


def _refuse_old(path: Path) -> None:
    if (path / OLD_MANIFEST).exists():
        raise FileError(
            f"{path} was written by relaxion 0.2; convert it once: python tools/convert_0_2.py {path} NEW_FOLDER"
        )


# ---- rows


def _insert_start(writer: sqlite3.Connection, start: RelaxationStart, outcome: int) -> int:
    numbers = np.asarray(start.numbers)
    row = (
        start.key,
        start.kind,
        json.dumps(dict(start.calculator), sort_keys=True),
        start.policy,
        float(start.fmax),
        bool(start.cell_free),
        Symbols(numbers).get_chemical_formula(),
        len(numbers),
        int(outcome),
        numbers.astype("<u1").tobytes(),
        np.asarray(start.pbc, "<u1").tobytes(),
        np.asarray(start.movable, "<u1").tobytes(),
        _bytes(start.cell),
    )
    number = writer.execute(NEW_RELAXATION, row).lastrowid
    assert number is not None
    return number


def _point_values(point: EvaluatedPoint) -> tuple[Any, ...]:
    stress = point.stress
    if stress is not None and np.shape(stress) == (6,):
        stress = voigt_6_to_full_3x3_stress(stress)
    optional = [None if array is None else _bytes(array) for array in (stress, point.cell)]
    return (float(point.energy), _bytes(point.positions), _bytes(point.forces), *optional)


def trajectory_rows(number: int, trajectory: Trajectory) -> Iterator[tuple[Any, ...]]:
    """Rows of `points` for the relaxation with this id."""
    for step in range(len(trajectory)):
        point = EvaluatedPoint(
            base=None if trajectory.bases is None else int(trajectory.bases[step]),
            energy=float(trajectory.energies[step]),
            positions=trajectory.positions[step].numpy(),
            forces=trajectory.forces[step].numpy(),
            stress=trajectory.stresses[step].numpy(),
            cell=trajectory.cells[step].numpy(),
        )
        yield number, step, point.base, *_point_values(point)


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array, dtype="<f8").tobytes()


def _fullness(file: Path) -> Iterator[tuple[int, str, tuple[bool, int]]]:
    """An interrupted relaxation that was made again is there twice: once in part, once whole."""
    with reading(file) as connection:
        for number, key, outcome, n_steps in connection.execute(FULLNESS):
            if n_steps:
                yield number, str(key), (outcome == Outcome.CONVERGED, n_steps)


def _calculator(file: Path, text: Any) -> dict[str, Any]:
    try:
        found = decoded(text)
    except (TypeError, ValueError) as error:
        raise FileError(f"{file} is damaged (a calculator is not JSON)") from error
    found = found if isinstance(found, dict) else {}
    return {"name": "unknown", **found}


def _trajectories(file: Path, numbers: Sequence[int]) -> Iterator[Trajectory]:
    with reading(file) as connection:
        for number in numbers:
            yield _trajectory(file, connection, number)


def _trajectories_of(file: Path, key: str) -> Iterator[Trajectory]:
    with ExitStack() as opened:
        connection = opened.enter_context(reading(file))
        rows = connection.execute("SELECT id FROM relaxations WHERE key = ?", (key,)).fetchall()
        for (number,) in rows:
            if connection.execute("SELECT 1 FROM points WHERE relaxation = ? LIMIT 1", (number,)).fetchone():
                yield _trajectory(file, connection, number)


def _trajectory(file: Path, connection: sqlite3.Connection, number: int) -> Trajectory:
    """FileError where blobs are not what the tables promise."""
    row = connection.execute(RELAXATION, (number,)).fetchone()
    points = connection.execute(POINTS, (number,)).fetchall()
    try:
        return _from_rows(_calculator(file, row[2]), row, points)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:  # torch raises RuntimeError
        raise FileError(f"{file} is damaged (relaxation {number}: {str(error)[:200]})") from error


def _from_rows(calculator: dict[str, Any], row: tuple[Any, ...], points: Sequence[tuple[Any, ...]]) -> Trajectory:
    key, kind, _, policy, fmax, cell_free, outcome, n_atoms, numbers, pbc, movable, cell = row
    bases, energies, positions, forces, stresses, cells = zip(*points, strict=True)
    moving = np.frombuffer(movable, "<u1").astype(bool)
    if len(moving) != n_atoms or len(numbers) != n_atoms or len(pbc) != 3:
        raise ValueError("its arrays do not fit its number of atoms")
    found = Trajectory(
        key=str(key),
        kind=str(kind),
        engine=str(calculator["name"]),
        outcome=int(outcome),
        cell_free=bool(cell_free),
        numbers=torch.from_numpy(np.frombuffer(numbers, "<u1").astype(np.int64)),
        pbc=torch.from_numpy(np.frombuffer(pbc, "<u1").astype(bool)),
        movable=torch.from_numpy(moving),
        cells=_stacked([cell if own is None else own for own in cells], (3, 3)),
        positions=_stacked(positions, (n_atoms, 3)),
        energies=torch.tensor(energies, dtype=torch.float64),
        forces=_stacked(forces, (n_atoms, 3)),
        stresses=_stacked([bytes(72) if own is None else own for own in stresses], (3, 3)),
        bases=None if None in bases else torch.tensor(bases, dtype=torch.int64),
        calculator=calculator,
        policy=str(policy),
        fmax=float(fmax),
    )
    return found.with_outcome_of_forces()


def _stacked(blobs: Sequence[bytes], shape: tuple[int, int]) -> torch.Tensor:
    content = np.frombuffer(b"".join(blobs), "<f8")
    return torch.from_numpy(content.reshape(len(blobs), *shape).copy())
