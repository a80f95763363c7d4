"""The whole of a folder as a table (SQLite, CSV) and as one file of structures, from shards, listing and `failed/`."""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from relaxion.apps.relax_many.folder import failures, inputs_are_listed, listing, read_manifest, results
from relaxion.apps.relax_many.frames import sealed
from relaxion.errors import FileError
from relaxion.files import part_of, replacing
from relaxion.settings import shown

SEAL = re.compile(r" relaxion_sha256=d[0-9a-f]{16}$")
SQLITE, CSV = "summary.sqlite", "summary.csv"
TABLES = """
CREATE TABLE results (
    key TEXT PRIMARY KEY, outcome TEXT, force_calls INTEGER, energy_ev REAL, enthalpy_ev REAL,
    fmax_ev_per_angstrom REAL, policy TEXT, fallback_used INTEGER, seconds REAL, shard TEXT, offset INTEGER,
    length INTEGER, reason TEXT);
CREATE TABLE inputs (
    place INTEGER PRIMARY KEY, file TEXT, structure INTEGER, key TEXT, formula TEXT, n_atoms INTEGER, id TEXT,
    info TEXT);
CREATE INDEX inputs_by_key ON inputs (key);
CREATE VIEW summary AS
    SELECT place, file, structure, id, formula, n_atoms, coalesce(outcome, 'waiting') AS outcome, force_calls,
        energy_ev, coalesce(enthalpy_ev, energy_ev) AS enthalpy_ev, fmax_ev_per_angstrom, policy, fallback_used,
        seconds, key, shard, reason, info
    FROM inputs LEFT JOIN results USING (key) ORDER BY place;
"""
FACTS = ("outcome", "force_calls", "energy_ev", "enthalpy_ev", "fmax", "policy", "fallback_used", "seconds")
RESULT = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
IDS = ("id", "material_id", "structure_id", "uid", "name", "label")  # in `atoms.info`; the first of them is the id


@dataclass(frozen=True)
class Counts:
    """What a folder holds."""

    places: int  # structures in the input, as far as it was read
    input_read: bool  # to its end; else there are more
    structures: int  # different ones
    relaxed: int  # results in shards that belong to the input
    converged: int
    failed: int
    waiting: int  # different structures without a result

    @property
    def doubles(self) -> int:
        return self.places - self.structures


def make_summary(path: Path) -> Counts:
    """Write both tables anew, each in one go; what they say in numbers."""
    beside = part_of(path / SQLITE)
    try:
        beside.unlink(missing_ok=True)
        with closing(_built(path, beside)) as connection:
            counts = _counted(path, connection)
            with replacing(path / CSV, "x", newline="", encoding="utf-8") as file:
                rows = connection.execute("SELECT * FROM summary")
                writer = csv.writer(file)
                writer.writerow(column[0] for column in rows.description)
                writer.writerows(rows)
        beside.replace(path / SQLITE)
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise FileError(
            f"the summary in {path} cannot be written ({error}); the results themselves are saved"
        ) from error
    return counts


def read_counts(path: Path) -> Counts:
    """The same numbers without writing anything, also while a run goes on."""
    with closing(_index_of(path)) as connection:
        return _counted(path, connection)


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


def read_rows(path: Path) -> list[Row]:
    """Of every structure of the input, in its order, as far as it was read."""
    question = f"SELECT {', '.join(field.name for field in fields(Row))} FROM summary"
    with closing(_index_of(path)) as connection:
        return [_row(values) for values in connection.execute(question)]


def _row(values: Sequence[Any]) -> Row:
    """Whatever a damaged file brings in place of a number is none."""
    plain = dict(zip((field.name for field in fields(Row)), values, strict=True))
    for name in ("n_atoms", "force_calls", "energy_ev", "enthalpy_ev", "fmax_ev_per_angstrom", "seconds"):
        if not isinstance(plain[name], int | float) or not math.isfinite(plain[name]):
            plain[name] = None
    return Row(**plain)


def read_force_calls(path: Path) -> list[int]:
    """Of everything that was relaxed, in the order of the input."""
    question = "SELECT force_calls FROM inputs JOIN results USING (key) WHERE shard IS NOT NULL ORDER BY place"
    with closing(_index_of(path)) as connection:
        return [calls for (calls,) in connection.execute(question) if isinstance(calls, int)]


