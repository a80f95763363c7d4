"""Relax a structure of your own: the atoms, then the atoms and the cell."""

from pathlib import Path

from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.io import read, write

from relaxion import Relaxer

STRUCTURE = Path(__file__).parents[1] / "alloy.cif"  # or your POSCAR, CIF, extxyz: whatever ASE reads


def relax_atoms():
    """The cell stays as it is."""
    atoms = read(STRUCTURE)
    atoms.calc = EMT()  # any ASE calculator
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.05)  # eV/Å
    print(f"fixed cell: {opt.outcome.label}, {opt.force_calls} force calls, policy: {opt.policy_used}")
    for entry in opt.history:
        print(f"  call {entry.call}: fmax {entry.fmax_ev_per_angstrom:6.3f} eV/Å, by {entry.method}")
    return opt


def relax_cell():
    """Atoms and cell together; the filter is ASE's."""
    atoms = read(STRUCTURE)
    atoms.calc = EMT()
    before = atoms.get_volume()
    opt = Relaxer(FrechetCellFilter(atoms), logfile=None)
    opt.run(fmax=0.05)
    change = 100 * (atoms.get_volume() / before - 1)
    print(f"free cell: {opt.outcome.label}, {opt.force_calls} force calls, volume {change:+.1f} %")
    return opt


if __name__ == "__main__":
    relaxed = relax_atoms()
    write("relaxed.extxyz", relaxed.atoms)  # with energy and forces
    relax_cell()
