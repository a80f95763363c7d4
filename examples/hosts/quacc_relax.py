"""quacc's recipes with relaxion: `opt_params={"optimizer": Relaxer}`; log, trajectory, restart file are quacc's."""

from ase.calculators.emt import EMT
from ase.optimize import BFGS
from comparison import FMAX, alloy, compare
from quacc.recipes.emt.core import relax_job


def relax(optimizer, cell):
    answer = relax_job(alloy(), relax_cell=cell, opt_params={"optimizer": optimizer, "fmax": FMAX})
    return answer["results"]["energy"]


if __name__ == "__main__":
    compare(relax, EMT, BFGS)
