"""The folder of results of `relax-many`: a manifest, a lock and one SQLite file that needs no Relaxion to be read.

    relaxion-many.json   the manifest: format, settings, input files
    results.sqlite       files    number, path, complete (1: read to its end)
                         inputs   file, place, structure (its number in the file), key, formula, n_atoms, id, info
                         results  key, outcome, ..., structure (a frame of extended XYZ), reason (why it was set
                                  aside), input and last (frames of a structure that was set aside)
                         summary  a view: one row for each structure of the input, "waiting" without a result
    progress.json        how far the run was, for `relaxion status`
    summary.csv          the view as a table, written at the end of a run

Only the driver writes, in transactions: a kill leaves whole results. A key has one result.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

import ase.io
import numpy as np
from ase import Atoms

from relaxion import __version__
from relaxion.apps.relax_many.settings import ManySettings, check_same
from relaxion.errors import FileError
from relaxion.files import (
    check_regular,
    exclusive,
    json_of,
    open_for_writing,
    reading,
    replace_file,
    replacing,
    transaction,
)
from relaxion.settings import shown

MANIFEST = "relaxion-many.json"
FORMAT = "relaxion-many"
VERSION = 2  # 1: shards of extended XYZ, relaxion 0.2
DATABASE = "results.sqlite"
PROGRESS = "progress.json"
CSV = "summary.csv"
KEY = re.compile(r"s[0-9a-f]{32}")
PREFIX = "relaxion_"  # of facts in the second line of a frame
IDS = ("id", "material_id", "structure_id", "uid", "name", "label")  # in `atoms.info`; the first of them is the id
FULL = re.compile("full|no space|disk I/O|too large", re.IGNORECASE)  # what SQLite and the system call a full disk
TABLES = """
CREATE TABLE IF NOT EXISTS files (number INTEGER PRIMARY KEY, path TEXT, complete INTEGER);
CREATE TABLE IF NOT EXISTS inputs (
    file INTEGER, place INTEGER, structure INTEGER, key TEXT, formula TEXT, n_atoms INTEGER, id TEXT, info TEXT,
    PRIMARY KEY (file, place));
CREATE INDEX IF NOT EXISTS inputs_by_key ON inputs (key);
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY, outcome TEXT, force_calls INTEGER, energy_ev REAL, enthalpy_ev REAL,
    fmax_ev_per_angstrom REAL, policy TEXT, fallback_used INTEGER, seconds REAL, structure TEXT, reason TEXT,
    input TEXT, last TEXT);
CREATE VIEW IF NOT EXISTS summary AS
    SELECT row_number() OVER (ORDER BY inputs.file, place) AS place, path AS file, inputs.structure, id, formula,
        n_atoms, coalesce(outcome, 'waiting') AS outcome, force_calls, energy_ev,
        coalesce(enthalpy_ev, energy_ev) AS enthalpy_ev, fmax_ev_per_angstrom, policy, fallback_used, seconds,
        inputs.key, reason, info
    FROM inputs JOIN files ON files.number = inputs.file LEFT JOIN results ON results.key = inputs.key
    ORDER BY inputs.file, place
"""
FACTS = ("outcome", "force_calls", "energy_ev", "enthalpy_ev", "fmax", "policy", "fallback_used", "seconds")
NEW_RESULT = f"INSERT OR IGNORE INTO results VALUES ({', '.join('?' * 13)})"
NEW_INPUT = f"INSERT OR REPLACE INTO inputs VALUES ({', '.join('?' * 8)})"
MOST_INPUTS_KEPT = 200  # rows of inputs that wait to be written together


# ---- frames: results as extended XYZ, which ASE, OVITO and others read


def written(atoms: Atoms, facts: Mapping[str, Any]) -> str:
    """The frame of a relaxed structure.

    facts: plain values; they go into the second line as `relaxion_NAME=VALUE`, those that are None do not.
    """
    image = atoms.copy()
    image.calc = atoms.calc
    own = {name: value for name, value in plain_info(atoms).items() if not name.startswith(PREFIX)}
    image.info = {name: value for name, value in own.items() if len(str(value)) < 1000 and "\n" not in str(value)}
    image.info |= {PREFIX + name: value for name, value in facts.items() if value is not None}
    text = io.StringIO()
    ase.io.write(text, image, format="extxyz")
    return text.getvalue()


def plain_info(atoms: Atoms) -> dict[str, Any]:
    """The texts, numbers and booleans of `atoms.info`, such as a name; numbers of NumPy as Python's."""
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in atoms.info.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, bool | int | float | str)
    }


