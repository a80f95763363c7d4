"""Swap BFGS for Relaxer in a script that you have, and count what it saves."""

from ase.build import add_adsorbate, fcc111
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.optimize import BFGS

from relaxion import Relaxer


class CountedEMT(EMT):
    """Counts inside the calculator: what is counted here was really computed."""

    calls = 0

    def calculate(self, *args, **kwargs):
        self.calls += 1
        super().calculate(*args, **kwargs)


def slab():
    """Gold on copper(111), shaken; the lowest layer is fixed."""
    atoms = fcc111("Cu", (3, 3, 3), vacuum=6)
    add_adsorbate(atoms, "Au", 2.3, "fcc")
    atoms.set_constraint(FixAtoms([atom.index for atom in atoms if atom.tag == 3]))
    atoms.rattle(0.1, seed=1)
    atoms.calc = CountedEMT()
    return atoms


def relax(optimizer):
    """Everything but the first word of the second line stays as it was."""
    atoms = slab()
    opt = optimizer(atoms, logfile=None, trajectory=f"{optimizer.__name__}.traj")
    converged = opt.run(fmax=0.05, steps=200)
    energy = atoms.get_potential_energy()
    print(f"{optimizer.__name__:8} converged: {converged}, {atoms.calc.calls:2} force calls, energy {energy:.3f} eV")
    return atoms


if __name__ == "__main__":
    theirs = relax(BFGS)
    ours = relax(Relaxer)
    apart = abs(ours.get_distances(-1, slice(0, 27)) - theirs.get_distances(-1, slice(0, 27))).max()
    print(f"the same place: distances from the gold atom differ by at most {apart:.3f} Å")
