"""pymatgen's `Structure.relax` with relaxion: `optimizer=Relaxer`."""

from ase.calculators.emt import EMT
from comparison import FMAX, alloy, compare
from pymatgen.io.ase import AseAtomsAdaptor

structure = AseAtomsAdaptor.get_structure(alloy())


def relax(optimizer, cell):
    relaxed = structure.relax(calculator=EMT(), optimizer=optimizer, relax_cell=cell, fmax=FMAX)
    return relaxed.calc.results["energy"]


if __name__ == "__main__":
    compare(relax, EMT, "FIRE")
