"""Journals: what one process has evaluated, as it happens. A file of records that is only ever appended to.

Each record has a mark, its length and a checksum. A kill leaves at most one torn record at the end; a damaged stretch
costs the records it touches and nothing behind them. One file per process, so writers never meet.

    C  a calculator: number, name and settings (JSON)
    B  a relaxation begins: number, key, kind, calculator, tolerance (JSON), then elements, cell and positions
    P  a point: relaxation, base of the step that led here, energy, displacements, forces, where known stress and cell
    E  a relaxation ends: its outcome

Displacements (from the first positions) and forces are float32, exact to 1e-7 of their size: 24 bytes per atom.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxion.files import check_regular, decoded

MARK = b"RXJ1"
HEAD = struct.Struct("<4sBII")  # mark, kind, length, checksum of kind and payload
POINT = struct.Struct("<IiBd")  # relaxation, base, what follows, energy
END = struct.Struct("<IB")
CALCULATOR, BEGIN, POINT_KIND, END_KIND = b"CBPE"
STRESS = 1  # what a point has beside energy and forces
CELL = 2
LONGEST_RECORD = 1 << 30

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Beginning:
    """A relaxation before its first point is told."""

    key: str
    kind: str
    calculator: Mapping[str, Any]  # name and settings
    fmax: float  # eV/Å
    cell_free: bool
    numbers: NDArray[np.int64]
    pbc: NDArray[np.bool_]
    movable: NDArray[np.bool_]
    cell: Array
    positions: Array
    policy: str = ""


@dataclass(frozen=True, eq=False)
class JournalPoint:
    """One evaluated geometry."""

    base: int  # number of the point at which the step began that led here; -1: a start
    energy: float
    positions: Array
    forces: Array
    stress: Array | None = None  # ASE's six components, eV/Å³
    cell: Array | None = None  # None: that of the beginning


@dataclass(eq=False)
class Entry:
    """A relaxation as a journal has it."""

    number: int
    beginning: Beginning
    points: list[JournalPoint] = field(default_factory=list)
    outcome: int = 0  # structures.Outcome; 0: it never ended, or goes on
    ended: bool = False  # somebody said how


@dataclass(eq=False)
class Contents:
    """Of one journal."""

    entries: dict[int, Entry] = field(default_factory=dict)
    calculators: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    n_damaged_bytes: int = 0
    n_torn_bytes: int = 0  # at the end: a writer was killed there, or is about to go on
    n_read: int = 0  # bytes, up to the end of the last whole record


def record(kind: int, payload: bytes) -> bytes:
    """One record, ready to be appended."""
    checksum = zlib.crc32(payload, zlib.crc32(bytes([kind])))
    return HEAD.pack(MARK, kind, len(payload), checksum) + payload


def calculator_record(number: int, details: Mapping[str, Any]) -> bytes:
    return record(CALCULATOR, json.dumps({"number": number, "details": dict(details)}).encode())


def begin_record(number: int, calculator: int, beginning: Beginning) -> bytes:
    """`calculator`: its number in this journal."""
    words = {
        "number": number,
        "key": beginning.key,
        "kind": beginning.kind,
        "calculator": calculator,
        "fmax": beginning.fmax,
        "cell_free": bool(beginning.cell_free),
        "pbc": [bool(periodic) for periodic in beginning.pbc],
        "policy": beginning.policy,
        "n_atoms": len(beginning.numbers),
    }
    text = json.dumps(words).encode()
    parts = [
        np.asarray(beginning.numbers, "<u1").tobytes(),
        np.asarray(beginning.movable, "<u1").tobytes(),
        np.asarray(beginning.cell, "<f8").tobytes(),
        np.asarray(beginning.positions, "<f8").tobytes(),
    ]
    return record(BEGIN, b"".join([struct.pack("<I", len(text)), text, *parts]))


def point_record(number: int, beginning: Beginning, told: JournalPoint) -> bytes:
    what = STRESS * (told.stress is not None) + CELL * (told.cell is not None)
    parts = [
        POINT.pack(number, told.base, what, told.energy),
        (told.positions - beginning.positions).astype("<f4").tobytes(),
        np.asarray(told.forces, "<f4").tobytes(),
    ]
    if told.stress is not None:
        parts.append(np.asarray(told.stress, "<f4").tobytes())
    if told.cell is not None:
        parts.append(np.asarray(told.cell, "<f8").tobytes())
    return record(POINT_KIND, b"".join(parts))


def end_record(number: int, outcome: int) -> bytes:
    return record(END_KIND, END.pack(number, outcome))


def read_journal(path: Path, known: Contents | None = None) -> Contents:
    """All whole records; an OSError where the file cannot be read at all. `known`: what was read before, to go on."""
    check_regular(path)
    found = known or Contents()
    with path.open("rb") as file:
        file.seek(found.n_read)
        content = file.read()
    end = 0  # of the last whole record
    for start, kind, payload in _records(content):
        found.n_damaged_bytes += start - end
        end = start + HEAD.size + len(payload)
        try:
            _take(found, kind, payload)
        except (KeyError, ValueError, TypeError, IndexError, struct.error, OverflowError):  # checked, and yet not ours
            found.n_damaged_bytes += HEAD.size + len(payload)
    found.n_torn_bytes = len(content) - end
    found.n_read += end
    return found


def _records(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Place, kind and payload of every record whose checksum is right."""
    place = 0
    while (place := content.find(MARK, place)) >= 0 and place + HEAD.size <= len(content):
        _, kind, length, checksum = HEAD.unpack_from(content, place)
        payload = content[place + HEAD.size : place + HEAD.size + length] if length < LONGEST_RECORD else b""
        whole = len(payload) == length and zlib.crc32(payload, zlib.crc32(bytes([kind]))) == checksum
        if whole:
            yield place, kind, payload
        place += HEAD.size + length if whole else 1