def _built(path: Path, database: Path | str) -> sqlite3.Connection:
    """All that is known now."""
    connection = sqlite3.connect(database)
    connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + TABLES)
    connection.executemany(RESULT, _result_rows(path))
    connection.executemany("INSERT INTO inputs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", _input_rows(path))
    connection.commit()
    return connection


def _index_of(path: Path) -> sqlite3.Connection:
    """Everything, to be read in the order of the input; in SQLite's own temporary file, gone when it is closed."""
    try:
        return _built(path, "")
    except (OSError, sqlite3.Error) as error:
        raise FileError(f"{path} cannot be read ({error})") from error


def _result_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    for frame in results(path):
        yield (frame.key, *_values(frame.facts, FACTS), frame.shard.name, frame.offset, frame.length, None)
    for reason in failures(path):
        why = str(_storable(reason.get("reason")) or "not written down")
        yield (reason["key"], *_values(reason, FACTS), None, None, None, why)


def _values(facts: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    return [_storable(facts.get(name)) for name in names]


def _storable(value: Any) -> Any:
    """What SQLite takes; whatever else a damaged file brings becomes words."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return shown(value)


def _input_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    for number, file in enumerate(read_manifest(path)["files"], start=1):
        for line in listing(path, number):
            info = line.get("info")
            info = info if isinstance(info, dict) else {}
            name = next((info[word] for word in IDS if word in info), None)
            words = json.dumps(info, ensure_ascii=False) if info else None
            yield file, *_values(line, ("index", "key", "formula", "n_atoms")), _storable(name), _storable(words)


def _counted(path: Path, connection: sqlite3.Connection) -> Counts:
    """What the tables say."""
    question = """
        SELECT (SELECT count(*) FROM inputs), count(*), count(shard), count(*) FILTER (WHERE outcome = 'converged'),
            count(reason), count(*) FILTER (WHERE outcome IS NULL)
        FROM (SELECT DISTINCT key FROM inputs) LEFT JOIN results USING (key)
    """
    places, *others = connection.execute(question).fetchone()
    return Counts(places, inputs_are_listed(path), *others)


@dataclass(frozen=True)
class Merged:
    """What came of it."""

    written: int
    failed: int  # structures that have no result, only a reason
    waiting: int  # structures not relaxed yet


def merge(path: Path, out: Path, *, force: bool) -> Merged:
    """One frame per structure of the input that was relaxed, doubles as often as they are there; in one go.

    Each frame says where its structure came from: `relaxion_input="file#index"`.
    """
    if out.exists() and not force:
        raise FileError(f"{out} exists; `force=True` replaces it, or choose another name")
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: results are merged as extended XYZ; choose a name that ends with .extxyz")
    try:
        with closing(_index_of(path)) as index, replacing(out, "x", encoding="utf-8") as file:
            return _write(path, index, file)
    except OSError as error:
        raise FileError(f"{out} cannot be written ({error.strerror})") from error


def _write(path: Path, index: sqlite3.Connection, file: IO[str]) -> Merged:
    written = failed = waiting = 0
    rows = index.execute(
        "SELECT file, structure, shard, offset, length, reason FROM inputs LEFT JOIN results USING (key) ORDER BY place"
    )
    open_shards: dict[str, IO[bytes]] = {}
    with ExitStack() as opened:
        for source, structure, shard, offset, length, reason in rows:
            if shard is None:
                failed, waiting = failed + (reason is not None), waiting + (reason is None)
                continue
            if shard not in open_shards:
                open_shards[shard] = opened.enter_context((path / "shards" / shard).open("rb"))
            open_shards[shard].seek(offset)
            file.write(_labelled(open_shards[shard].read(length).decode(), f"{source}#{structure}"))
            written += 1
    return Merged(written, failed, waiting)


def _labelled(frame: str, source: str) -> str:
    first, second, rest = frame.split("\n", 2)
    plain = source.replace("\n", " ").encode("utf-8", "replace").decode()
    quoted = plain.replace("\\", "\\\\").replace('"', '\\"')
    return sealed(f'{first}\n{SEAL.sub("", second)} relaxion_input="{quoted}"\n{rest}')
