"""Small molecules on metal slabs: who should make the steps?

    python benchmarks/relaxation/adsorbed_molecules.py emt --number 56        # a minute; seed 2, for choices
    python benchmarks/relaxation/adsorbed_molecules.py chgnet --number 21     # two minutes
    python benchmarks/relaxation/adsorbed_molecules.py chgnet --number 28 --seed 9000 --ase --json FILE   # for results

CO, OH, H2O, NH3, CH3, NO and N2, turned at random, on (111) and (100) slabs of seven metals. Printed: mean and median
force calls to 0.05 eV/Å by "auto", the classical optimizer, its springs alone, plain curvature-scaled L-BFGS, each
shipped policy alone and, with `--ase`, ASE's optimizers; and the mean of auto over theirs with a 95 % interval by
resampling the starts. A relaxation that fails counts 500.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, fcc100, fcc111, molecule
from ase.constraints import FixAtoms
from ase.optimize import BFGS, FIRE, BFGSLineSearch, GoodOldQuasiNewton, MDMin

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import CallLimitReached, CountingCalculator

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


MOST_CALLS = 500


def by_ase(optimizer: Any, engine: Potential, starts: list[Atoms]) -> tuple[list[int], list[float | None]]:
    """Force calls, and energies in eV of those that converged."""
    calls = []
    energies = []
    for start_here in starts:
        atoms = start_here.copy()
        atoms.calc = CountingCalculator(engine, stress=False, limit=MOST_CALLS)
        converged = False
        with suppress(CallLimitReached, RuntimeError):  # BFGSLineSearch raises where its search fails
            converged = optimizer(atoms, logfile=None).run(fmax=0.05, steps=MOST_CALLS)
        calls.append(atoms.calc.calls if converged else MOST_CALLS)
        energies.append(float(atoms.get_potential_energy()) if converged else None)
    return calls, energies


class Table:
    """Rows as they come, the first of them to be compared with."""

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self.file = file
        self.about = about
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, calls: list[int], energies: list[float | None], steps_of_policy: int = 0) -> None:
        failed = energies.count(None)
        self.rows[name] = {"calls": calls, "energies_ev": energies, "failed": failed}
        first = np.array(next(iter(self.rows.values()))["calls"])
        own = np.array(calls)
        resampled = np.random.default_rng(0).integers(0, len(own), (4000, len(own)))
        low, high = np.percentile(first[resampled].mean(axis=1) / own[resampled].mean(axis=1), [2.5, 97.5])
        print(
            f"{name:18} mean {own.mean():5.1f}  median {np.median(own):5.1f}  failed {failed}"
            f"  steps of a policy {steps_of_policy} of {own.sum() - len(own)}"
            f"  auto over it {first.mean() / own.mean():.2f} ({low:.2f}-{high:.2f})"
            f"  p95 of pairs {np.percentile(first / own, 95):.2f}",
            flush=True,
        )
        if self.file is not None:
            self.file.write_text(json.dumps({**self.about, "rows": self.rows}) + "\n", encoding="utf-8")

    def add_ours(self, name: str, found: list[Relaxed]) -> None:
        found = sorted(found, key=lambda one: one.tag)
        calls = [one.force_calls if one.converged else MOST_CALLS for one in found]
        energies = [one.energy_ev if one.converged else None for one in found]
        self.add(name, calls, energies, sum(one.policy_steps for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("emt", "chgnet", "sevennet"))
    parser.add_argument("--number", type=int, default=56)
    parser.add_argument("--seed", type=int, default=2, help="from 9000 on: for results, once")
    parser.add_argument("--ase", action="store_true", help="ASE's optimizers too")
    parser.add_argument("--json", type=Path, help="calls and energies of every start")
    asked = parser.parse_args()
    engine: Potential = potential(asked.engine)
    random = np.random.default_rng(asked.seed)
    starts = [start(random, MOLECULES[place % len(MOLECULES)]) for place in range(asked.number)]
    table = Table(asked.json, {"engine": asked.engine, "seed": asked.seed, "number": asked.number, "fmax": 0.05})
    for name, settings in POLICIES.items():
        table.add_ours(name, relaxed(BatchRelaxer(engine, settings), starts))
    for name, own in CLASSICAL.items():
        make = lambda _, own=own: ("", new_stepper(own))  # noqa: E731
        table.add_ours(name, relaxed(BatchRelaxer(engine, BatchSettings(), make), starts))
    for optimizer in (BFGS, BFGSLineSearch, GoodOldQuasiNewton, MDMin, FIRE) if asked.ase else ():
        table.add(optimizer.__name__, *by_ase(optimizer, engine, starts))


if __name__ == "__main__":
    main()
