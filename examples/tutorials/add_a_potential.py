"""Add a potential: Buckingham's for argon. Energies are enough, forces and stresses follow."""

import torch
from ase import Atoms
from ase.cluster import Icosahedron
from ase.io import write

from relaxion import Relaxer, Structures, potential
from relaxion.potentials import PairGraphPotential
from relaxion.structures.structures import per_structure_sum


class Buckingham(PairGraphPotential):
    """A·exp(-r/ρ) - C/r⁶, faded to nothing over the last 2 Å before the cutoff."""

    name = "Buckingham argon"

    def __init__(self, height_ev=1e4, range_angstrom=0.273, attraction_ev_angstrom6=63.5, cutoff_angstrom=9.0):
        super().__init__()
        self.height, self.range, self.attraction = height_ev, range_angstrom, attraction_ev_angstrom6
        self.cutoff = cutoff_angstrom

    @property
    def elements(self):
        return frozenset({18})  # other elements are refused by name

    def cutoff_for(self, structures):  # noqa: ARG002  one for all
        return self.cutoff

    def energies_of(self, distances, graph, structures):
        """Half of each pair: the graph has every pair twice."""
        inward = ((self.cutoff - distances) / 2).clamp(0, 1)
        fade = inward**2 * (3 - 2 * inward)
        pairs = fade * (self.height * torch.exp(-distances / self.range) - self.attraction / distances**6)
        return per_structure_sum(pairs / 2, graph.pair_structure, structures.n_structures)


def make():
    """For `--calc add_a_potential:make` and for recipes."""
    return Buckingham()


def largest_mistake_of_forces(engine, atoms, shift=1e-4):
    """Against the slope of the energy, by moving each atom a little: the first test of any potential, eV/Å."""
    forces = engine(Structures.from_ase([atoms])).forces
    mistake = 0.0
    for atom in range(len(atoms)):
        for axis in range(3):
            sides = [atoms.copy(), atoms.copy()]  # both are evaluated in one call
            sides[0].positions[atom, axis] -= shift
            sides[1].positions[atom, axis] += shift
            low, high = engine(Structures.from_ase(sides)).energies
            mistake = max(mistake, abs(float((low - high) / (2 * shift) - forces[atom, axis])))
    return mistake


def cluster():
    """Thirteen argon atoms, shaken."""
    atoms = Atoms(Icosahedron("Ar", 2, latticeconstant=5.3))
    atoms.rattle(0.2, seed=3)
    return atoms


if __name__ == "__main__":
    engine, atoms = potential(make()), cluster()
    print(f"forces differ from the slope of the energy by {largest_mistake_of_forces(engine, atoms):.0e} eV/Å")
    write("cluster.xyz", atoms)
    atoms.calc = engine.as_calculator()
    opt = Relaxer(atoms, logfile=None)
    opt.run(fmax=0.005)
    print(f"{opt.outcome.label}, {opt.force_calls} force calls, {atoms.get_potential_energy():.4f} eV")
