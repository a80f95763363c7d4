"""What the pages of these tests show."""

from __future__ import annotations

import numpy as np
from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion import Relaxer

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def relaxed_copper(repeat: tuple[int, int, int] = (2, 1, 1), steps: int = 50) -> Relaxer:
    """Copper shaken a little and relaxed."""
    atoms = bulk("Cu", a=3.7, cubic=True) * repeat
    atoms.positions += np.random.default_rng(1).normal(0, 0.1, atoms.positions.shape)
    atoms.calc = EMT()
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.01, steps=steps)
    return opt


def thousand_atoms() -> Relaxer:
    """Two steps are enough."""
    return relaxed_copper((5, 5, 10), steps=2)