# ---- the folder, as the driver writes it


def read_manifest(path: Path) -> dict[str, Any]:
    """Of a folder of results; FileError where it is none."""
    try:
        plain = json_of(path / MANIFEST)
    except FileNotFoundError as error:
        raise FileError(
            f"{path} holds no results of 'relaxion relax-many' (no {MANIFEST}); name the folder of such results"
        ) from error
    except (OSError, ValueError) as error:
        raise FileError(f"{path / MANIFEST} cannot be read ({error}); choose another folder") from error
    files = plain.get("files") if isinstance(plain, dict) and plain.get("format") == FORMAT else None
    if not isinstance(files, list) or not all(isinstance(file, str) and "\0" not in file for file in files):
        raise FileError(f"{path / MANIFEST} is not a manifest of 'relaxion relax-many'; choose another folder")
    if plain.get("version") != VERSION:
        raise FileError(
            f"{path} has format version {shown(plain.get('version'))}, this relaxion reads {VERSION}; "
            f"folders of relaxion 0.2 are converted by: python tools/convert_0_2.py {path} NEW_FOLDER"
        )
    if not isinstance(plain.get("settings"), dict):
        raise FileError(f"{path / MANIFEST} has no settings; choose another folder")
    return plain


def is_locked(path: Path) -> int | None:
    """The process that works in the folder now; None: there is none."""
    try:
        check_regular(path / "lock")
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(OSError, ValueError):
            return int((path / "lock").read_text()[:20] or 0)
        return 0
    except OSError:  # none, or something else of that name
        return None
    return None


