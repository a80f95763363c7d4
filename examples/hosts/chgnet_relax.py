"""CHGNet's `StructOptimizer` with relaxion: `optimizer_class=Relaxer`. The weights are in CHGNet's wheel."""

from ase.spacegroup import crystal
from chgnet.model.dynamics import CHGNetCalculator, StructOptimizer
from comparison import FMAX, compare

CELL = [4.6, 4.6, 3.05, 90, 90, 90]  # Å and degrees
rutile = crystal(["Ti", "O"], [(0, 0, 0), (0.305, 0.305, 0)], spacegroup=136, cellpar=CELL)
rutile.rattle(0.1, seed=1)
calculator = CHGNetCalculator(use_device="cpu")


def relax(optimizer, cell):
    host = StructOptimizer(model=calculator, optimizer_class=optimizer)
    answer = host.relax(rutile.copy(), relax_cell=cell, fmax=FMAX, verbose=False)
    return float(answer["trajectory"].energies[-1])


if __name__ == "__main__":
    compare(relax, CHGNetCalculator, "FIRE")
