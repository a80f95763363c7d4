"""Calculators that misbehave about chosen structures, as `--calc hostile_calculators:NAME`.

What a structure meets is told by its elements, so that the same structure meets the same trouble in every run.
"""

import os
import signal
import time

import numpy as np
from ase.calculators.calculator import all_changes
from ase.calculators.emt import EMT

from relaxion.potentials.emt import Emt

RAISES, NAN, SHAPE, HANGS, KILLS = 1, 6, 7, 8, 46  # H, C, N, O, Pd: that many atomic numbers mean trouble


class HostileEMT(EMT):
    """ASE's EMT, asked one structure at a time."""

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        misbehave(atoms.numbers)
        if NAN in atoms.numbers:
            self.results["forces"] = np.full_like(self.results["forces"], np.nan)
        if SHAPE in atoms.numbers:
            self.results["forces"] = self.results["forces"][:-1]


class HostileBatch(Emt):
    """Our EMT, asked about many structures at once."""

    def pair_terms(self, distances, kinds):
        misbehave(self.numbers)
        return super().pair_terms(distances, kinds)

    def kinds_of(self, atomic_numbers):
        self.numbers = atomic_numbers.numpy()
        return super().kinds_of(atomic_numbers)


def misbehave(numbers):
    if RAISES in numbers:
        raise RuntimeError("the licence server is away")
    if HANGS in numbers:
        time.sleep(3600)
    if KILLS in numbers:
        os.kill(os.getpid(), signal.SIGKILL)
