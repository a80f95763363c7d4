"""From frames to what the browser draws: whole thousandths of an Å, thinned out until it fits the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ase.data import chemical_symbols, covalent_radii
from ase.data.colors import jmol_colors

from relaxion.optimizer.point import Frame
from relaxion.train.judge.runs import Reading

LARGEST_BYTES = 330_000  # of all films of a page; library, style and scripts need about 600 000
LEAST_BYTES_PER_ATOM = 6  # of one frame: three zeros and their commas
MOST_FRAMES = 400  # of one film: more than anybody looks at
NONMETALS = frozenset([1, 2, *range(5, 11), *range(14, 19), *range(32, 37), *range(51, 55)])  # drawn with sticks
MOST_STICK_ATOMS = 150
METHODS = {
    "policy": "the policy",
    "internal": "internal coordinates",
    "springs": "springs",
    "plain": "plain L-BFGS",
    "fire": "damped FIRE",
    "saddle": "the step away from a saddle point",
    "curvature": "the check for negative curvature",
}
HOW_TO_TURN = "Drag to rotate, Ctrl and wheel to zoom."
HOW = f"Each frame is one force call. {HOW_TO_TURN}"
FAINT = "Faint atoms are held fixed."
MILLI = 1000  # units of the browser's lengths per Å


@dataclass(frozen=True)
class Reel:
    """One film with what is said beside it."""

    name: str
    numbers: np.ndarray  # (n_atoms,) atomic numbers
    periodic: bool  # along any axis: the cell is drawn
    frames: Sequence[Frame]
    readings: Sequence[Reading]  # of every force call
    end: str  # what is said from the last force call on
    converged: bool
    winner: bool = False
    fixed: frozenset[int] = frozenset()  # atoms that are held


def film_parts(reels: Sequence[Reel], largest_bytes: int = LARGEST_BYTES) -> tuple[list[dict[str, Any]], list[str]]:
    """The films as plain data, and sentences about what was left out."""
    films = []
    notes = []
    for reel in reels:
        film = _fitted(reel, largest_bytes // len(reels))
        films.append(film)
        notes += _left_out(reel, len(film["species"]), len(film["calls"]))
    return films, notes


def _left_out(reel: Reel, atoms: int, frames: int) -> list[str]:
    said = []
    if atoms < len(reel.numbers):
        said.append(f"only the {atoms} of {len(reel.numbers)} atoms that move farthest are drawn")
    if frames < len(reel.frames):
        said.append(f"only {frames} of {len(reel.frames)} force calls are shown")
    return [f"{reel.name}: to keep the page small, {' and '.join(said)}; the curves are complete."] if said else []


def _fitted(reel: Reel, largest_bytes: int) -> dict[str, Any]:
    """First fewer frames, then fewer atoms: the start and the end are always there."""
    atoms = np.arange(len(reel.numbers))
    wanted = min(len(reel.frames), MOST_FRAMES, max(2, largest_bytes // (LEAST_BYTES_PER_ATOM * len(atoms))))
    while True:
        frames = [reel.frames[i] for i in sorted({round(i) for i in np.linspace(0, len(reel.frames) - 1, wanted)})]
        film = _film(reel, frames if len(frames) == len(reel.frames) else _joined(frames), atoms)
        size = len(json.dumps(film, separators=(",", ":")))
        if size <= largest_bytes or (wanted <= 2 and len(atoms) <= 1):
            return film
        share = 0.95 * largest_bytes / size
        if wanted > 2:
            wanted = max(2, int(share * wanted))
        else:
            travelled = np.linalg.norm(reel.frames[-1].positions - reel.frames[0].positions, axis=1)
            atoms = np.sort(np.argsort(-travelled, kind="stable")[: max(1, int(share * len(atoms)))])


def _joined(frames: Sequence[Frame]) -> list[Frame]:
    """Where frames between them are missing, a move is the way from one to the next."""
    before = [None, *(frame.call for frame in frames)]
    return [replace(frame, base_call=call, proposed=None) for frame, call in zip(frames, before, strict=False)]


def _film(reel: Reel, frames: Sequence[Frame], atoms: np.ndarray) -> dict[str, Any]:
    numbers = reel.numbers[atoms]
    kinds = sorted(set(numbers.tolist()))
    sticks = not reel.periodic and len(numbers) <= MOST_STICK_ATOMS and bool(NONMETALS.intersection(kinds))
    start = _milli(frames[0].positions[atoms])
    says = {reading.call: reading for reading in reel.readings}
    last = max(says, default=frames[-1].call)
    return {
        "name": reel.name,
        "description": _description(reel),
        "symbols": [chemical_symbols[kind] for kind in kinds],
        "colours": ["#" + bytes(np.rint(255 * jmol_colors[kind]).astype(np.uint8)).hex() for kind in kinds],
        "radii": [round(float(covalent_radii[kind]) * (0.42 if sticks else 0.55), 3) for kind in kinds],
        "bond_radii": [round(float(covalent_radii[kind]), 3) for kind in kinds],
        "sticks": sticks,
        "species": [kinds.index(number) for number in numbers.tolist()],
        "calls": [frame.call for frame in frames],
        "start": start.tolist(),
        "shifts": [(_milli(frame.positions[atoms]) - start).tolist() for frame in frames],
        "cells": _cells(frames) if reel.periodic else None,
        "bases": [frame.base_call for frame in frames] if any(frame.base_call for frame in frames) else None,
        "proposed": [None if frame.proposed is None else _milli(frame.proposed[atoms]).tolist() for frame in frames],
        "readings": [_reading(says.get(frame.call)) for frame in frames],
        "end_call": last,
        "end": reel.end,
        "converged": reel.converged,
        "winner": reel.winner,
        "fixed": [place for place, atom in enumerate(atoms.tolist()) if atom in reel.fixed],
    }


def _description(reel: Reel) -> str:
    kinds, counts = np.unique(reel.numbers, return_counts=True)
    what = ", ".join(f"{count} {chemical_symbols[kind]}" for kind, count in zip(kinds, counts, strict=True))
    return f"{len(reel.numbers)} atoms ({what}){' in their cell' if reel.periodic else ''}"


def _reading(reading: Reading | None) -> str:
    """What is said of a force call."""
    if reading is None:
        return ""
    if reading.fmax_ev_per_angstrom is None:
        return "energy or forces were not finite"
    words = [f"fmax {reading.fmax_ev_per_angstrom:.3g} eV/Å"]
    words += [f"by {METHODS.get(reading.method, reading.method)}"] if reading.method not in ("", "start") else []
    words += [] if reading.accepted else ["rejected"]
    return ", ".join(words)


def _cells(frames: Sequence[Frame]) -> list[list[float]]:
    """One where all are the same."""
    cells = [[round(float(value), 4) for value in frame.cell.ravel()] for frame in frames]
    return cells[:1] if all(cell == cells[0] for cell in cells) else cells


def _milli(lengths: np.ndarray) -> np.ndarray:
    return np.rint(np.asarray(lengths, dtype=np.float64) * MILLI).astype(np.int64).ravel()