class ResultFolder:
    """Held open by one driver at a time."""

    def __init__(self, path: Path, settings: ManySettings, files: Sequence[Path]) -> None:
        """Begin it, or continue in it; SettingsError where it was begun with other settings.

        path: the folder; it is created.
        settings: all that decides a result.
        files: input files of this run; those of earlier runs stay listed.
        """
        self.path = path
        self.done: set[bytes] = set()  # keys with a result, and those set aside
        self._waiting: list[tuple[Any, ...]] = []  # rows of inputs
        self._lock = self._locked()
        try:
            self._begin(settings, [str(file.absolute()) for file in files])
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(FileError):
            self._write_inputs()
        self._database.close()
        self._lock.close()

    def _locked(self) -> IO[str]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = exclusive(self.path / "lock")
        except BlockingIOError as error:
            raise FileError(
                f"another relax-many uses {self.path} (process {is_locked(self.path)}); wait, or choose another folder"
            ) from error
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}; name a folder that can be written") from error
        lock.truncate(0)
        with suppress(OSError):  # of a full disk: the lock holds all the same
            lock.write(str(os.getpid()))
            lock.flush()
        return lock

    def _begin(self, settings: ManySettings, files: list[str]) -> None:
        known = self._known_files(settings)
        self.files = [*known, *(file for file in files if file not in known)]
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "relaxion": __version__,
            "settings": settings.model_dump(),
            "files": self.files,
        }
        self._replace(self.path / MANIFEST, plain)
        with self._writing():
            self._database = open_for_writing(self.path / DATABASE, TABLES)
            rows = [(number, _storable(file), 0) for number, file in enumerate(self.files, start=1)]
            self._database.executemany("INSERT OR IGNORE INTO files VALUES (?, ?, ?)", rows)
            keys = self._database.execute("SELECT key FROM results")
            self.done = {bytes.fromhex(key[1:]) for (key,) in keys if KEY.fullmatch(str(key))}

    def _known_files(self, settings: ManySettings) -> list[str]:
        if not (self.path / MANIFEST).exists():
            return []
        plain = read_manifest(self.path)
        check_same(ManySettings.read(plain["settings"]), settings, self.path)
        return [str(file) for file in plain["files"]]

    def has(self, key: str) -> bool:
        """Whether the key has a result or was set aside."""
        return bytes.fromhex(key[1:]) in self.done

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Results with their facts and frame. All of them are there afterwards, or none and a FileError."""
        new = {str(record["key"]): record for record in records if not self.has(record["key"])}
        rows = [(key, *_values(record), record["frame"], None, None, None) for key, record in new.items()]
        self._insert(rows)

    def set_aside(self, key: str, reason: str, facts: Mapping[str, Any], frames: Mapping[str, str]) -> None:
        """A structure without a result.

        reason: a sentence.
        facts: as far as they are known.
        frames: the structure as it came ("input") and as it was last ("last"), if they can be written.
        """
        if not self.has(key):
            known = _values({"outcome": "error", **facts})
            self._insert([(key, *known, None, _storable(reason), frames.get("input"), frames.get("last"))])

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if not rows:
            return
        self._write_inputs()  # first: a result belongs to a structure of the input
        with self._writing(), transaction(self._database):
            self._database.executemany(NEW_RESULT, rows)
        self.done.update(bytes.fromhex(row[0][1:]) for row in rows)

    def forget_failures(self) -> int:
        """So that they are tried once more; how many there were."""
        with self._writing(), transaction(self._database):
            rows = self._database.execute("DELETE FROM results WHERE reason IS NOT NULL RETURNING key").fetchall()
        self.done.difference_update(bytes.fromhex(key[1:]) for (key,) in rows if KEY.fullmatch(str(key)))
        return len(rows)

    def list_input(self, file: Path, place: int, structure: int, key: str, atoms: Atoms | None) -> None:
        """One structure of an input file.

        place: its number among those of this run.
        structure: its number in the file.
        """
        known: dict[str, Any] = {"index": structure, "key": key}
        if atoms is not None:
            known |= {"formula": atoms.get_chemical_formula(), "n_atoms": len(atoms), "info": plain_info(atoms)}
        self.list_known_input(file, place, known)

    def list_known_input(self, file: Path, place: int, known: Mapping[str, Any]) -> None:
        """The same, from index, key, formula, n_atoms and info."""
        info = known.get("info") or {}
        name = next((info[word] for word in IDS if word in info), None)
        text = json.dumps(info, ensure_ascii=False) if info else None
        values = [_storable(known.get(word)) for word in ("index", "key", "formula", "n_atoms")]
        self._waiting.append((self._number(file), place, *values, _storable(name), _storable(text)))
        if len(self._waiting) >= MOST_INPUTS_KEPT:
            self._write_inputs()

    def end_of_input(self, file: Path, n_places: int) -> None:
        """The file was read to its end: what an earlier, longer version of it held is gone."""
        self._write_inputs()
        with self._writing(), transaction(self._database):
            number = self._number(file)
            self._database.execute("DELETE FROM inputs WHERE file = ? AND place >= ?", (number, n_places))
            self._database.execute("UPDATE files SET complete = 1 WHERE number = ?", (number,))

    def _number(self, file: Path) -> int:
        return self.files.index(str(file.absolute())) + 1

    def _write_inputs(self) -> None:
        rows = self._waiting
        self._waiting = []
        if rows:
            with self._writing(), transaction(self._database):
                self._database.executemany(NEW_INPUT, rows)

    def write_progress(self, plain: Mapping[str, Any]) -> None:
        """How far the run is, for `relaxion status`; a run does not end because this cannot be written."""
        self._write_inputs()
        with suppress(FileError):
            self._replace(self.path / PROGRESS, plain)

    def _replace(self, path: Path, plain: Mapping[str, Any]) -> None:
        with self._writing():
            replace_file(path, (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A FileError where the disk refuses."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if FULL.search(str(error)):
                raise FileError(
                    f"no space left in {self.path} ({error}); all results so far are saved: free some "
                    "space and run the same command again to continue"
                ) from error
            raise FileError(f"{self.path} cannot be written ({error}); all results so far are saved") from error


def _values(facts: Mapping[str, Any]) -> list[Any]:
    return [_storable(facts.get(name)) for name in FACTS]


def _storable(value: Any) -> Any:
    """What SQLite takes; anything else becomes text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return shown(value)


# ---- the folder, as anybody reads it, also while a run goes on


@dataclass(frozen=True)
class Counts:
    """What a folder holds."""

    places: int  # structures in the input, as far as it was read
    input_read: bool  # to its end; else there are more
    structures: int  # different ones
    relaxed: int  # results that belong to the input
    converged: int
    failed: int
    waiting: int  # different structures without a result

    @property
    def doubles(self) -> int:
        return self.places - self.structures


