"""Calculators around a calculator: one counts calls, one starts a program anew.

Every optimizer that is measured talks to the first; nobody can go around it. The second is for programs that keep what
they made for the first cell. Plane-wave codes that stay up between force calls keep the plane waves, and some the
k-points, of the cell they were started with. pw.x 6.7 makes plane waves anew once the volume has changed by 10 % and
keeps the old k-points: from there on its energies are wrong by tenths of an eV.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, Calculator, PropertyNotImplementedError, all_changes

from relaxion.errors import PotentialError, RelaxionError
from relaxion.potentials.base import AsePotential, Potential, PotentialCalculator, close_calculator


class CalculatorFailed(PotentialError):
    """The calculator raised an exception, or answered with something that is not an answer."""


class CallLimitReached(Exception):
    """All force calls that were granted are spent; the calculator answers no more."""


@dataclass(frozen=True, eq=False)
class Answered:
    """A structure and what the calculator said about it."""

    atoms: Atoms
    answer: dict[str, Any]
    pressure: float = 0.0  # eV/Å³, that acts on its cell

    @property
    def energy(self) -> float:
        """The one that belongs to the forces, eV."""
        return self.answer["free_energy"]

    @property
    def pressure_volume(self) -> float:
        """What the pressure adds to the energy, eV."""
        return self.pressure * self.atoms.get_volume() if self.pressure else 0.0

    @property
    def finite(self) -> bool:
        return all(np.isfinite(value).all() for value in self.answer.values())


class CountingCalculator(Calculator):
    """One structure evaluated is one force call, whatever is asked of it and however often.

    A deep copy is the counter itself, and evaluations that reach the potential by another way are charged too.
    """

    def __init__(self, potential: Potential, *, stress: bool, limit: int | None = None, pressure: float = 0.0) -> None:
        """`limit`: most force calls; None: no end. `pressure`: eV/Å³, of a free cell."""
        super().__init__()
        self.limit = limit
        self.pressure = pressure
        self.seconds = 0.0  # spent inside, waiting for answers
        self.busy_seconds = 0.0  # the same in processor time
        self.potential_name = potential.name
        self.implemented_properties = ["energy", "free_energy", "forces", *(["stress"] if stress else [])]
        self.inner: Any = ase_calculator(potential)
        self.potential = potential
        self._calls_before = potential.calls
        self._asked = 0
        self.answers = 0  # fewer than calls where it failed or was interrupted
        self.last: Answered | None = None
        self.lowest: Answered | None = None  # in enthalpy, of the finite ones; the later of equals
        self.on_answer: Callable[[Answered], None] | None = None  # told of each answer, at no cost in calls

    @property
    def calls(self) -> int:
        """Force calls: questions asked here, or structures the potential itself has counted, if those are more."""
        return max(self._asked, self.potential.calls - self._calls_before)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def calculate(self, atoms: Any = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        if self.limit is not None and self.calls >= self.limit:
            raise CallLimitReached(f"all {self.limit} force calls are spent")
        self._asked += 1
        began = time.perf_counter()
        busy = time.process_time()
        try:
            self.results = self._ask(atoms)
        except Exception as error:  # calculators of other packages may raise anything
            raise CalculatorFailed(
                f"calculator {self.potential_name} failed at force call {self.calls}: {error_in_words(error)}"
            ) from error
        finally:
            self.seconds += time.perf_counter() - began
            self.busy_seconds += time.process_time() - busy
        self._remember(Answered(self.atoms, self.results, self.pressure))  # pyright: ignore[reportArgumentType] - not None here

    def _remember(self, point: Answered) -> None:
        self.answers += 1
        self.last = point
        enthalpies = [one.energy + one.pressure_volume for one in (point, self.lowest) if one is not None]
        if point.finite and enthalpies[0] <= enthalpies[-1]:
            self.lowest = point
        if self.on_answer is not None:
            self.on_answer(point)

    def _ask(self, atoms: Atoms) -> dict[str, Any]:
        """Everything in one go: an energy, then forces, then a stress are one force call, not three."""
        answer: dict[str, Any] = {}
        if "stress" in self.implemented_properties:  # first: where a stress costs extra, forces come with it
            answer["stress"] = np.array(self.inner.get_stress(atoms), dtype=float)
        forces = np.array(self.inner.get_forces(atoms), dtype=float)
        if forces.shape != (len(atoms), 3):
            raise CalculatorFailed(f"forces of shape {forces.shape} for {len(atoms)} atoms")
        answer |= {"energy": float(self.inner.get_potential_energy(atoms)), "forces": forces}
        answer["free_energy"] = self._free_energy(atoms, answer["energy"])
        return answer

    def _free_energy(self, atoms: Atoms, energy: float) -> float:
        """The energy that belongs to the forces; the same as the energy where the calculator knows one only."""
        if not isinstance(self.inner, BaseCalculator):
            return energy
        try:
            answer: Any = self.inner.get_potential_energy(atoms, force_consistent=True)
            return float(answer)
        except PropertyNotImplementedError:
            return energy


def ase_calculator(potential: Potential) -> BaseCalculator:
    """The user's own ASE calculator as it is, or a batched potential as one."""
    if isinstance(potential, AsePotential):
        return potential.calculator
    return PotentialCalculator(potential)


