"""matcalc's `RelaxCalc` with relaxion: `optimizer=Relaxer`."""

from ase.calculators.emt import EMT
from comparison import FMAX, alloy, compare
from matcalc import RelaxCalc


def relax(optimizer, cell):
    host = RelaxCalc(EMT(), optimizer=optimizer, relax_cell=cell, fmax=FMAX)
    return host.calc(alloy())["energy"]


if __name__ == "__main__":
    compare(relax, EMT, "FIRE")
