"""GFN2-xTB, tight binding for molecules, by the package `tblite`; one structure after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import CalculationFailed

from relaxion.errors import PotentialError, StructureError
from relaxion.potentials.base import AsePotential
from relaxion.structures import Evaluation, Structures

LAST_ELEMENT = 86  # Rn
# tblite's 1.0 leaves 4e-4 eV/Å of noise in forces, as each answer starts from the electrons of the last one; 0.1: 2e-5
ACCURACY = 0.1


class Gfn2(AsePotential):
    """C. Bannwarth, S. Ehlert, S. Grimme, J. Chem. Theory Comput. 15, 1652 (2019). Neutral, and without unpaired
    electrons where their number is even, unless the options say otherwise (`charge`, `multiplicity`).

    Structures are periodic along all three axes or along none.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `tblite.ase.TBLite`, such as charge, multiplicity, accuracy, electronic_temperature."""
        from tblite.ase import TBLite

        asked = {"method": "GFN2-xTB", "verbosity": 0, "accuracy": ACCURACY, **options}
        super().__init__(TBLite(**asked))
        self.name = "GFN2-xTB"
        self._given = frozenset(options)

    @property
    def elements(self) -> frozenset[int]:
        return frozenset(range(1, LAST_ELEMENT + 1))

    def check_elements(self, structures: Structures) -> None:
        """And that each structure is periodic along all axes or none: tblite takes one axis for all three."""
        super().check_elements(structures)
        partly = structures.periodic.any(dim=1) & ~structures.periodic.all(dim=1)
        if partly.any():
            first = int(partly.nonzero()[0])
            number = int(structures.periodic[first].sum())
            raise StructureError(
                f"structure {first} is periodic along {number} of 3 axes, but {self.name} along all or none; "
                "give it a cell with vacuum and pbc=True"
            )

    def assumption(self, atoms: Atoms) -> str | None:
        """The spin of an odd number of electrons, unless charge, multiplicity or magnetic moments were given."""
        if {"charge", "multiplicity"} & self._given or round(atoms.get_initial_magnetic_moments().sum()):
            return None
        charge = float(atoms.get_initial_charges().sum())
        if (int(atoms.numbers.sum()) - round(charge)) % 2 == 0:
            return None
        return (
            f"an odd number of electrons: {self.name} takes it as a radical of charge {charge:g} with one unpaired "
            "electron (multiplicity 2); if it is an ion, give the calculator its charge"
        )

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        # a box around a molecule means nothing here, and tblite gives no stress for it
        cells = torch.where(structures.periodic.all(dim=1)[:, None, None], structures.cells, 0.0)
        try:
            return super().evaluate(replace(structures, cells=cells), stresses)
        except CalculationFailed as error:
            raise PotentialError(f"{self.name} has no answer: {error}; are atoms too close to each other?") from error
