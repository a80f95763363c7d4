"""Any ASE calculator as a potential, and any potential as an ASE calculator."""

from __future__ import annotations

import logging
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, Calculator, all_changes

from relaxion.errors import PotentialError
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Structures

logger = logging.getLogger(__name__)

SECONDS_TO_END = 10.0  # that a program has after its socket was closed; then it is asked to end, and then made to


def close_calculator(calculator: Any) -> None:
    """As the calculator's own `close` or `with` would; what goes wrong here is said, and never hides a result."""
    close = getattr(calculator, "close", None)
    leave = getattr(calculator, "__exit__", None)
    process = getattr(getattr(calculator, "server", None), "proc", None)  # of ASE's socket calculators
    if not callable(close) and not callable(leave):
        return
    try:
        with _ended_in_time(process), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # codes end with one of their own when their socket is closed
            close() if callable(close) else leave(None, None, None)  # pyright: ignore[reportOptionalCall]
    except Exception as error:  # noqa: BLE001 - calculators of other packages may raise anything
        logger.warning("%s could not be closed: %s: %s", type(calculator).__name__, type(error).__name__, error)


@contextmanager
def _ended_in_time(process: Any) -> Iterator[None]:
    """A program in the middle of a calculation does not look at its socket, and ASE would wait for it."""
    if not isinstance(process, subprocess.Popen):
        yield
        return
    steps = [Timer(SECONDS_TO_END, process.terminate), Timer(1.5 * SECONDS_TO_END, process.kill)]
    for step in steps:
        step.daemon = True
        step.start()
    try:
        yield
    finally:
        for step in steps:
            step.cancel()


class AsePotential(Potential):
    """Asks an ASE calculator about one structure after the other."""

    stress_costs_nothing = False

    def __init__(self, calculator: BaseCalculator) -> None:
        super().__init__()
        self.calculator = calculator
        self.name = type(calculator).__name__
        known = getattr(calculator, "implemented_properties", ["forces", "stress"])
        self.has_stress = "stress" in known
        if "forces" not in known:
            raise PotentialError(f"the calculator {self.name} gives energies without forces; use one that gives both")

    def close(self) -> None:
        """End what is alive behind the calculator, such as the program of one of ASE's socket calculators."""
        close_calculator(self.calculator)

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        energies, forces, tensors = [], [], []
        for atoms in structures.to_ase():
            atoms.set_constraint()  # raw forces; constraints are the business of whoever moves
            atoms.calc = self.calculator
            forces.append(atoms.get_forces())
            energies.append(atoms.get_potential_energy())
            if stresses:
                tensors.append(atoms.get_stress(voigt=False) if atoms.cell.rank == 3 else np.zeros((3, 3)))
        self._check_shapes(structures, forces)
        return Evaluation(
            energies=torch.tensor(energies, dtype=structures.dtype),
            forces=torch.from_numpy(np.concatenate(forces)).to(structures.dtype),
            stresses=torch.from_numpy(np.stack(tensors)).to(structures.dtype) if stresses else None,
        )

    def _check_shapes(self, structures: Structures, forces: list[np.ndarray]) -> None:
        for number, (given, count) in enumerate(zip(forces, structures.counts.tolist(), strict=True)):
            if np.shape(given) != (count, 3):
                raise PotentialError(
                    f"{self.name} answered with forces of shape {np.shape(given)} for structure {number}, "
                    f"which has {count} atoms"
                )


class PotentialCalculator(Calculator):
    """A Relaxion potential as an ASE calculator."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential
        stress = ["stress"] if potential.has_stress else []
        self.implemented_properties = ["energy", "free_energy", "forces", *stress]

    def calculate(self, atoms: Atoms | None = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        if self.atoms is None:
            raise PotentialError(f"{self.potential.name} was asked to calculate without atoms")
        bare = self.atoms.copy()
        bare.set_constraint()  # raw forces: ASE applies constraints itself
        wants_stress = "stress" in properties or None
        evaluation = self.potential(Structures.from_ase(bare), stresses=wants_stress)
        energy = float(evaluation.energies[0])
        self.results = {"energy": energy, "free_energy": energy, "forces": evaluation.forces.numpy()}
        if evaluation.stresses is not None:
            self.results["stress"] = evaluation.stresses[0].numpy().flat[[0, 4, 8, 5, 2, 1]]
