"""What ASE's own optimizers need from the same starts: the lines every learning curve is to be read against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.filters import FrechetCellFilter

from relaxion.errors import FileError
from relaxion.files import json_of
from relaxion.potentials.ase import PotentialCalculator
from relaxion.potentials.potential import Potential
from relaxion.settings import shown
from relaxion.structures import Structures


def read_baselines(file: Path, names: Sequence[str] | None = None) -> dict[str, float]:
    """Mean force calls by optimizer, as the run wrote them down at its start; all of them, or those of these names."""
    try:
        plain = json_of(file)
        return {name: float(plain[name]["mean_force_calls"]) for name in (plain if names is None else names)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FileError(f"{file} cannot be read ({shown(error)}); remove it, and the run measures again") from error


class _CapReached(Exception):
    """More force calls than a relaxation may have."""


class _Counting(PotentialCalculator):
    """Counts every structure evaluated, and answers no more than `cap` times."""

    def __init__(self, potential: Potential, cap: int) -> None:
        super().__init__(potential)
        self.force_calls, self.cap = 0, cap

    def calculate(self, *args: Any, **kwargs: Any) -> None:
        if self.force_calls >= self.cap:
            raise _CapReached
        self.force_calls += 1
        super().calculate(*args, **kwargs)


@dataclass(frozen=True)
class Calls:
    """Force calls of one optimizer on each start; failures are charged the cap."""

    force_calls: tuple[int, ...]
    failures: int
    energies_ev: tuple[float | None, ...] = ()  # where it converged

    @property
    def mean(self) -> float:
        return float(np.mean(self.force_calls))

    @property
    def median(self) -> float:
        return float(np.median(self.force_calls))

    def as_plain(self) -> dict[str, Any]:
        """For baselines.json; start by start too, in the order of the assessment."""
        return {
            "mean_force_calls": self.mean,
            "median_force_calls": self.median,
            "failures": self.failures,
            "force_calls": list(self.force_calls),
            "energy_ev": list(self.energies_ev),
        }


def ase_calls(name: str, starts: Structures, potential: Potential, fmax: float, cap: int) -> Calls:
    """Run an optimizer of ase.optimize with its defaults from every start."""
    import ase.optimize  # here: it loads matplotlib

    kind = getattr(ase.optimize, name)
    results = [_relaxed(kind, atoms, free, potential, fmax, cap) for atoms, free in _with_cells(starts)]
    calls, energies = tuple(calls for calls, _ in results), tuple(energy for _, energy in results)
    return Calls(calls, sum(energy is None for energy in energies), energies)


def _with_cells(starts: Structures) -> Sequence[tuple[Atoms, bool]]:
    return list(zip(starts.to_ase(), starts.cell_free.tolist(), strict=True))


def _relaxed(
    kind: Any, atoms: Atoms, free: bool, potential: Potential, fmax: float, cap: int
) -> tuple[int, float | None]:
    """Force calls and the energy reached; the cap and None where it did not converge."""
    atoms.calc = calculator = _Counting(potential, cap)
    try:
        converged = kind(FrechetCellFilter(atoms) if free else atoms, logfile=None).run(fmax=fmax, steps=cap)
    except (_CapReached, RuntimeError):  # some report failure that way
        converged = False
    return (calculator.force_calls, float(calculator.results["energy"])) if converged else (cap, None)
