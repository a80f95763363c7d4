"""Crystals brought to the volume that a potential gives them, before they are displaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms

from relaxion.potentials.base import Potential
from relaxion.structures import Structures

FIRST_MODULUS, MODULI = 0.6, (0.03, 4.0)  # eV/Å³: 96 GPa; noble gases to diamond
LARGEST_SIZING, LARGEST_CHANGE, SIZED = 0.2, 0.8, 0.01  # of ln V: in a step, in all, and where it is good enough


class Sizing:
    """A crystal whose volume follows its pressure: Newton's method on ln V, the bulk modulus learned on the way."""

    def __init__(self, crystal: Atoms, most_calls: int) -> None:
        self.crystal, self.calls_left = crystal, most_calls
        self.log_volume = 0.0  # relative to the crystal as it was made
        self.modulus = FIRST_MODULUS
        self.last: tuple[float, float] | None = None  # log volume and pressure
        self.done = self.failed = False

    @property
    def scale(self) -> float:
        return float(np.exp(self.log_volume / 3))

    @property
    def structure(self) -> Structures:
        atoms = self.crystal.copy()
        atoms.set_cell(atoms.cell.array * self.scale, scale_atoms=True)
        return Structures.from_ase(atoms)

    def take(self, pressure: float | None) -> None:
        """The pressure (eV/Å³) at the present volume, None where the potential failed; the next volume, or the last."""
        if pressure is None or not np.isfinite(pressure):
            self.done = self.failed = True
            return
        if self.last is not None and abs(self.log_volume - self.last[0]) > 1e-6:
            slope = (self.last[1] - pressure) / (self.log_volume - self.last[0])
            self.modulus = float(np.clip(slope, *MODULI))
        self.last = self.log_volume, pressure
        step = float(np.clip(pressure / self.modulus, -LARGEST_SIZING, LARGEST_SIZING))
        self.log_volume = float(np.clip(self.log_volume + step, -LARGEST_CHANGE, LARGEST_CHANGE))
        self.calls_left -= 1
        self.done = self.calls_left <= 0 or abs(step) < SIZED


def bring_to_volume(potential: Potential, sizings: Sequence[Sizing]) -> None:
    """All of them, side by side."""
    while under_way := [sizing for sizing in sizings if not sizing.done]:
        for sizing, pressure in zip(under_way, pressures(potential, [s.structure for s in under_way]), strict=True):
            sizing.take(pressure)


def pressures(potential: Potential, structures: Sequence[Structures]) -> list[float | None]:
    """eV/Å³; None for those where the potential fails, by themselves as well as in company."""
    try:
        stresses = potential(Structures.concatenate(structures), stresses=True).stresses
        assert stresses is not None
        return (-stresses.double().diagonal(dim1=1, dim2=2).sum(dim=1) / 3).tolist()
    except Exception:  # noqa: BLE001 - engines of other packages raise what they like where a calculation fails
        if len(structures) == 1:
            return [None]
        return [pressure for one in structures for pressure in pressures(potential, [one])]