def error_in_words(error: Exception) -> str:
    """Our own errors are sentences already; those of others are named."""
    if isinstance(error, RelaxionError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


LONGEST_VALUE = 400  # characters of one parameter


def details_of(thing: object) -> dict[str, Any]:
    """Of a potential or of any ASE calculator, seen through the wrappers of this package."""
    if isinstance(thing, CountingCalculator):
        return details_of(thing.potential)
    if isinstance(thing, PotentialCalculator):
        return details_of(thing.potential)
    if isinstance(thing, AsePotential):
        return details_of(thing.calculator) | _options(thing)
    if isinstance(thing, Potential):
        return {"name": thing.name, **_table(thing), **_options(thing)}
    if thing is None:
        return {"name": "unknown"}
    module = type(thing).__module__
    plain = {"name": type(thing).__name__, "class": f"{module}.{type(thing).__qualname__}"}
    return plain | package_version(module.partition(".")[0]) | _parameters(thing)


def fingerprint(details: Mapping[str, Any]) -> str:
    """Of name and settings; the version of a package may change."""
    known = {name: value for name, value in details.items() if name != "version"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _options(potential: Potential) -> dict[str, Any]:
    return {"options": dict(potential.options)} if potential.options else {}


def _table(potential: Potential) -> dict[str, str]:
    sha256 = getattr(potential, "tables_sha256", None)  # of tabulated potentials
    return {} if sha256 is None else {"sha256": sha256}


def _parameters(calculator: object) -> dict[str, Any]:
    given = getattr(calculator, "parameters", None)
    plain = {str(name): value for name, value in given.items()} if isinstance(given, dict) else {}
    text = json.dumps({name: _plain(value) for name, value in plain.items()}, sort_keys=True, default=str)
    known = json.loads(text)
    return {"parameters": known} if known else {}


def _plain(value: Any) -> Any:
    """Numbers, words and lists of them as they are; of everything else its words, which must not name an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value][:LONGEST_VALUE]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    words = str(value)
    return type(value).__name__ if " at 0x" in words else words[:LONGEST_VALUE]


@lru_cache(maxsize=64)
def package_version(package: str) -> dict[str, str]:
    """Under "version"; empty where it is not installed as a package."""
    try:
        return {"version": version(package)}
    except PackageNotFoundError:
        return {}


MOST_CELL_CHANGE = 0.06  # of the volume, or of a length in any direction; pw.x errs from 0.10


class RelaunchedCalculator(Calculator):
    """Asks a calculator made by `make`, and makes another one before the cell has changed by `most_cell_change`."""

    def __init__(self, make: Callable[[], Calculator], most_cell_change: float = MOST_CELL_CHANGE) -> None:
        """`make`: without arguments, called at the first force call and whenever the cell has changed too much."""
        super().__init__()
        self.implemented_properties = ["energy", "free_energy", "forces", "stress"]
        self.make = make
        self.most_cell_change = most_cell_change
        self.inner: Calculator | None = None  # what is asked now
        self.launches = 0
        self._launched_with: np.ndarray | None = None  # (3, 3) Å, rows are cell vectors

    def calculate(
        self, atoms: Atoms | None = None, properties: Sequence[str] = ("energy",), system_changes: Any = all_changes
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        cell = np.array(self.atoms.cell)
        if self._launched_with is not None and cell_change(self._launched_with, cell) >= self.most_cell_change:
            self.close()
        if self.inner is None:
            self.inner = self.make()
            self._launched_with = cell
            self.launches += 1
        try:
            for name in properties:
                self.inner.get_property(name, self.atoms)
        except Exception:
            self.close()  # a program that gave up answers no more: another one may, at another place
            raise
        self.results = dict(self.inner.results)

    def close(self) -> None:
        """End the program; the next force call starts another one."""
        if self.inner is not None:
            close_calculator(self.inner)
        self.inner = None
        self._launched_with = None


def cell_change(before: np.ndarray, after: np.ndarray) -> float:
    """Largest relative change of the volume and of lengths in any direction. Rotations do not count.

    Cells without a volume (molecules, slabs without a third vector) are compared by their vectors.
    """
    if np.linalg.matrix_rank(before) < 3:
        size = float(np.linalg.norm(before, axis=1).max())
        return float(np.abs(after - before).max()) / size if size else float(np.any(after))
    stretches = np.linalg.svd(np.linalg.solve(before, after), compute_uv=False)
    return float(max(np.abs(stretches - 1.0).max(), abs(stretches.prod() - 1.0)))
