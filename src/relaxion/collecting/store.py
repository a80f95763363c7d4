"""Finished relaxations on disk: every structure that was evaluated, for expensive potentials.

A store is a folder: `manifest.json` (format, what it was made by) and shards of trajectories that are only ever added,
each written in one go. Several processes may add at the same time; whoever is killed leaves whole shards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relaxion.errors import FileError
from relaxion.files import Format, Stored, check_regular, decoded, json_of, part_of, replace_file
from relaxion.settings import shown
from relaxion.structures import Evaluation, Structures
from relaxion.version import __version__

FORMAT = Format(version=1, error=FileError, advice="remove this shard: the others stay usable")
MANIFEST = "manifest.json"
KIND = "trajectories"
SHARD = "shard-"
MOST_ROWS = 2**31  # steps, or atoms, of one relaxation
_numbers = count()


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One relaxation, every evaluated structure of it in order; the last is its end."""

    key: str  # unique: hash of recipe, engine, kind, number
    kind: str  # "prototype", "packing", "surface", "molecule", ...
    engine: str  # "chgnet", "gfn2", "emt", ...
    outcome: int  # structures.Outcome
    cell_free: bool
    numbers: Tensor  # (n_atoms,) int64
    pbc: Tensor  # (3,) bool
    movable: Tensor  # (n_atoms,) bool
    cells: Tensor  # (T, 3, 3) Å
    positions: Tensor  # (T, n_atoms, 3) Å
    energies: Tensor  # (T,) eV
    forces: Tensor  # (T, n_atoms, 3) eV/Å
    stresses: Tensor  # (T, 3, 3) eV/Å³; zero where there is no volume

    def __len__(self) -> int:
        return len(self.energies)

    @property
    def n_atoms(self) -> int:
        return len(self.numbers)

    @property
    def structures(self) -> Structures:
        """All of its structures, as one object."""
        steps, atoms = len(self), self.n_atoms
        return Structures(
            positions=self.positions.reshape(-1, 3),
            cells=self.cells,
            periodic=self.pbc.expand(steps, 3),
            atomic_numbers=self.numbers.repeat(steps),
            structure_index=torch.arange(steps).repeat_interleave(atoms),
            movable=self.movable.repeat(steps),
            cell_free=torch.full((steps,), self.cell_free),
        )

    @property
    def evaluation(self) -> Evaluation:
        """What the potential said of them."""
        return Evaluation(self.energies, self.forces.reshape(-1, 3), self.stresses)


class TrajectoryStore:
    """`TrajectoryStore.create(path, description)` or `.open(path)`; then `append` and iterate."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def create(cls, path: str | Path, description: Mapping[str, Any]) -> TrajectoryStore:
        """A new, empty store; `description` (plain values) says what fills it."""
        path = Path(path)
        if (path / MANIFEST).exists():
            raise FileError(f"{path} holds a store already; open it, or take another folder")
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
                raise FileError(f"{path} is not empty and holds no store; take another folder")
            replace_file(path / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        except OSError as error:
            raise FileError(f"the store {path} cannot be made: {error.strerror}; take another folder") from error
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> TrajectoryStore:
        """An existing store, if this relaxion understands it."""
        path = Path(path)
        try:
            manifest = json_of(path / MANIFEST)
        except FileNotFoundError as error:
            raise FileError(f"{path} holds no store (no {MANIFEST}); make one with 'relaxion collect'") from error
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
        trajectories, skipped = list(trajectories), dict(skipped or {})
        if not trajectories and not skipped:
            return
        about = [
            {
                "key": t.key,
                "kind": t.kind,
                "engine": t.engine,
                "outcome": int(t.outcome),
                "cell_free": bool(t.cell_free),
                "n_steps": len(t),
                "n_atoms": t.n_atoms,
            }
            for t in trajectories
        ]
        # the clock first, so that shards sort by age; process and number keep writers apart
        name = f"{SHARD}{time.time_ns():020d}-{os.getpid()}-{next(_numbers)}.safetensors"
        values = {"about": about, "skipped": skipped, "cost": dict(cost or {})}
        FORMAT.write(self.path / name, KIND, _flat(trajectories) if trajectories else {}, values)

    def keys(self) -> set[str]:
        """Of all trajectories, and of starts that were skipped: what need not be done again."""
        found: set[str] = set()
        for values in self._headers():
            found |= {entry["key"] for entry in values["about"]} | set(values["skipped"])
        return found

    def skipped(self) -> dict[str, str]:
        """Starts that gave no trajectory: key and reason."""
        return {key: reason for values in self._headers() for key, reason in values["skipped"].items()}

    def about(self) -> list[dict[str, Any]]:
        """Key, kind, engine, outcome, cell_free, n_steps, n_atoms of each trajectory; no tensor is read."""
        return list({entry["key"]: entry for values in self._headers() for entry in values["about"]}.values())

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
        """All trajectories, oldest shard first; a key that occurs twice comes once."""
        seen: set[str] = set()
        for path in self.shards():
            for trajectory in self._trajectories(path):
                if trajectory.key not in seen:
                    seen.add(trajectory.key)
                    yield trajectory

    def _trajectories(self, path: Path) -> list[Trajectory]:
        stored = FORMAT.read(path, KIND)
        try:
            return list(_trajectories(Stored(stored.tensors, _checked(stored.values))))
        except (KeyError, ValueError, RuntimeError, IndexError) as error:  # torch says RuntimeError of sizes
            raise FileError(f"{path} does not hold what it says ({error}); {FORMAT.advice}") from error

    def shards(self) -> list[Path]:
        """Whole ones; what a writer is busy with has another name."""
        return sorted(self.path.glob(f"{SHARD}*.safetensors"))

    def sweep(self, older_than_seconds: float = 600.0) -> None:
        """Remove what killed writers left unfinished."""
        for path in self.path.glob(part_of(self.path / f"{SHARD}*").name):
            if time.time() - path.stat().st_mtime > older_than_seconds:
                path.unlink(missing_ok=True)

    def _headers(self) -> Iterator[dict[str, Any]]:
        for path in self.shards():
            try:
                check_regular(path)
                with safe_open(path, framework="pt") as file:
                    text = (file.metadata() or {})["relaxion_values"]
                yield _checked(decoded(text))
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                raise FileError(f"{path} is damaged or no shard ({error}); {FORMAT.advice}") from error


_KINDS: dict[str, type] = {
    "key": str, "kind": str, "engine": str, "outcome": int, "cell_free": bool, "n_steps": int, "n_atoms": int,
}  # fmt: skip


def _checked(values: Any) -> dict[str, Any]:
    """The plain values of a shard; a ValueError where they are not what `append` writes."""
    if not isinstance(values, dict):
        raise ValueError("its values have no names")
    values = {"about": [], "skipped": {}, "cost": {}} | values
    about, skipped, cost = values["about"], values["skipped"], values["cost"]
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
    atoms, steps = [entry["n_atoms"] for entry in about], [entry["n_steps"] for entry in about]
    both = [n * t for n, t in zip(atoms, steps, strict=True)]
    if not about:
        return
    parts = {name: stored.tensors[name].split(atoms) for name in _PER_ATOM}
    parts |= {name: stored.tensors[name].split(steps) for name in _PER_STRUCTURE}
    parts |= {name: stored.tensors[name].split(both) for name in _PER_STEP_AND_ATOM}
    for place, entry in enumerate(about):
        own = {name: tensors[place].clone() for name, tensors in parts.items()}
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
