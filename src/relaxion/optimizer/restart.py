"""Restart files: JSON, written whole or not at all, refused with a sentence when foreign or damaged."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import Filter, UnitCellFilter

from relaxion.errors import RestartError
from relaxion.files import json_of
from relaxion.optimizer.point import Array, bare_atoms
from relaxion.settings import shown
from relaxion.structures.structures import LARGEST_EXTENT, SMALLEST_VOLUME

FORMAT = "relaxion-restart"
MOST_CALLS = 10**12
VERSION = 4  # 1 had no policy, 2 neither its weights nor the knobs, 3 cells in the units of ASE's filters


@dataclass(frozen=True)
class Saved:
    """What a restart file holds."""

    force_calls: int
    seen_at: Array  # (n_rows, 3) Å, where the last step began
    left_at: Array  # (n_rows, 3) Å, where it led
    core: dict[str, Any]  # snapshot of the optimizer
    policy: str  # who made the steps
    weights_sha256: str  # of the policy; empty for the classical core


def write_restart(path: Path, target: Atoms | Filter, saved: Saved) -> None:
    """Replace the file in one go, so that a kill leaves the old or the new one."""
    plain = {"format": FORMAT, "version": VERSION, **_signature(target), **vars(saved)}
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(plain, default=np.ndarray.tolist))
    unfinished.replace(path)


def read_restart(path: Path, target: Atoms | Filter) -> Saved:
    """What was saved, if it belongs to these atoms and this filter.

    A cell filter is set back to the reference cell of the first run: its coordinates are measured from there.
    """
    plain = _decoded(path)
    _check_signature(path, plain, _signature(target))
    try:
        seen_at, left_at = (np.asarray(plain[name], dtype=np.float64) for name in ("seen_at", "left_at"))
        calls = int(plain["force_calls"])
        reference = np.asarray(plain["reference_cell"], dtype=np.float64).reshape(3, 3)
    except (TypeError, ValueError, OverflowError) as error:
        raise RestartError(f"{path} is damaged ({shown(str(error))}); delete it to start afresh") from error
    sensible = all((np.abs(numbers) < LARGEST_EXTENT).all() for numbers in (seen_at, left_at, reference))  # NaN is not
    if not sensible or not 0 <= calls < MOST_CALLS:
        raise RestartError(f"{path} is damaged: it holds impossible numbers; delete it to start afresh")
    expected = np.asarray(target.get_positions()).reshape(-1, 3).shape
    if seen_at.shape != expected or left_at.shape != expected:
        raise RestartError(f"{path} is damaged: coordinates are not of shape {expected}; delete it to start afresh")
    if isinstance(target, UnitCellFilter):
        if abs(np.linalg.det(reference)) < SMALLEST_VOLUME:
            raise RestartError(f"{path} is damaged: its reference cell has no volume; delete it to start afresh")
        target.orig_cell = reference
    return Saved(calls, seen_at, left_at, plain["core"], str(plain["policy"]), str(plain["weights_sha256"]))


def _signature(target: Atoms | Filter) -> dict[str, Any]:
    """What must be the same for a restart to make sense; `reference_cell` is taken over instead."""
    filtered = isinstance(target, UnitCellFilter)
    return {
        "numbers": bare_atoms(target).numbers.tolist(),
        "filter": type(target).__name__,
        "cell_factor": float(getattr(target, "exp_cell_factor", target.cell_factor)) if filtered else None,
        "reference_cell": np.asarray(target.orig_cell).tolist() if filtered else np.zeros((3, 3)).tolist(),
    }


def _check_signature(path: Path, plain: dict[str, Any], own: dict[str, Any]) -> None:
    if plain["numbers"] != own["numbers"]:
        raise RestartError(
            f"{path} belongs to other atoms than these {len(own['numbers'])}; "
            "delete it or give the structure it was written for"
        )
    for name in ("filter", "cell_factor"):
        if plain[name] != own[name]:
            raise RestartError(
                f"{path} was written with {name} {shown(plain[name])}, now it is {own[name]}, so its coordinates mean "
                "something else; use the same cell filter or delete the file"
            )


def _decoded(path: Path) -> dict[str, Any]:
    try:
        plain = json_of(path)
    except (ValueError, OSError) as error:
        raise RestartError(f"{path} cannot be read as a restart file ({error}); delete it to start afresh") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise RestartError(f"{path} is not a Relaxion restart file; name another, or delete it to start afresh")
    if plain.get("version") != VERSION:
        version = shown(plain.get("version"))
        raise RestartError(f"{path} has version {version}, this Relaxion reads {VERSION}; delete it")
    known = {"numbers", "filter", "cell_factor", "reference_cell", *(field.name for field in fields(Saved))}
    if missing := known - plain.keys():
        raise RestartError(f"{path} lacks {', '.join(sorted(missing))}; delete it to start afresh")
    return plain
