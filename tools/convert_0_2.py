"""Convert files of relaxion 0.2 once: a memory or store of relaxations, results of `relax-many`, a restart file.

    python tools/convert_0_2.py OLD_FOLDER NEW_FOLDER
    python tools/convert_0_2.py OLD_RESTART_FILE NEW_RESTART_FILE

The old ones stay as they are. What is damaged in a folder is left out, as relaxion 0.2 did. Policy files of 0.2 are
read as they are; run folders of trainings do not resume. A restart file of a free cell cannot be converted.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.stress import voigt_6_to_full_3x3_stress
from numpy.typing import NDArray
from torch import Tensor

from relaxion.apps.relax_many.results import MANIFEST as MANY
from relaxion.apps.relax_many.results import VERSION, ResultFolder
from relaxion.apps.relax_many.settings import ManySettings
from relaxion.database import RelaxationDatabase, Trajectory
from relaxion.errors import FileError
from relaxion.files import Format, Stored, check_regular, decoded, replace_file
from relaxion.optimizer.records import FORMAT as RESTART
from relaxion.optimizer.records import VERSION as RESTART_VERSION
from relaxion.structures import Outcome

FORMAT = Format(version=1, error=FileError)
MOST_ROWS = 2**31  # steps, or atoms, of one relaxation

# ---- journals of 0.2

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


def trajectory_of(entry: Entry) -> Trajectory:
    """A relaxation of a journal that has at least one point."""
    beginning = entry.beginning
    points = entry.points
    cells = [beginning.cell if point.cell is None else point.cell for point in points]
    stresses = [voigt_6_to_full_3x3_stress(np.zeros(6) if p.stress is None else p.stress) for p in points]
    return Trajectory(
        key=beginning.key,
        kind=beginning.kind,
        engine=str(beginning.calculator.get("name", "unknown")),
        outcome=_outcome(entry),
        cell_free=beginning.cell_free,
        numbers=torch.from_numpy(beginning.numbers),
        pbc=torch.from_numpy(beginning.pbc),
        movable=torch.from_numpy(beginning.movable),
        cells=_stacked(cells),
        positions=_stacked([point.positions for point in points]),
        energies=torch.tensor([point.energy for point in points], dtype=torch.float64),
        forces=_stacked([point.forces for point in points]),
        stresses=_stacked(stresses),
        bases=torch.tensor([point.base for point in points]),
        calculator=beginning.calculator,
        policy=beginning.policy,
        fmax=beginning.fmax,
    )


def _outcome(entry: Entry) -> int:
    """As told; whoever drives a relaxer step by step tells no end, but its last forces do."""
    beginning = entry.beginning
    forces = entry.points[-1].forces
    if entry.outcome != Outcome.RUNNING or beginning.cell_free or not beginning.movable.any():
        return entry.outcome
    largest = np.linalg.norm(forces[beginning.movable], axis=1).max()
    return int(Outcome.CONVERGED if largest < beginning.fmax else Outcome.RUNNING)


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays))


# ---- shards of 0.2

_KINDS: dict[str, type] = {
    "key": str, "kind": str, "engine": str, "outcome": int, "cell_free": bool, "n_steps": int, "n_atoms": int,
}  # fmt: skip


def _checked(values: Any) -> dict[str, Any]:
    """The plain values of a shard; a ValueError where they are not what `append` writes."""
    if not isinstance(values, dict):
        raise ValueError("its values have no names")
    values = {"about": [], "skipped": {}, "cost": {}} | values
    about = values["about"]
    skipped = values["skipped"]
    cost = values["cost"]
    if not (isinstance(about, list) and isinstance(skipped, dict) and isinstance(cost, dict)):
        raise ValueError("about, skipped and cost are not a list and two tables")
    for entry in about:
        wrong = [
            name for name, kind in _KINDS.items() if not isinstance(entry, dict) or type(entry.get(name)) is not kind
        ]
        if wrong or not 1 <= entry["n_steps"] < MOST_ROWS or not 1 <= entry["n_atoms"] < MOST_ROWS:
            raise ValueError(f"a trajectory is described with a wrong {', '.join(wrong) or 'n_steps or n_atoms'}")
    if not all(isinstance(spent, int | float) for spent in cost.values()):
        raise ValueError("cost holds something else than numbers")
    return values


_PER_ATOM = ("numbers", "movable")
_PER_STRUCTURE = ("cells", "energies", "stresses")
_PER_STEP_AND_ATOM = ("positions", "forces")


_TENSORS = {"numbers": torch.int64, "movable": torch.bool, "pbc": torch.bool}  # all others are real numbers
_ROWS = {"cells": (3, 3), "stresses": (3, 3), "positions": (3,), "forces": (3,), "pbc": (3,)}


def _check_kinds(tensors: Mapping[str, Tensor]) -> None:
    """A ValueError where numbers are of another kind or shape than `append` writes."""
    for name, tensor in tensors.items():
        fits = tensor.dtype == _TENSORS[name] if name in _TENSORS else tensor.dtype in (torch.float32, torch.float64)
        if name not in (*_PER_ATOM, *_PER_STRUCTURE, *_PER_STEP_AND_ATOM, "pbc"):
            raise ValueError(f"it has a tensor '{name[:60]}'")
        if not fits or tuple(tensor.shape[1:]) != _ROWS.get(name, ()) or tensor.ndim == 0:
            raise ValueError(f"its {name} are {tuple(tensor.shape)} {tensor.dtype}")


def _trajectories(stored: Stored) -> Iterator[Trajectory]:
    about = stored.values["about"]
    _check_kinds(stored.tensors if about else {})
    atoms = [entry["n_atoms"] for entry in about]
    steps = [entry["n_steps"] for entry in about]
    both = [n * t for n, t in zip(atoms, steps, strict=True)]
    if not about:
        return
    parts = {name: stored.tensors[name].split(atoms) for name in _PER_ATOM}
    parts |= {name: stored.tensors[name].split(steps) for name in _PER_STRUCTURE}
    parts |= {name: stored.tensors[name].split(both) for name in _PER_STEP_AND_ATOM}
    for place, entry in enumerate(about):
        own: dict[str, Any] = {name: tensors[place].clone() for name, tensors in parts.items()}
        shape = (entry["n_steps"], entry["n_atoms"], 3)
        yield Trajectory(
            key=entry["key"],
            kind=entry["kind"],
            engine=entry["engine"],
            outcome=entry["outcome"],
            cell_free=entry["cell_free"],
            pbc=stored.tensors["pbc"][place].clone(),
            **(own | {name: own[name].reshape(shape) for name in _PER_STEP_AND_ATOM}),
        )


def convert_database(old: Path, new: Path) -> str:
    """All shards, then all journals."""
    manifest = json.loads((old / "manifest.json").read_text())
    database = RelaxationDatabase.create(new, manifest.get("description") or {})
    number = 0
    for shard in sorted(old.glob("shard-*.safetensors")):
        stored = FORMAT.read(shard, "trajectories")
        values = _checked(stored.values)
        found = list(_trajectories(Stored(stored.tensors, values)))
        database.append(found)
        number += len(found)
    for journal in sorted(old.glob("journal-*.rxj")):
        found = [trajectory_of(entry) for entry in read_journal(journal).entries.values() if entry.points]
        database.append(found)
        number += len(found)
    return f"{number} relaxations -> {new}"


# ---- results of relax-many of 0.2

FACT = re.compile(r' relaxion_(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
ENERGY = re.compile(r"(?:^| )energy=(\S+)")
SEAL = re.compile(r" relaxion_sha256=d[0-9a-f]{16}$")


def convert_results(old: Path, new: Path) -> str:
    """Results, what was set aside, and the list of the input."""
    plain = json.loads((old / MANY).read_text())
    if plain["version"] == VERSION:
        raise SystemExit(f"{old} needs no conversion")
    files = [Path(file) for file in plain["files"]]
    with ResultFolder(new, ManySettings.read(plain["settings"]), files) as folder:
        for number, file in enumerate(files, start=1):
            listing = old / "inputs" / f"{number:05}.jsonl"
            lines = [json.loads(line) for line in listing.read_text().splitlines()] if listing.exists() else []
            for place, line in enumerate(lines):
                folder.list_known_input(file, place, line)
            if listing.exists():
                folder.end_of_input(file, len(lines))
        for shard in sorted((old / "shards").glob("*.extxyz")):
            folder.append(frames(shard.read_text()))
        for reason in sorted((old / "failed").glob("s*/reason.json")):
            facts = json.loads(reason.read_text())
            names = {"input": "input.extxyz", "last": "last.extxyz"}
            kept = {name: reason.with_name(file) for name, file in names.items()}
            texts = {name: file.read_text() for name, file in kept.items() if file.exists()}
            folder.set_aside(reason.parent.name, str(facts.get("reason")), facts, texts)
        return f"{len(folder.done)} results -> {new}"


def frames(text: str) -> Iterator[dict[str, Any]]:
    """Whole frames of a shard."""
    lines = text.splitlines(keepends=True)
    place = 0
    while place + 1 < len(lines):
        end = place + 2 + int(lines[place])
        if end > len(lines):  # torn by a kill
            return
        second = lines[place + 1].rstrip("\n")
        facts = {
            name: json.loads(value) if value[0] in '"-0123456789' else value for name, value in FACT.findall(second)
        }
        energy = ENERGY.search(second)
        frame = "".join([lines[place], SEAL.sub("", second) + "\n", *lines[place + 2 : end]])
        yield {**facts, "energy_ev": None if energy is None else float(energy[1]), "frame": frame}
        place = end


# ---- restart files of 0.2


def convert_restart(old: Path, new: Path) -> str:
    """What later versions remember as well is as after a step that went well."""
    plain = json.loads(old.read_text())
    if plain.get("format") != RESTART or plain.get("version") != 3:
        raise SystemExit(f"{old} is no restart file of relaxion 0.2")
    if plain["filter"] != "Atoms":
        raise SystemExit(f"{old} is of a free cell, whose coordinates have another unit now: start anew")
    core = plain["core"]
    last = core["last"]
    bases = [core["more"].get("past", {}).get("coordinates"), None if last is None else last["base"]["coordinates"]]
    core["places"] = [base for base in bases if base is not None]
    core["calls"] = plain["force_calls"]
    core["not_finite"] = []
    if last is not None and last["base"]["geometry"] is not None:
        last["base"]["geometry"] |= {"ase_cell_factor": 0.0, "drawn": True}
    if core["more"]:
        core["more"]["left"] = False
    if core["fire_steps_left"] == 0:
        core["fire"] = None
    replace_file(new, json.dumps({**plain, "version": RESTART_VERSION}).encode())
    return f"{plain['force_calls']} force calls -> {new}"


def main(old: Path, new: Path) -> None:
    convert = convert_results if (old / MANY).exists() else convert_restart if old.is_file() else convert_database
    sys.stdout.write(convert(old, new) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
