"""Makes the example structures anew, the same ones every time: python examples/make_examples.py."""

from pathlib import Path

import numpy as np
from ase.build import add_adsorbate, bulk, fcc111
from ase.constraints import FixAtoms
from ase.io import write

HERE = Path(__file__).parent
ALFE_ANGSTROM = 2.9966  # edge of the cube


def alloy(generator: np.random.Generator):
    """A gold–copper alloy of 32 atoms: random sites, stretched cell, every atom displaced by about 0.15 Å."""
    atoms = bulk("Cu", a=3.75, cubic=True) * (2, 2, 2)
    atoms.symbols[generator.permutation(len(atoms))[:8]] = "Au"
    atoms.positions += generator.normal(0.0, 0.15, atoms.positions.shape)
    return atoms


def surface(generator: np.random.Generator):
    """Platinum on copper(111), 13 atoms; the lowest layer is fixed."""
    atoms = fcc111("Cu", size=(2, 2, 3), vacuum=6.0)
    add_adsorbate(atoms, "Pt", height=2.2, position="ontop")
    atoms.set_constraint(FixAtoms(mask=atoms.get_tags() == 3))
    atoms.rattle(0.05, rng=generator)
    atoms.pbc = True  # POSCAR files know no other
    return atoms


def crystal(generator: np.random.Generator):
    """Cubic AlFe, two atoms at the volume of the analytic EAM, each coordinate moved by up to 0.5 Å."""
    atoms = bulk("AlFe", "cesiumchloride", a=ALFE_ANGSTROM)
    atoms.positions += 0.5 * generator.random(atoms.positions.shape)
    return atoms


if __name__ == "__main__":
    write(HERE / "alfe.cif", crystal(np.random.default_rng(3)))
    write(HERE / "alloy.cif", alloy(np.random.default_rng(1)))
    write(HERE / "surface.vasp", surface(np.random.default_rng(2)), format="vasp")
