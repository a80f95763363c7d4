"""What a search leaves in its folder: minima as extxyz and as ASE's database, and a summary in JSON."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import ase.db
import ase.io
from ase import Atoms

from relaxion.errors import FileError
from relaxion.files import part_of, write_json
from relaxion.search.run import SearchResult
from relaxion.search.state import NAME as STATE
from relaxion.search.walk import NEW

MINIMA, DATABASE, SUMMARY, PAGE, UNFINISHED = "minima.extxyz", "minima.db", "search.json", "report.html", "start.extxyz"
OURS = (MINIMA, DATABASE, SUMMARY, PAGE, UNFINISHED, STATE)
FORMAT = "relaxion-search"


def gains(result: SearchResult) -> dict[str, dict[str, float]]:
    """Of each kind of move: hops, force calls, new minima, and by how much it lowered the best energy (eV)."""
    found: dict[str, defaultdict[str, float]] = {}
    best = result.history[0].best_ev if result.history else 0.0
    for step in result.history[1:]:
        own = found.setdefault(step.kind, defaultdict(int))
        own["hops"] += 1
        own["force_calls"] += step.hop_calls
        own["new_minima"] += step.outcome == NEW
        own["accepted"] += step.accepted
        own[step.outcome] += 1
        own["gained_ev"] += max(best - step.best_ev, 0.0)
        best = min(best, step.best_ev)
    return {kind: dict(own) for kind, own in found.items()}


def staircase(result: SearchResult) -> list[tuple[int, float]]:
    """Force calls and best energy (eV) wherever it went down, and at the end."""
    steps: list[tuple[int, float]] = []
    for step in result.history:
        if not steps or step.best_ev < steps[-1][1]:
            steps.append((step.calls, step.best_ev))
    if steps:
        steps.append((result.force_calls, steps[-1][1]))
    return steps


def summary(result: SearchResult, **more: Any) -> dict[str, Any]:
    """Plain values; `more`: what was asked."""
    minima = [
        {"energy_ev": minimum.energy_ev, "times_found": minimum.times_found, "found_at_call": minimum.found_at_call}
        for minimum in result.found
    ]
    return {
        "format": FORMAT, **more, "force_calls": result.force_calls, "hops": max(len(result.history) - 1, 0),
        "stopped": result.stopped, "choice": result.choice, "seconds": round(result.seconds, 3),
        "moves": gains(result), "staircase": [list(step) for step in staircase(result)], "minima": minima,
    }  # fmt: skip


def labelled(result: SearchResult) -> list[Atoms]:
    """The minima with what is known of them in `info`."""
    images = []
    for rank, minimum in enumerate(result.found):
        atoms = minimum.atoms.copy()
        atoms.calc = minimum.atoms.calc
        atoms.info |= {"rank": rank, "times_found": minimum.times_found, "found_at_call": minimum.found_at_call}
        images.append(atoms)
    return images


def write_results(result: SearchResult, folder: Path, **more: Any) -> None:
    """Each file in one go; where no minimum was reached, the start as far as it was relaxed."""
    try:
        if result.found:
            images = labelled(result)
            _write_extxyz(images, folder / MINIMA)
            _write_database(images, folder / DATABASE)
        elif result.unfinished is not None:
            _write_extxyz([result.unfinished], folder / UNFINISHED)
        write_json(folder / SUMMARY, summary(result, **more))
    except OSError as error:
        raise FileError(f"results cannot be written into {folder} ({error}); is the disk full?") from error


def _write_extxyz(images: list[Atoms], path: Path) -> None:
    beside = part_of(path)
    ase.io.write(beside, images, format="extxyz")  # pyright: ignore[reportArgumentType] - ASE's hint forgets lists
    beside.replace(path)


def _write_database(images: list[Atoms], path: Path) -> None:
    beside = part_of(path)
    beside.unlink(missing_ok=True)
    database: Any = ase.db.connect(beside, type="db", use_lock_file=False)
    with database:
        for atoms in images:
            words = {name: int(atoms.info[name]) for name in ("rank", "times_found", "found_at_call")}
            database.write(atoms, **words)
    beside.replace(path)
