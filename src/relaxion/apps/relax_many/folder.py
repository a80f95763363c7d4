"""The folder of results: shards that only grow, a listing of the input, `failed/`, a manifest, a lock.

    relaxion-many.json     the manifest: format, settings, input files
    inputs/00001.jsonl     one line per structure of the first input file, in order: key, formula, ...
    shards/00001.extxyz    results, each a frame with its key and digest; only ever appended to
    failed/KEY/            what was set aside: input.extxyz, last.extxyz, reason.json
    progress.json          how far the run was, for `relaxion status`
    summary.csv, .sqlite   made at the end of a run from all of these

Whatever is here is true at every moment: a kill leaves at most one torn frame at the end of a shard, which is cut off
by the next run, and a folder or file with a leading dot, which is overwritten or ignored.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from relaxion.apps.relax_many.frames import LONGEST_LINE, ResultFrame, scan
from relaxion.apps.relax_many.settings import ManySettings, check_same
from relaxion.errors import FileError
from relaxion.files import check_regular, decoded, json_of, open_lock, part_of, replace_file
from relaxion.settings import shown
from relaxion.version import __version__

MANIFEST = "relaxion-many.json"
KEY = re.compile(r"s[0-9a-f]{32}")
SHARD_NAME = re.compile(r"[0-9]{5,9}\.extxyz")
FORMAT = "relaxion-many"
VERSION = 1
PROGRESS = "progress.json"
LARGEST_SHARD = 64 << 20  # bytes; then the next one begins
SECONDS_BETWEEN_SYNCS = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_manifest(path: Path) -> dict[str, Any]:
    """Of a folder of results; a sentence where it is none."""
    try:
        plain = json_of(path / MANIFEST)
    except FileNotFoundError as error:
        raise FileError(
            f"{path} holds no results of 'relaxion relax-many' (no {MANIFEST}); name the folder of such results"
        ) from error
    except (OSError, ValueError) as error:
        raise FileError(f"{path / MANIFEST} cannot be read ({error}); choose another folder") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT or not _is_list_of_words(plain.get("files")):
        raise FileError(f"{path / MANIFEST} is not a manifest of 'relaxion relax-many'; choose another folder")
    if plain.get("version") != VERSION:
        raise FileError(f"{path} has format version {shown(plain.get('version'))}, this relaxion reads {VERSION}")
    if not isinstance(plain.get("settings"), dict):
        raise FileError(f"{path / MANIFEST} has no settings; choose another folder")
    return plain


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) and "\0" not in word for word in value)


def shards(path: Path) -> list[Path]:
    """In the order they were written. Files only: a link would lead to what is not ours, and we cut shards."""
    found = (path / "shards").glob("[0-9]*.extxyz")
    return sorted(
        file for file in found if SHARD_NAME.fullmatch(file.name) and not file.is_symlink() and file.is_file()
    )


def results(path: Path) -> Iterator[ResultFrame]:
    """Every whole result there is, the first of each key; also while a run is going on."""
    for shard in shards(path):
        yield from (frame for frame in scan(shard) if isinstance(frame, ResultFrame))


def failures(path: Path) -> Iterator[dict[str, Any]]:
    """The reasons of what was set aside, by key."""
    for reason in sorted((path / "failed").glob("[!.]*/reason.json")):
        if KEY.fullmatch(reason.parent.name):
            with suppress(OSError, ValueError):
                plain = json_of(reason)
                yield {**(plain if isinstance(plain, dict) else {}), "key": reason.parent.name}


def listing(path: Path, number: int) -> Iterator[dict[str, Any]]:
    """The structures of one input file; of one that is still being read, what is known of it."""
    file = path / "inputs" / f"{number:05}.jsonl"
    file = file if file.exists() else part_of(file)
    if not file.is_file():
        return
    with suppress(FileNotFoundError), file.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(LONGEST_LINE):
            if line.endswith("\n") and line != "\n":
                with suppress(ValueError):
                    plain = decoded(line)
                    if isinstance(plain, dict):
                        yield plain


def inputs_are_listed(path: Path) -> bool:
    """Whether every input file was read to its end once, so that its number of structures is known."""
    numbers = range(1, len(read_manifest(path)["files"]) + 1)
    return all((path / "inputs" / f"{number:05}.jsonl").is_file() for number in numbers)


def is_locked(path: Path) -> int | None:
    """The process that works in the folder now; None: nobody."""
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


class Folder:
    """Held open by one driver at a time."""

    def __init__(self, path: Path, settings: ManySettings, files: list[Path]) -> None:
        """Begin it, or go on in it; SettingsError where it was begun with other settings."""
        self.path = path
        self.done: set[bytes] = set()  # keys with a result, and those set aside
        self.torn_bytes = 0
        self._shard: int | None = None
        self._shard_number, self._size, self._synced = 0, 0, 0.0
        self._lock = self._locked()
        try:
            self._begin(settings, [str(file.absolute()) for file in files])
            self._load()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locked(self) -> IO[str]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open_lock(self.path / "lock")
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}; name a folder that can be written") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise FileError(
                f"another relax-many uses {self.path} (process {is_locked(self.path)}); wait, or choose another folder"
            ) from error
        lock.truncate(0)
        with suppress(OSError):  # of a full disk: the lock holds all the same
            lock.write(str(os.getpid()))
            lock.flush()
        return lock

    def _begin(self, settings: ManySettings, files: list[str]) -> None:
        known = self._known_files(settings)
        self.files = [*known, *(file for file in files if file not in known)]
        with self.writing():
            for name in ("shards", "inputs", "failed"):
                (self.path / name).mkdir(exist_ok=True)
                if (self.path / name).is_symlink():
                    raise FileError(f"{self.path / name} is a link to somewhere else; choose another folder")
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "relaxion": __version__,
            "settings": settings.model_dump(),
            "files": self.files,
        }
        self._replace(self.path / MANIFEST, plain)

    def _known_files(self, settings: ManySettings) -> list[str]:
        if not (self.path / MANIFEST).exists():
            return []
        plain = read_manifest(self.path)
        check_same(ManySettings.read(plain["settings"]), settings, self.path)
        return [str(file) for file in plain["files"]]

    def _load(self) -> None:
        last = None
        for shard in shards(self.path):
            end = 0
            for frame in scan(shard):
                if not isinstance(frame, ResultFrame):
                    end = frame
                elif KEY.fullmatch(frame.key):  # what has none of our keys is none of our results
                    self._take(frame.key)
            last = shard, end
        if last is not None:
            self._shard_number = int(last[0].stem)
            self.torn_bytes = last[0].stat().st_size - last[1]
            if self.torn_bytes:
                os.truncate(last[0], last[1])
        for leftover in (self.path / "failed").glob(".*"):
            if not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
        for reason in failures(self.path):
            self._take(reason["key"])

    def _take(self, key: str) -> None:
        self.done.add(bytes.fromhex(key[1:]))

    def has(self, key: str) -> bool:
        return bytes.fromhex(key[1:]) in self.done

    def append(self, frames: Iterable[tuple[str, str]]) -> None:
        """Results (key, frame) in one write. All of them are there afterwards, or none and a FileError."""
        new = {key: frame for key, frame in frames if not self.has(key)}
        if not new:
            return
        content = "".join(new.values()).encode()
        shard = self._open_shard()
        with self.writing(lambda: os.ftruncate(shard, self._size)):
            written = 0
            while written < len(content):
                written += os.write(shard, content[written:])
            if time.monotonic() - self._synced > SECONDS_BETWEEN_SYNCS:
                os.fsync(shard)
                self._synced = time.monotonic()
        self._size += len(content)
        for key in new:
            self._take(key)

    def _open_shard(self) -> int:
        if self._shard is not None and self._size < LARGEST_SHARD:
            return self._shard
        self._close_shard()
        number = max(self._shard_number, 1)
        path = self.path / "shards" / f"{number:05}.extxyz"
        if path.exists() and path.stat().st_size >= LARGEST_SHARD:
            number += 1
            path = self.path / "shards" / f"{number:05}.extxyz"
        with self.writing():
            self._shard = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        self._shard_number, self._size = number, os.fstat(self._shard).st_size
        return self._shard

    def _close_shard(self) -> None:
        if self._shard is not None:
            with suppress(OSError):
                os.fsync(self._shard)
            os.close(self._shard)
            self._shard = None

    def set_aside(self, key: str, reason: dict[str, Any], images: Mapping[str, str]) -> None:
        """One that has no result: the reason, and frames by file name. All of it is there, or nothing."""
        if self.has(key):
            return
        final, beside = self.path / "failed" / key, self.path / "failed" / f".{key}"
        with self.writing(lambda: shutil.rmtree(beside, ignore_errors=True)):
            beside.mkdir(exist_ok=True)
            for name, text in images.items():
                (beside / name).write_text(text, encoding="utf-8")
            (beside / "reason.json").write_text(json.dumps(reason, ensure_ascii=False, indent=1), encoding="utf-8")
            beside.rename(final)
        self._take(key)

    def forget_failures(self) -> int:
        """So that they are tried once more; how many there were."""
        forgotten = [reason["key"] for reason in failures(self.path)]
        for key in forgotten:
            shutil.rmtree(self.path / "failed" / key, ignore_errors=True)
            self.done.discard(bytes.fromhex(key[1:]))
        return len(forgotten)

    @contextmanager
    def list_inputs(self, file: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
        """What writes down the structures of an input file as they are read.

        Beside the old listing, which it replaces when the whole file has been read; a run that was stopped leaves the
        old one in force, if there is one.
        """
        path = self.path / "inputs" / f"{self.files.index(str(file.absolute())) + 1:05}.jsonl"
        with self.writing():
            # line by line: what a kill leaves says what was handed out, and `status` sees it at once
            part_of(path).unlink(missing_ok=True)  # were it a link, we would write where it leads
            lines = part_of(path).open("x", encoding="utf-8", buffering=1)

        def add(plain: dict[str, Any]) -> None:
            with self.writing():
                lines.write(json.dumps(plain, ensure_ascii=False) + "\n")

        try:
            yield add
            with self.writing():
                lines.flush()
                os.fsync(lines.fileno())
                part_of(path).replace(path)
        finally:
            with suppress(OSError):
                lines.close()

    def tell(self, plain: dict[str, Any]) -> None:
        """How far we are; a run does not end because nobody can read this."""
        with suppress(FileError):
            self._replace(self.path / PROGRESS, plain)

    def _replace(self, path: Path, plain: dict[str, Any]) -> None:
        with self.writing():
            replace_file(path, (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode())

    @contextmanager
    def writing(self, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A FileError where the disk refuses; first whatever is half done is undone."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                undo()
            if error.errno in FULL:
                raise FileError(
                    f"no space left in {self.path} ({error.strerror}); all results so far are saved: free some "
                    "space and run the same command again to continue"
                ) from error
            raise FileError(
                f"{self.path} cannot be written ({error.strerror}); all results so far are saved"
            ) from error

    def close(self) -> None:
        self._close_shard()
        self._lock.close()
