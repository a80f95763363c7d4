"""Small molecules on metal slabs: who should make the steps? For choices, never for results (seed 2, below 9000).

    python benchmarks/relaxation/adsorbed_molecules.py emt --number 56        # a minute
    python benchmarks/relaxation/adsorbed_molecules.py chgnet --number 21     # two minutes

CO, OH, H2O, NH3, CH3, NO and N2, turned at random, on (111) and (100) slabs of seven metals. Printed: mean and median
force calls to 0.05 eV/Å by "auto" (policy and internal coordinates together), the classical optimizer, its springs
alone, plain curvature-scaled L-BFGS, and each shipped policy alone.
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, fcc100, fcc111, molecule
from ase.constraints import FixAtoms

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.potentials import potential
from relaxion.potentials.base import Potential

LATTICE_CONSTANTS = {"Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Pd": 3.89, "Pt": 3.92, "Al": 4.05}
MOLECULES = ("CO", "OH", "H2O", "NH3", "CH3", "NO", "N2")
CLASSICAL = {
    "springs": ClassicalSettings(internal=False),
    "plain L-BFGS": ClassicalSettings(internal=False, use_springs=False),
}
POLICIES = {
    "auto": BatchSettings(),
    "classical": BatchSettings(policy=None),
    "metals alone": BatchSettings(policy="metals", allow_unseen=True),
    "universal alone": BatchSettings(policy="universal", allow_unseen=True),
}


def start(random: np.random.Generator, name: str) -> Atoms:
    """One molecule above a slab whose lowest layer is fixed."""
    metal = str(random.choice(list(LATTICE_CONSTANTS)))
    facet = random.choice([fcc111, fcc100])
    slab = facet(metal, (2, 2, 3), a=LATTICE_CONSTANTS[metal], vacuum=7.0, orthogonal=True)
    above = molecule(name)
    if name == "OH" and above.positions[0, 2] > above.positions[1, 2]:
        above.rotate(180, "x")
    above.rotate(random.uniform(0, 50), random.normal(size=3))
    site = str(random.choice(["ontop", "bridge", "hollow", *(["fcc"] if facet is fcc111 else [])]))
    site = "hcp" if facet is fcc111 and site == "hollow" else site
    add_adsorbate(slab, above, random.uniform(1.5, 2.1), site, mol_index=int(above.positions[:, 2].argmin()))
    slab.set_constraint(FixAtoms(mask=slab.get_tags() == 3))
    slab.rattle(0.05, rng=random)
    slab.pbc = True
    return slab


def relaxed(batch: BatchRelaxer, starts: list[Atoms]) -> list[Relaxed]:
    for number, atoms in enumerate(starts):
        batch.add(atoms, number)
    found = []
    while batch.n_running or batch.has_finished:
        found += batch.advance()
    return found


def show(name: str, found: list[Relaxed]) -> None:
    calls = [one.force_calls for one in found]
    failed = sum(not one.converged for one in found)
    by_policy = sum(one.policy_steps for one in found)
    steps = sum(calls) - len(calls)
    print(
        f"{name:16} mean {np.mean(calls):5.1f}  median {np.median(calls):5.1f}  failed {failed}"
        f"  steps of a policy {by_policy} of {steps}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("emt", "chgnet", "sevennet"))
    parser.add_argument("--number", type=int, default=56)
    parser.add_argument("--seed", type=int, default=2)
    asked = parser.parse_args()
    engine: Potential = potential(asked.engine)
    random = np.random.default_rng(asked.seed)
    starts = [start(random, MOLECULES[place % len(MOLECULES)]) for place in range(asked.number)]
    for name, settings in POLICIES.items():
        show(name, relaxed(BatchRelaxer(engine, settings), starts))
    for name, own in CLASSICAL.items():
        show(name, relaxed(BatchRelaxer(engine, BatchSettings(), lambda _, own=own: ("", new_stepper(own))), starts))


if __name__ == "__main__":
    main()
