"""SQLite files: opened by many processes at once, safe against kills, with a sentence for every way to fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relaxion.errors import FileError
from relaxion.files import check_regular

SECONDS_TO_WAIT = 60.0  # for another writer; a write takes a fraction of a millisecond
LARGEST_VALUE = 1 << 28  # bytes of one value in a file that somebody else may have written


def open_for_writing(file: Path, tables: str) -> sqlite3.Connection:
    """A connection that writes each statement at once; sqlite3.Error or OSError where the disk refuses.

    A kill loses nothing: what was written is in the file or in its write-ahead log. A power cut may cost the last
    seconds, never the file.
    """
    if file.exists() or file.is_symlink():
        check_own(file)
    connection = sqlite3.connect(file, timeout=SECONDS_TO_WAIT, isolation_level=None, check_same_thread=False)
    _protect(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    with transaction(connection):
        # not executescript, which would end the transaction: two processes may create the tables at the same time
        for statement in filter(str.strip, tables.split(";")):
            connection.execute(statement)
    return connection


@contextmanager
def reading(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, also while others write; FileError where the file is damaged."""
    try:
        check_own(file)
        connection = _read_only(file)
    except (sqlite3.Error, OSError) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    try:
        yield connection
    except sqlite3.Error as error:
        raise FileError(f"{file} is damaged ({error}); what other files hold is not affected") from error
    finally:
        connection.close()


def check_own(file: Path) -> None:
    """An OSError for links, pipes and folders: they would lead somewhere else, or nowhere."""
    if file.is_symlink():
        raise OSError(f"{file} is a link")
    check_regular(file)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements inside, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _read_only(file: Path) -> sqlite3.Connection:
    place = f"{file.absolute().as_uri()}?mode=ro"
    log = file.with_name(f"{file.name}-wal")
    connection = sqlite3.connect(place, uri=True, timeout=SECONDS_TO_WAIT)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if log.exists():
            raise
        # on a disk that cannot be written SQLite cannot make its shared memory, and needs none either
        connection = sqlite3.connect(f"{place}&immutable=1", uri=True)
    _protect(connection)
    return connection


def _protect(connection: sqlite3.Connection) -> None:
    """A file of somebody else may hold triggers and views; they get no functions and no endless values."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
