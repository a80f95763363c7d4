"""What a relaxation leaves on disk: restart files, and its trajectory in a database.

Restart files are JSON, written whole or not at all, refused with a sentence when foreign or damaged. A database gets
what the calculator has answered already; nothing is asked for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import Filter, UnitCellFilter

from relaxion.database import USER, EvaluatedPoint, Recording, RelaxationDatabase, key_of
from relaxion.errors import RestartError
from relaxion.files import json_of
from relaxion.optimizer.point import Array, bare_atoms, read_energy, read_geometry
from relaxion.potentials.counting import details_of
from relaxion.settings import shown
from relaxion.structures.structures import LARGEST_EXTENT, SMALLEST_VOLUME
from relaxion.structures.trajectory import RelaxationStart

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


def database_at(given: str | Path | RelaxationDatabase | None) -> RelaxationDatabase | None:
    """The database that `database=` names. FileError where that is no folder for one."""
    return given if given is None or isinstance(given, RelaxationDatabase) else RelaxationDatabase.at(given)


class Remembered:
    """One relaxation of atoms, or of a cell filter around them."""

    def __init__(
        self, database: RelaxationDatabase, target: Atoms | Filter, policy: str, potential: object = None, key: str = ""
    ) -> None:
        """`potential`: who answers, if not the calculator of the atoms; `key`: of the relaxation, if it has one."""
        self.database = database
        self.target = target
        self.policy = policy
        self.key = key
        self._details = None if potential is None else details_of(potential)
        self._recording: Recording | None = None
        self.fmax = 0.0  # eV/Å, of the run

    def point(self, number: int, base: int | None) -> None:
        """The atoms are at the evaluated point `number`; its step began at the point `base`, None at a start."""
        atoms = bare_atoms(self.target)
        results = getattr(atoms.calc, "results", None)
        results = results if isinstance(results, dict) else {}
        self.answered(number, base, read_energy(atoms), _forces(atoms, results), _six(results.get("stress")))

    def answered(self, number: int, base: int | None, energy: float, forces: Array, stress: Array | None) -> None:
        """The same, with what the calculator said; `stress`: six components."""
        atoms = bare_atoms(self.target)
        if self._recording is None:
            self._recording = self.database.begin(self._beginning(atoms))
        told = EvaluatedPoint(
            base=-1 if base is None else base,
            energy=energy,
            positions=np.array(atoms.positions),
            forces=forces,
            stress=stress,
            cell=np.array(atoms.cell) if isinstance(self.target, UnitCellFilter) else None,
        )
        self._recording.point(number, told)

    def end(self, outcome: int) -> None:
        """How it stands."""
        if self._recording is not None:
            self._recording.end(outcome)

    def _beginning(self, atoms: Atoms) -> RelaxationStart:
        geometry = read_geometry(self.target)
        free = np.ones((len(atoms), 3), bool) if geometry is None else geometry.free[: len(atoms)]
        start = {
            "numbers": atoms.numbers,
            "positions": atoms.positions,
            "cell": np.asarray(atoms.cell),
            "pbc": atoms.pbc,
            "free": free,
        }
        details = self._details or details_of(atoms.calc)
        cell_free = isinstance(self.target, UnitCellFilter)
        who = {"calculator": details, "cell_free": cell_free, "policy": self.policy}
        if pressure := float(getattr(self.target, "scalar_pressure", 0.0)):
            who["pressure"] = pressure  # eV/Å³; another relaxation of the same start
        key = self.key or key_of(start | who)
        return RelaxationStart(
            key=key,
            kind=USER,
            calculator=details,
            fmax=self.fmax,
            cell_free=cell_free,
            numbers=np.array(atoms.numbers, dtype=np.int64),
            pbc=np.array(atoms.pbc),
            movable=np.asarray(free.any(axis=1)),
            cell=np.array(atoms.cell),
            policy=self.policy,
        )


def _forces(atoms: Atoms, results: dict[str, Any]) -> Array:
    """As the calculator said them, before constraints, where it keeps them."""
    raw = results.get("forces")
    known = raw is not None and np.shape(raw) == (len(atoms), 3)
    return np.array(raw if known else atoms.get_forces(), dtype=np.float64)


def _six(stress: Any) -> Array | None:
    """None where the calculator did not compute it: asking would be a call."""
    if stress is None or np.shape(stress) not in ((6,), (3, 3)):
        return None
    return np.asarray(stress, dtype=np.float64).flat[[0, 4, 8, 5, 2, 1]] if np.ndim(stress) == 2 else np.asarray(stress)
