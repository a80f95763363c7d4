"""Any ASE calculator as a potential, and any potential as an ASE calculator."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, Calculator, all_changes

from relaxion.errors import PotentialError
from relaxion.potentials.ase import close_calculator
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Structures


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
