"""What the world answers: potentials, and what may be moved (`corrector`) and wanted (`reward`)."""

from relaxion.physics.ase import AsePotential, PotentialCalculator
from relaxion.physics.eam import TabulatedEam
from relaxion.physics.eam_zhou import ZhouEam
from relaxion.physics.emt import Emt
from relaxion.physics.pair import LennardJones, Morse
from relaxion.physics.potential import PairGraphPotential, Potential
from relaxion.physics.registry import PotentialEntry, known_potentials, potential

__all__ = [
    "AsePotential", "Emt", "LennardJones", "Morse", "PairGraphPotential", "Potential", "PotentialCalculator",
    "PotentialEntry", "TabulatedEam", "ZhouEam", "known_potentials", "potential",
]  # fmt: skip
