"""Result folders: written beside, moved into place at the end, never over something unless forced."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ase.io
from ase import Atoms
from ase.io.formats import filetype, ioformats

from relaxion import __version__
from relaxion.errors import FileError
from relaxion.files import json_of, part_of
from relaxion.potentials.counting import error_in_words

COMPRESSED = (".gz", ".bz2", ".xz")
MANIFEST = "relaxion.json"  # in each result folder: which files are ours, and the result as `relax` prints it in JSON
FORMAT = "relaxion-result"
PAGE = "report.html"


def check_out(out: Path) -> None:
    """Refuse a place where no folder can be made, before any force call."""
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise FileError(f"{out}: {existing} is a file, not a folder; name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FileError(f"{out}: no permission to write in {existing}; name another folder")


def check_free(final: Path, force: bool) -> None:
    """Refuse a folder that holds something already."""
    if final.exists() and not final.is_dir():
        raise FileError(f"{final} is a file where the result folder should go; choose another folder")
    if final.is_dir() and any(final.iterdir()) and not force:
        raise FileError(f"{final}{os.sep} holds earlier results; `force=True` replaces them, or choose another folder")


@contextmanager
def staging(final: Path) -> Iterator[Path]:
    """A hidden folder beside the final one, on the same disk; gone in any case when the work is over."""
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path, result: dict[str, Any], details: dict[str, Any] | None = None) -> None:
    """Move into place, with a manifest. In a folder that exists, what an earlier run of ours left goes, the rest stays.

    If that fails the results are not lost: the folder keeps existing, under a name that can be seen.
    """
    try:
        names = sorted({entry.name for entry in folder.iterdir()} - {MANIFEST})
        _write_manifest(folder, names, result, details or {})
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp keeps everybody else out
        if final.is_dir():
            _replace_earlier(folder, final, names)
        else:
            folder.rename(final)
    except OSError as error:
        rescue = folder.rename(folder.with_name(folder.name.removeprefix(".")))
        reason = f"the results could not be moved into {final}{os.sep} ({error_in_words(error)})"
        raise FileError(f"{reason}; they are in {rescue}{os.sep}") from error


def _replace_earlier(folder: Path, final: Path, names: list[str]) -> None:
    for name in set(_listed(final)) - set(names):
        _remove(final / name)
    for name in [*names, MANIFEST]:
        new = folder / name
        old = final / name
        if new.is_dir() or old.is_dir():  # only files are replaced in one go
            _remove(old)
        new.replace(old)


def update_manifest(final: Path, result: dict[str, Any], details: dict[str, Any], added: Sequence[str] = ()) -> None:
    """More to say, and perhaps more files."""
    _write_manifest(final, sorted({*_listed(final), *added}), result, details)


def _write_manifest(folder: Path, names: list[str], result: dict[str, Any], details: dict[str, Any]) -> None:
    plain = {"format": FORMAT, "relaxion": __version__, "files": names, "result": result, **details}
    unfinished = folder / f"{MANIFEST}.part"
    unfinished.unlink(missing_ok=True)
    unfinished.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(folder / MANIFEST)


def read_manifest(final: Path) -> dict[str, Any] | None:
    """What an earlier run says about itself; None if there is no manifest of ours."""
    try:
        plain = json_of(final / MANIFEST)
    except (OSError, ValueError):
        return None
    ours = isinstance(plain, dict) and plain.get("format") == FORMAT and isinstance(plain.get("files"), list)
    return plain if ours else None


def _listed(final: Path) -> list[str]:
    """What an earlier run wrote here; nothing if no manifest of ours says so, and never a path out of the folder."""
    return listed_files(read_manifest(final) or {"files": []})


def listed_files(plain: dict[str, Any]) -> list[str]:
    """The names in a manifest that are names and not paths."""
    words = [name for name in plain["files"] if isinstance(name, str)]
    return [name for name in words if name not in ("", "..") and Path(name).name == name]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_structure(atoms: Atoms, extxyz: Path, source: Path, native_stem: str) -> str | None:
    """As extxyz with energy and forces, and in the format of the input; if ASE cannot, a sentence says so."""
    failure = _write_as(atoms, extxyz, "extxyz")
    if failure is not None:
        raise FileError(failure)
    try:
        kind = filetype(str(source))
        can_write = ioformats[kind].can_write
    except Exception as error:  # noqa: BLE001 - it looks into the file, with ASE's readers
        return f"{source}: format not recognised for writing ({error_in_words(error)}), so only extxyz was written"
    if kind == "extxyz" and source.suffix == extxyz.suffix:
        return None
    if not can_write:
        return f"{source}: ASE cannot write the format {kind}, so only extxyz was written"
    failure = _write_as(atoms, _native_path(extxyz.parent, native_stem, full_suffix(source)), kind)
    return None if failure is None else f"{failure}, so only extxyz was written"


def write_frames(images: Sequence[Atoms], file: Path) -> None:
    """Several structures as one extxyz, in one go. FileError where that cannot be done."""
    beside = part_of(file)
    failure = _write_as(images, beside, "extxyz")
    if failure is not None:
        raise FileError(failure)
    beside.replace(file)


def _native_path(folder: Path, name: str, suffix: str) -> Path:
    """As the input is called, but never the name of the trajectory, the log, the extxyz file or the manifest."""
    path = folder / f"{name}{suffix}"
    return folder / f"{name}-relaxed{suffix}" if path.exists() or path.name == MANIFEST else path


def _write_as(atoms: Atoms | Sequence[Atoms], path: Path, kind: str) -> str | None:
    """None, or why it could not be written; then nothing half-written stays."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # writers warn of what a format cannot hold; extxyz holds it
            ase.io.write(path, atoms, format=kind)  # pyright: ignore[reportArgumentType] - ASE's hint forgets sequences
    except Exception as error:  # noqa: BLE001 - ASE's writers have no common error, nor do the packages behind them
        _remove(path)
        return f"{path.name} could not be written as {kind} ({error_in_words(error)})"
    return None


def stem(path: Path) -> str:
    """alloy for alloy.cif and alloy.cif.gz."""
    return path.name.removesuffix(full_suffix(path)) or path.name


def full_suffix(path: Path) -> str:
    """.cif, or .cif.gz where compressed."""
    if path.suffix in COMPRESSED:
        return Path(path.stem).suffix + path.suffix
    return path.suffix
