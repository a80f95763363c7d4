"""Files: tensors with a JSON header, small texts, SQLite. Written in one go, checked when read, never executed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import sqlite3
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from relaxion.errors import FileError, RelaxionError

LARGEST_TOML = 1 << 15  # characters; the settings of a run have about 3000


@dataclass(frozen=True)
class Stored:
    """What a file holds: tensors by dotted name, and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors called `name.…`, without that prefix."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}


def joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of all parts under dotted names; the opposite of `Stored.part`."""
    return {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}


Upgrade: TypeAlias = Callable[[Stored], Stored]
"""From what a file of one format version holds to what the next version would hold."""


@dataclass(frozen=True)
class Format:
    """What a family of files agrees on: its version, how old ones are understood, how trouble is called."""

    version: int
    error: type[RelaxionError]
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)  # by the version that is left behind
    advice: str = "use an older copy"  # when a file is damaged

    def write(self, path: Path, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write beside, force to disk, move into place: whoever is killed meanwhile leaves the old file whole."""
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(values)
        header = {
            "relaxion_kind": kind,
            "relaxion_format_version": str(self.version),
            "relaxion_digest": _digest_of_all(own, kind, text),
            "relaxion_values": text,
        }
        try:
            # To bytes first: safetensors' own way to a file leaves others with names of chance when it is killed.
            # Tensors that share memory are refused by safetensors; a copy of the few that do costs nothing.
            replace_file(path, save(_unshared(own), metadata=header))
        except (SafetensorError, OSError) as error:
            raise self.error(f"{path} cannot be written ({error}); does its folder exist, is the disk full?") from error

    def read(self, path: Path, *kinds: str) -> Stored:
        """Read a file of one of these kinds, or say in one sentence why it is not one."""
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                version = self._checked_version(path, header, kinds)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except FileNotFoundError as error:
            raise self.error(f"{path} does not exist") from error
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:  # safetensors has all of them
            raise self.error(f"{path} is damaged or not a safetensors file ({error}); {self.advice}") from error
        kind = header["relaxion_kind"]
        text = header.get("relaxion_values", "")
        if _digest_of_all(tensors, kind, text) != header.get("relaxion_digest"):
            raise self.error(f"{path} is damaged: its numbers do not match their digest; {self.advice}")
        try:
            values = decoded(text)
        except ValueError as error:
            raise self.error(f"{path} is damaged: its header cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise self.error(f"{path} is damaged: its header holds a {type(values).__name__} in place of named values")
        stored = Stored(tensors, values)
        for old in range(version, self.version):
            stored = self.upgrades[old](stored)
        return stored

    def _checked_version(self, path: Path, header: Mapping[str, str], kinds: tuple[str, ...]) -> int:
        kind = header.get("relaxion_kind")
        if kind is None:
            raise self.error(f"{path} was not written by relaxion")
        if kind not in kinds:
            raise self.error(f"{path} holds a {kind[:80]}, not a {' or '.join(kinds)}")
        word = header.get("relaxion_format_version", "")
        version = int(word) if word.isdecimal() and len(word) < 10 else 0
        if version > self.version or not all(old in self.upgrades for old in range(version, self.version)):
            newer = "update relaxion" if version > self.version else "read it with the relaxion that wrote it"
            raise self.error(f"{path} has format version {word[:20]}, this relaxion reads {self.version}; {newer}")
        return version


def check_regular(path: Path) -> None:
    """An OSError where this is no file: a pipe would be waited for, a device never ends."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is neither a file nor a folder", str(path))


def text_of(path: Path) -> str:
    """A small file as text; OSError or ValueError where there is none."""
    check_regular(path)
    return path.read_text(encoding="utf-8")


def decoded(text: str) -> Any:
    """JSON; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_of(path: Path) -> Any:
    """A small file of JSON; OSError or ValueError where there is none."""
    return decoded(text_of(path))


def toml_of(path: Path) -> dict[str, Any]:
    """A small file of TOML; OSError or ValueError where there is none."""
    text = text_of(path)
    if len(text) > LARGEST_TOML:  # a key of many parts takes time with its square
        raise ValueError(f"it has {len(text)} characters, more than any recipe; {LARGEST_TOML} are read")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def open_lock(path: Path) -> IO[str]:
    """To read and write, made where it is missing; an OSError for a link, which leads to somebody else's file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return os.fdopen(descriptor, "a+")
    except OSError:
        os.close(descriptor)
        raise


def exclusive(path: Path) -> IO[str]:
    """A lock file that one process has at a time, open; it is free again when it is closed, or its process ends.

    BlockingIOError where another process has it, another OSError where it cannot be made.
    """
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def part_of(path: Path) -> Path:
    """What a file is called while it is written; one name, so that what a kill leaves is overwritten by the next."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def replacing(path: Path, mode: str = "xb", **options: Any) -> Iterator[IO[Any]]:
    """To be written to; takes the place of `path` in one go.

    Whoever reads or is killed meanwhile sees the old file or the new one. Leaves nothing on failure.
    """
    beside = part_of(path)
    try:
        beside.unlink(missing_ok=True)  # were it a link, we would write where it leads
        with beside.open(mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    _force_to_disk(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """In one go, as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """In one go: whoever reads or is killed meanwhile sees the old file or the new one."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise FileError(f"{path} cannot be written ({error}); does its folder exist, is the disk full?") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Numbers that are not finite become words ("nan", "inf"): JSON has none for them."""
    write_text(path, json.dumps(_with_words(values), indent=2, allow_nan=False) + "\n")


def _with_words(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {name: _with_words(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_with_words(inner) for inner in value]
    return value


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, kinds, shapes and bytes of tensors, independent of their order."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # NumPy lacks some kinds of numbers
    return hasher.hexdigest()


def _digest_of_all(tensors: Mapping[str, Tensor], kind: str, text: str) -> str:
    return hashlib.sha256(f"{digest(tensors)}\n{kind}\n{text}".encode()).hexdigest()


def kind_of(path: Path) -> str | None:
    """What the header says, unread otherwise; None when it is no file of ours."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("relaxion_kind")
    except (SafetensorError, OSError, ValueError, TypeError, KeyError):
        return None


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result


def _force_to_disk(path: Path) -> None:
    """Return when the file (or the names in a folder) would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- SQLite files: opened by many processes at once, safe against kills, with a sentence for every way to fail.

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
