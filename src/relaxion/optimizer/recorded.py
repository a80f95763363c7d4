"""Relaxations on their way into a database: what a calculator has said already is written down, nothing is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import Filter, UnitCellFilter

from relaxion.database import USER, EvaluatedPoint, Recording, RelaxationDatabase, key_of
from relaxion.optimizer.point import Array, bare_atoms, read_energy, read_geometry
from relaxion.potentials.counting import details_of
from relaxion.structures.trajectory import RelaxationStart


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
