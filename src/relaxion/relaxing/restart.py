"""Restart files: JSON, written whole or not at all, refused with a sentence when foreign or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import Filter, UnitCellFilter

from relaxion.errors import RestartError
from relaxion.relaxing.door import bare_atoms
from relaxion.relaxing.point import Array

FORMAT = "relaxion-restart"
VERSION = 1


def write_restart(path: Path, target: Atoms | Filter, calls: int, left_at: Array, core: dict[str, Any]) -> None:
    """Save what the relaxer has learned. The file is replaced in one go, so a kill leaves the old or the new one."""
    plain = {
        "format": FORMAT,
        "version": VERSION,
        "numbers": bare_atoms(target).numbers,
        "reference_cell": np.array(target.orig_cell) if isinstance(target, UnitCellFilter) else None,
        "force_calls": calls,
        "left_at": left_at,
        "core": core,
    }
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(plain, default=np.ndarray.tolist))
    unfinished.replace(path)


def read_restart(path: Path, target: Atoms | Filter) -> tuple[int, Array, dict[str, Any]]:
    """Force calls so far, where the atoms were left, and the snapshot of the core.

    A cell filter is set back to the reference cell of the first run: its coordinates are measured from there.
    """
    plain = _decoded(path)
    numbers = bare_atoms(target).numbers
    if not np.array_equal(plain["numbers"], numbers):
        raise RestartError(
            f"{path} belongs to {len(plain['numbers'])} other atoms, not to these {len(numbers)}; "
            "delete it or give the structure it was written for"
        )
    if (plain["reference_cell"] is not None) != isinstance(target, UnitCellFilter):
        raise RestartError(f"{path} was written with another cell filter; use the same one or delete the file")
    if isinstance(target, UnitCellFilter):
        target.orig_cell = np.asarray(plain["reference_cell"])
    return int(plain["force_calls"]), np.asarray(plain["left_at"]), plain["core"]


def _decoded(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise RestartError(f"{path} cannot be read as a restart file ({error}); delete it to start afresh") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise RestartError(f"{path} is not a Relaxion restart file; name another, or delete it to start afresh")
    if plain.get("version") != VERSION:
        raise RestartError(f"{path} has version {plain.get('version')}, this Relaxion reads {VERSION}; delete it")
    missing = {"numbers", "reference_cell", "force_calls", "left_at", "core"} - plain.keys()
    if missing:
        raise RestartError(f"{path} lacks {', '.join(sorted(missing))}; delete it to start afresh")
    return plain
