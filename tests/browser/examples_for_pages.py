"""What the pages of these tests show."""

from __future__ import annotations

import numpy as np
from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion import Relaxer

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def thousand_atoms() -> Relaxer:
    """Two steps of a relaxation of 1000 atoms."""
    atoms = bulk("Cu", a=3.7, cubic=True) * (5, 5, 10)
    atoms.positions += np.random.default_rng(1).normal(0, 0.1, atoms.positions.shape)
    atoms.calc = EMT()
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.01, steps=2)
    return opt