def _take(found: Contents, kind: int, payload: bytes) -> None:
    if kind == CALCULATOR:
        words = decoded(payload.decode())
        found.calculators[int(words["number"])] = dict(words["details"])
    elif kind == BEGIN:
        entry = _beginning(payload, found.calculators)
        found.entries[entry.number] = entry
    elif kind == POINT_KIND:
        number, told = _point(payload, found.entries)
        found.entries[number].points.append(told)
    elif kind == END_KIND:
        number, outcome = END.unpack(payload)
        found.entries[number].outcome = outcome
        found.entries[number].ended = True


def _beginning(payload: bytes, calculators: Mapping[int, Mapping[str, Any]]) -> Entry:
    (length,) = struct.unpack_from("<I", payload)
    words = decoded(payload[4 : 4 + length].decode())
    place = 4 + length
    n_atoms = int(words["n_atoms"])
    if n_atoms < 1 or len(payload) != place + n_atoms * 26 + 72:
        raise ValueError("its length does not fit its number of atoms")
    numbers = np.frombuffer(payload, "<u1", n_atoms, place)
    movable = np.frombuffer(payload, "<u1", n_atoms, place + n_atoms)
    cell = np.frombuffer(payload, "<f8", 9, place + 2 * n_atoms)
    positions = np.frombuffer(payload, "<f8", 3 * n_atoms, place + 2 * n_atoms + 72)
    return Entry(
        int(words["number"]),
        Beginning(
            key=str(words["key"]),
            kind=str(words["kind"]),
            calculator=calculators.get(int(words["calculator"]), {"name": "unknown"}),
            fmax=float(words["fmax"]),
            cell_free=bool(words["cell_free"]),
            numbers=numbers.astype(np.int64),
            pbc=np.array([bool(one) for one in words["pbc"]]),
            movable=movable.astype(bool),
            cell=cell.reshape(3, 3).astype(np.float64),
            positions=positions.reshape(-1, 3).astype(np.float64),
            policy=str(words["policy"]),
        ),
    )


def _point(payload: bytes, entries: Mapping[int, Entry]) -> tuple[int, JournalPoint]:
    number, base, what, energy = POINT.unpack_from(payload)
    beginning = entries[number].beginning
    n_atoms = len(beginning.numbers)
    place = POINT.size
    moved = np.frombuffer(payload, "<f4", 3 * n_atoms, place).reshape(-1, 3)
    forces = np.frombuffer(payload, "<f4", 3 * n_atoms, place + 12 * n_atoms).reshape(-1, 3)
    place += 24 * n_atoms
    stress = cell = None
    if what & STRESS:
        stress = np.frombuffer(payload, "<f4", 6, place).astype(np.float64)
        place += 24
    if what & CELL:
        cell = np.frombuffer(payload, "<f8", 9, place).reshape(3, 3).astype(np.float64)
    return number, JournalPoint(base, energy, beginning.positions + moved, forces.astype(np.float64), stress, cell)
