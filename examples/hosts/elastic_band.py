"""A nudged elastic band: Relaxer for the two ends, FIRE for the band."""

from ase.build import add_adsorbate, fcc100
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.mep import NEB
from ase.optimize import FIRE

from relaxion import Relaxer


def end(shift):
    """A gold atom on Al(100), in one hollow or in the next one."""
    atoms = fcc100("Al", (2, 2, 3), vacuum=6)
    add_adsorbate(atoms, "Au", 1.7, "hollow")
    atoms.positions[-1, 0] += shift
    atoms.set_constraint(FixAtoms(mask=atoms.get_tags() > 1))
    atoms.calc = EMT()
    Relaxer(atoms, logfile=None).run(fmax=0.02)
    return atoms


first = end(0.0)
last = end(first.cell[0, 0] / 2)
images = [first, *(first.copy() for _ in range(3)), last]
for image in images[1:-1]:
    image.calc = EMT()
band = NEB(images, method="improvedtangent")
band.interpolate()
FIRE(band, logfile=None).run(fmax=0.05)
barrier = max(image.get_potential_energy() for image in images) - first.get_potential_energy()
print(f"barrier {barrier:.2f} eV")
