"""What the world answers: potentials, and what may be moved (`corrector`) and wanted (`reward`)."""

from relaxion.potentials.ase import AsePotential, PotentialCalculator
from relaxion.potentials.base import PairGraphPotential, Potential
from relaxion.potentials.eam import TabulatedEam
from relaxion.potentials.eam_zhou import ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.pair import LennardJones, Morse
from relaxion.potentials.registry import PotentialEntry, known_potentials, potential

__all__ = [
    "AsePotential", "Emt", "LennardJones", "Morse", "PairGraphPotential", "Potential", "PotentialCalculator",
    "PotentialEntry", "TabulatedEam", "ZhouEam", "known_potentials", "potential",
]  # fmt: skip
