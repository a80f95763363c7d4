"""What people try first: one crystal of each common kind and primitive cells of two atoms, with CHGNet and free cell.

    python benchmarks/relaxation/simple_cases.py        # about two minutes; prints a table of README.md

Atoms displaced by 0.05 Å, cells strained by 3 % (Gaussians), to 0.05 eV/Å: Relaxion as it chooses itself, its core
alone, BFGS.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.optimize import BFGS
from ase.spacegroup import crystal

from relaxion.apps.comparison import run_ase_optimizer, run_relaxer
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.train.judge.runs import PolicyChoice, RelaxationTask

SEED = 8300
RATTLE_ANGSTROM, STRAIN = 0.05, 0.03
FMAX, MOST_CALLS = 0.05, 300
STARTS = 2


def perovskite() -> Atoms:
    return crystal(
        ["Sr", "Ti", "O"], [(0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0)], spacegroup=221, cellpar=[3.94] * 3 + [90] * 3
    )


def spinel() -> Atoms:
    places = [(0.125, 0.125, 0.125), (0.5, 0.5, 0.5), (0.262, 0.262, 0.262)]
    return crystal(
        ["Mg", "Al", "O"], places, spacegroup=227, setting=2, cellpar=[8.1] * 3 + [90] * 3, primitive_cell=True
    )


KINDS = {
    "rutile TiO2": lambda: crystal(
        ["Ti", "O"], [(0, 0, 0), (0.305, 0.305, 0)], spacegroup=136, cellpar=[4.64, 4.64, 2.97, 90, 90, 90]
    ),
    "perovskite SrTiO3": perovskite,
    "spinel MgAl2O4": spinel,
    "wurtzite ZnO": lambda: bulk("ZnO", "wurtzite", a=3.25, c=5.21),
    "layered MgCl2": lambda: crystal(
        ["Mg", "Cl"], [(0, 0, 0), (1 / 3, 2 / 3, 0.23)], spacegroup=164, cellpar=[3.64, 3.64, 5.93, 90, 90, 120]
    ),
    "molecular CO2": lambda: crystal(
        ["C", "O"], [(0, 0, 0), (0.118, 0.118, 0.118)], spacegroup=205, cellpar=[5.62] * 3 + [90] * 3
    ),
}
PRIMITIVE = {
    "rocksalt": {"MgO": 4.25, "NaCl": 5.65, "CaO": 4.80, "LiF": 4.05, "TiN": 4.25},
    "zincblende": {"AlAs": 5.68, "SiC": 4.38, "GaP": 5.50, "InP": 5.95},
    "diamond": {"Si": 5.46, "Ge": 5.75},
    "cesiumchloride": {"CsCl": 4.15},
}


def started(atoms: Atoms, random: np.random.Generator) -> Atoms:
    """Displaced and strained."""
    strain = random.normal(0, STRAIN, (3, 3))
    atoms.set_cell(atoms.cell[:] @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    atoms.positions += random.normal(0, RATTLE_ANGSTROM, atoms.positions.shape)
    return atoms


def calls(start: Atoms, method: str, chgnet: Potential) -> int:
    """Force calls of this optimizer from here, cell free; the most allowed where it does not converge."""
    task = RelaxationTask(start, chgnet, FMAX, MOST_CALLS, free_cell=True)
    if method == "BFGS":
        run = run_ase_optimizer(BFGS, task, lambda *_: None)
    else:
        choice = PolicyChoice.of("auto" if method == "relaxion" else "none", start, allow_unseen=False)
        run = run_relaxer(task, choice, None, None, lambda *_: None)
    return run.force_calls if run.converged else MOST_CALLS


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    chgnet = potential("chgnet")
    methods = ("relaxion", "core", "BFGS")
    print("| crystal | atoms | Relaxion | core | BFGS | of BFGS |\n|---|---|---|---|---|---|")
    for place, (name, make) in enumerate(KINDS.items()):
        start = started(make(), np.random.default_rng([SEED, place]))
        found = [calls(start, method, chgnet) for method in methods]
        print(
            f"| {name} | {len(start)} | " + " | ".join(map(str, found)) + f" | {found[0] / found[2]:.2f} |", flush=True
        )
    names = [(name, kind, a) for kind, own in PRIMITIVE.items() for name, a in own.items()]
    rows = []
    for place, (name, kind, a) in enumerate(names):
        for number in range(STARTS):
            start = started(bulk(name, kind, a=a), np.random.default_rng([SEED, 100 + place, number]))
            rows.append([calls(start, method, chgnet) for method in methods])
    means = np.mean(rows, axis=0)
    words = " | ".join(f"{mean:.1f}" for mean in means)
    print(f"| {len(names)} primitive cells, {len(rows)} starts | 2 | {words} | {means[0] / means[2]:.2f} |")


if __name__ == "__main__":
    main()
