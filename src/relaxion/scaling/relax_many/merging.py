"""All results of a folder as one file, in the order of the input."""

from __future__ import annotations

import os
import re
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from relaxion.errors import FileError
from relaxion.files import part_of
from relaxion.scaling.relax_many.frames import sealed
from relaxion.scaling.relax_many.summary import index_of

SEAL = re.compile(r" relaxion_sha256=d[0-9a-f]{16}$")


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
        raise FileError(f"{out} exists; try --force to replace it, or another name")
    if out.suffix not in (".extxyz", ".xyz"):
        raise FileError(f"{out}: results are merged as extended XYZ; take a name that ends with .extxyz")
    beside = part_of(out)
    try:
        beside.unlink(missing_ok=True)  # were it a link, we would write where it leads
        with closing(index_of(path)) as index, beside.open("x", encoding="utf-8") as file:
            merged = _write(path, index, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(out)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise FileError(f"{out} cannot be written ({error.strerror})") from error
    return merged


def _write(path: Path, index, file) -> Merged:
    written = failed = waiting = 0
    rows = index.execute(
        "SELECT file, structure, shard, offset, length, reason FROM inputs LEFT JOIN results USING (key) ORDER BY place"
    )
    open_shards = {}
    try:
        for source, structure, shard, offset, length, reason in rows:
            if shard is None:
                failed, waiting = failed + (reason is not None), waiting + (reason is None)
                continue
            if shard not in open_shards:
                open_shards[shard] = (path / "shards" / shard).open("rb")
            open_shards[shard].seek(offset)
            file.write(_labelled(open_shards[shard].read(length).decode(), f"{source}#{structure}"))
            written += 1
    finally:
        for shard in open_shards.values():
            shard.close()
    return Merged(written, failed, waiting)


def _labelled(frame: str, source: str) -> str:
    first, second, rest = frame.split("\n", 2)
    plain = source.replace("\n", " ").encode("utf-8", "replace").decode()
    quoted = plain.replace("\\", "\\\\").replace('"', '\\"')
    return sealed(f'{first}\n{SEAL.sub("", second)} relaxion_input="{quoted}"\n{rest}')
