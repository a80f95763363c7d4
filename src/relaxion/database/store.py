"""Relaxations on disk: every structure that was evaluated.

A store is a folder: `manifest.json` (format, what it was made by), shards of finished trajectories, each written in one
go (`relaxion collect`, files that were taken in), and journals, one per process that relaxes with a memory
(`journal.py`). Files are only ever added. Several processes may add at the same time; whoever is killed leaves whole
shards and at most one torn record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relaxion.database.journal import Contents, read_journal
from relaxion.database.trajectory import Trajectory, trajectory_of
from relaxion.errors import FileError
from relaxion.files import Format, Stored, check_regular, decoded, json_of, part_of, replace_file
from relaxion.settings import shown
from relaxion.structures import Outcome
from relaxion.version import __version__

FORMAT = Format(version=1, error=FileError, advice="remove this shard: the others stay usable")
MANIFEST = "manifest.json"
KIND = "trajectories"
SHARD = "shard-"
JOURNAL = "journal-"
JOURNAL_SUFFIX = ".rxj"
MOST_ROWS = 2**31  # steps, or atoms, of one relaxation
MOST_TRIES = 20  # to make a folder that others make too
SECONDS_BETWEEN_TRIES = 0.02
Note = Callable[[str], None]
_numbers = count()


class TrajectoryStore:
    """`TrajectoryStore.create(path, description)` or `.open(path)`; then `append` and iterate."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, path: str | Path, description: Mapping[str, Any]) -> TrajectoryStore:
        """A new, empty store; `description` (plain values) says what fills it."""
        path = Path(path)
        if (path / MANIFEST).exists():
            raise FileError(f"{path} holds a store already; open it, or choose another folder")
        manifest = {
            "relaxion_kind": "trajectory store",
            "format_version": FORMAT.version,
            "relaxion": __version__,
            "torch": torch.__version__.split("+")[0],
            "description": dict(description),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise FileError(f"{path} is not empty and holds no store; choose another folder")
            replace_file(path / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        except OSError as error:
            raise FileError(f"the store {path} cannot be made: {error.strerror}; choose another folder") from error
        return cls(path, manifest)

    @classmethod
    def open_or_create(cls, path: str | Path, description: Mapping[str, Any]) -> TrajectoryStore:
        """The one that is there, or a new one; several processes may come at once."""
        for _ in range(MOST_TRIES):
            if (Path(path) / MANIFEST).exists():
                break
            try:
                return cls.create(path, description)
            except FileError:  # somebody else has just made it, or is about to; or it cannot be made
                time.sleep(SECONDS_BETWEEN_TRIES)
        return cls.open(path) if (Path(path) / MANIFEST).exists() else cls.create(path, description)

    @classmethod
    def open(cls, path: str | Path) -> TrajectoryStore:
        """An existing store, if this relaxion understands it."""
        path = Path(path)
        try:
            manifest = json_of(path / MANIFEST)
        except FileNotFoundError as error:
            missing = (
                f"{path} holds no store (no {MANIFEST})"
                if path.exists()
                else f"there is no store of relaxations {path}"
            )
            raise FileError(f"{missing}; relaxing with `memory={path}` makes one") from error
        except (OSError, ValueError) as error:
            raise FileError(f"{path / MANIFEST} cannot be read: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("relaxion_kind") != "trajectory store":
            raise FileError(f"{path / MANIFEST} was not written by relaxion")
        version = manifest.get("format_version")
        if version != FORMAT.version:
            raise FileError(
                f"the store {path} has format version {shown(version)}, this relaxion reads {FORMAT.version}; "
                "collect it again, or read it with the relaxion that wrote it"
            )
        return cls(path, manifest)

    @property
    def description(self) -> dict[str, Any]:
        description = self.manifest.get("description")
        return dict(description) if isinstance(description, dict) else {}

    def append(
        self,
        trajectories: Sequence[Trajectory],
        skipped: Mapping[str, str] | None = None,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        """One new shard. `skipped`: keys of starts that gave no trajectory, with the reason; they count as done.

        `cost`: what was spent since the last shard, `force_calls` and `cpu_seconds`.
        """
        trajectories = list(trajectories)
        skipped = dict(skipped or {})
        if not trajectories and not skipped:
            return
        about = [_described(trajectory) for trajectory in trajectories]
        # the clock first, so that shards sort by age; process and number keep writers apart
        name = f"{SHARD}{time.time_ns():020d}-{os.getpid()}-{next(_numbers)}.safetensors"
        values = {"about": about, "skipped": skipped, "cost": dict(cost or {})}
        FORMAT.write(self.path / name, KIND, _flat(trajectories) if trajectories else {}, values)

    def keys(self) -> set[str]:
        """Of all trajectories, and of starts that were skipped: what need not be done again."""
        found = {entry["key"] for entry in self.about()}
        return found.union(*(values["skipped"] for values in self._headers()))

    def skipped(self) -> dict[str, str]:
        """Starts that gave no trajectory: key and reason."""
        return {key: reason for values in self._headers() for key, reason in values["skipped"].items()}

    def about(self) -> list[dict[str, Any]]:
        """Key, kind, engine, outcome, cell_free, n_steps, n_atoms of each trajectory; no tensor is made."""
        return [entry for _, entry in self._best().values()]

    def cost(self) -> dict[str, float]:
        """What all of it took: `force_calls` and `cpu_seconds`, as far as it was written down."""
        total = {"force_calls": 0.0, "cpu_seconds": 0.0}
        for values in self._headers():
            for name, spent in values["cost"].items():
                total[name] = total.get(name, 0.0) + spent
        return total

    def __len__(self) -> int:
        return len(self.about())

    def __iter__(self) -> Iterator[Trajectory]:
        """All trajectories, oldest file first; a key that occurs twice comes once. FileError at a damaged shard."""
        return self.trajectories()

    def trajectories(self, note: Note | None = None) -> Iterator[Trajectory]:
        """The same; with `note` what is damaged is left out, with a sentence each."""
        best = {key: path for key, (path, _) in self._best(note).items()}
        for path in [*self.shards(), *self.journals()]:
            for trajectory in self._read(path, note):
                if best.get(trajectory.key) == path:
                    del best[trajectory.key]
                    yield trajectory

    def _best(self, note: Note | None = None) -> dict[str, tuple[Path, dict[str, Any]]]:
        """By key: the file with its fullest trajectory, and what is said of it there."""
        best: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in [*self.shards(), *self.journals()]:
            for entry in self._about(path, note):
                if entry["key"] not in best or _fullness(entry) > _fullness(best[entry["key"]][1]):
                    best[entry["key"]] = path, entry
        return best

    def _about(self, path: Path, note: Note | None) -> list[dict[str, Any]]:
        if path.suffix == JOURNAL_SUFFIX:
            return [_described(trajectory) for trajectory in self._journal(path, note)]
        try:
            return self._header(path)["about"]
        except FileError as error:
            if note is None:
                raise
            note(f"{error}; it was left out")
            return []

    def _read(self, path: Path, note: Note | None) -> list[Trajectory]:
        if path.suffix == JOURNAL_SUFFIX:
            return self._journal(path, None)
        try:
            return self._trajectories(path)
        except FileError as error:
            if note is None:
                raise
            if not str(error).startswith(f"{path} is damaged or no s"):  # said already
                note(f"{error}; it was left out")
            return []

    def _trajectories(self, path: Path) -> list[Trajectory]:
        stored = FORMAT.read(path, KIND)
        try:
            return list(_trajectories(Stored(stored.tensors, _checked(stored.values))))
        except (KeyError, ValueError, RuntimeError, IndexError) as error:  # torch says RuntimeError of sizes
            raise FileError(f"{path} does not hold what it says ({error}); {FORMAT.advice}") from error

    def _journal(self, path: Path, note: Note | None) -> list[Trajectory]:
        """The fullest of each key; a journal is read as far as it is whole."""
        try:
            contents = read_journal(path)
        except OSError as error:
            if note is not None:
                note(f"{path} cannot be read ({error.strerror}); it was left out")
            return []
        if note is not None and contents.n_damaged_bytes:
            note(f"{path}: {contents.n_damaged_bytes} damaged bytes were left out, all else was read")
        return _fullest(contents)

    def shards(self) -> list[Path]:
        """Whole ones; what a writer is busy with has another name."""
        return sorted(self.path.glob(f"{SHARD}*.safetensors"))

    def journals(self) -> list[Path]:
        """Of processes that relax or have relaxed with this folder as their memory."""
        return sorted(self.path.glob(f"{JOURNAL}*{JOURNAL_SUFFIX}"))

    def sweep(self, older_than_seconds: float = 600.0) -> None:
        """Remove what killed writers left unfinished."""
        for path in self.path.glob(part_of(self.path / f"{SHARD}*").name):
            if time.time() - path.stat().st_mtime > older_than_seconds:
                path.unlink(missing_ok=True)

    def _headers(self) -> Iterator[dict[str, Any]]:
        return (self._header(path) for path in self.shards())

    def _header(self, path: Path) -> dict[str, Any]:
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {})["relaxion_values"]
            return _checked(decoded(text))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is damaged or not a shard ({error}); {FORMAT.advice}") from error


def _described(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "key": trajectory.key,
        "kind": trajectory.kind,
        "engine": trajectory.engine,
        "outcome": int(trajectory.outcome),
        "cell_free": bool(trajectory.cell_free),
        "n_steps": len(trajectory),
        "n_atoms": trajectory.n_atoms,
    }


def _fullness(entry: Mapping[str, Any]) -> tuple[bool, int]:
    """An interrupted relaxation that was made again is in the store twice: once in part, once whole."""
    return entry["outcome"] == Outcome.CONVERGED, entry["n_steps"]


def _fullest(contents: Contents) -> list[Trajectory]:
    best: dict[str, Trajectory] = {}
    for entry in contents.entries.values():
        if entry.points:
            found = trajectory_of(entry)
            known = best.get(found.key)
            if known is None or _fullness(_described(found)) > _fullness(_described(known)):
                best[found.key] = found
    return list(best.values())


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


def _flat(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Few long tensors instead of many short ones: a shard is read in milliseconds."""
    named = {name: torch.cat([getattr(t, name) for t in trajectories]) for name in (*_PER_ATOM, *_PER_STRUCTURE)}
    named |= {name: torch.cat([getattr(t, name).reshape(-1, 3) for t in trajectories]) for name in _PER_STEP_AND_ATOM}
    return named | {"pbc": torch.stack([t.pbc for t in trajectories])}


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
