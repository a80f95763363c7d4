"""Result folders: written beside, moved into place at the end, never over something without --force."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ase.io
from ase import Atoms
from ase.io.formats import UnknownFileTypeError, filetype, ioformats

from relaxion.errors import FileError
from relaxion.structures.dataset import READER_ERRORS

COMPRESSED = (".gz", ".bz2", ".xz")


def check_out(out: Path) -> None:
    """Refuse a place where no folder can be made, before any force call."""
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise FileError(f"--out {out}: {existing} is a file, not a folder; name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FileError(f"--out {out}: no permission to write in {existing}; name another folder")


def check_free(final: Path, force: bool) -> None:
    """Refuse a folder that holds something already."""
    if final.exists() and not final.is_dir():
        raise FileError(f"{final} is a file where the result folder should go; try --out with another folder")
    if final.is_dir() and any(final.iterdir()) and not force:
        raise FileError(f"{final}{os.sep} holds earlier results; try --force to replace them, or another --out")


@contextmanager
def staging(final: Path) -> Iterator[Path]:
    """A hidden folder beside the final one, on the same disk; gone in any case when the work is over."""
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Move into place. In a folder that exists, only files of the same names are replaced, each in one go."""
    if final.is_dir():
        for file in folder.iterdir():
            file.replace(final / file.name)
        return
    folder.chmod(0o777 & ~_umask())  # mkdtemp keeps everybody else out
    folder.rename(final)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_structure(atoms: Atoms, extxyz: Path, source: Path, native_stem: str) -> str | None:
    """As extxyz with energy and forces, and in the format of the input; if ASE cannot, a sentence says so."""
    ase.io.write(extxyz, atoms, format="extxyz")
    try:
        kind = filetype(str(source))
    except UnknownFileTypeError:
        return f"{source}: format not recognised for writing, so only extxyz was written"
    if kind == "extxyz" and source.suffix == extxyz.suffix:
        return None
    if not ioformats[kind].can_write:
        return f"{source}: ASE cannot write the format {kind}, so only extxyz was written"
    return _write_as(atoms, _native_path(extxyz.parent, native_stem, full_suffix(source)), kind)


def _native_path(folder: Path, name: str, suffix: str) -> Path:
    """As the input is called, but never the name of the trajectory, the log or the extxyz file."""
    path = folder / f"{name}{suffix}"
    return folder / f"{name}-relaxed{suffix}" if path.exists() else path


def _write_as(atoms: Atoms, path: Path, kind: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # writers warn of what a format cannot hold; extxyz holds it
            ase.io.write(path, atoms, format=kind)
    except READER_ERRORS as error:
        path.unlink(missing_ok=True)
        reason = f"{type(error).__name__}: {error}"
        return f"{path.name} could not be written as {kind} ({reason}), so only extxyz was written"
    return None


def stem(path: Path) -> str:
    """alloy for alloy.cif and alloy.cif.gz."""
    return path.name.removesuffix(full_suffix(path)) or path.name


def full_suffix(path: Path) -> str:
    """.cif, or .cif.gz where compressed."""
    if path.suffix in COMPRESSED:
        return Path(path.stem).suffix + path.suffix
    return path.suffix