@dataclass(frozen=True)
class Row:
    """One structure of the input, and what became of it; None where there is no result, or no number in it."""

    file: str
    structure: int
    id: str | None
    formula: str | None
    n_atoms: int | None
    outcome: str  # or "waiting"
    force_calls: int | None
    energy_ev: float | None
    enthalpy_ev: float | None
    fmax_ev_per_angstrom: float | None
    policy: str | None
    seconds: float | None
    reason: str | None  # why it was set aside


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    read_manifest(path)
    with reading(path / DATABASE) as connection:
        yield connection


def results(path: Path) -> list[dict[str, Any]]:
    """Every result with its frame, in the order they came."""
    with _opened(path) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM results WHERE structure IS NOT NULL ORDER BY rowid")
        return [dict(row) for row in rows]


def failures(path: Path) -> list[dict[str, Any]]:
    """Every structure that was set aside, with the reason."""
    with _opened(path) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM results WHERE reason IS NOT NULL ORDER BY key")]


def read_counts(path: Path) -> Counts:
    """How the folder stands."""
    question = """
        SELECT (SELECT count(*) FROM inputs), (SELECT min(complete) FROM files), count(*), count(structure),
            count(*) FILTER (WHERE outcome = 'converged'), count(reason), count(*) FILTER (WHERE outcome IS NULL)
        FROM (SELECT DISTINCT key FROM inputs) LEFT JOIN results USING (key)
    """
    with _opened(path) as connection:
        places, complete, *others = connection.execute(question).fetchone()
    return Counts(places, bool(complete), *others)


def read_rows(path: Path) -> list[Row]:
    """Of every structure of the input, in its order, as far as it was read; damaged numbers are None."""
    names = [field.name for field in fields(Row)]
    with _opened(path) as connection:
        rows = connection.execute(f"SELECT {', '.join(names)} FROM summary").fetchall()
    plain = [dict(zip(names, row, strict=True)) for row in rows]
    for row in plain:
        for name in ("n_atoms", "force_calls", "energy_ev", "enthalpy_ev", "fmax_ev_per_angstrom", "seconds"):
            if not isinstance(row[name], int | float) or not math.isfinite(row[name]):
                row[name] = None
    return [Row(**row) for row in plain]


def make_summary(path: Path) -> Counts:
    """Write summary.csv in one go; return what it amounts to."""
    try:
        with _opened(path) as connection, replacing(path / CSV, "x", newline="", encoding="utf-8") as file:
            rows = connection.execute("SELECT * FROM summary")
            writer = csv.writer(file)
            writer.writerow(column[0] for column in rows.description)
            writer.writerows(rows)
    except OSError as error:
        raise FileError(
            f"the summary in {path} cannot be written ({error}); the results themselves are saved"
        ) from error
    return read_counts(path)


@dataclass(frozen=True)
class Merged:
    """What `merge` wrote."""

    written: int
    failed: int  # structures that have no result, only a reason
    waiting: int  # structures not relaxed yet


def merge(path: Path, out: Path, *, force: bool) -> Merged:
    """One frame for each structure of the input that was relaxed, doubles as often as they are there; in one go.

    Each frame states where its structure came from: `relaxion_input="file#number"`.

    path: a folder of results.
    out: the file of extended XYZ.
    force: replace an earlier file.
    """
    if out.exists() and not force:
        raise FileError(f"{out} exists; `force=True` replaces it, or choose another name")
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: results are merged as extended XYZ; choose a name that ends with .extxyz")
    question = """
        SELECT path, inputs.structure, results.structure, reason
        FROM inputs JOIN files ON files.number = inputs.file LEFT JOIN results USING (key) ORDER BY file, place
    """
    written = failed = waiting = 0
    try:
        with _opened(path) as connection, replacing(out, "x", encoding="utf-8") as file:
            for source, structure, frame, reason in connection.execute(question):
                if frame is not None:
                    file.write(_labelled(frame, f"{source}#{structure}"))
                    written += 1
                elif reason is not None:
                    failed += 1
                else:
                    waiting += 1
    except OSError as error:
        raise FileError(f"{out} cannot be written ({error.strerror})") from error
    return Merged(written, failed, waiting)


def _labelled(frame: Any, source: str) -> str:
    if not isinstance(frame, str) or frame.count("\n") < 2:
        raise FileError(f"the result of {source[-200:]} is damaged: it is not a frame of extended XYZ")
    first, second, rest = frame.split("\n", 2)
    quoted = source.replace("\n", " ").replace("\\", "\\\\").replace('"', '\\"')
    return f'{first}\n{second} {PREFIX}input="{quoted}"\n{rest}'
