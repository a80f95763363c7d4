"""What `Relaxer(adapt=True)` gives: many relaxations of one compound with elements the policy never saw, in a row.

    python benchmarks/relaxation/held_apart.py MP_20_FILE new.extxyz --elements --number 8
    python benchmarks/relaxation/adapt.py new.extxyz

Of every structure of the file so many copies are rattled, relaxed one after the other with one adaptation per
structure, and beside it without. Calls are counted by the relaxer; `relaxion bench` shows that it counts right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.io import read

from relaxion import Relaxer, potential
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.adaptation import Adaptation
from relaxion.optimize.choice import load

SEED, FMAX, CAP = 9000, 0.05, 300
POLICY = "universal"


def copies(atoms: Atoms, number: int, rattle: float, generator: np.random.Generator) -> list[Atoms]:
    made = [atoms.copy() for _ in range(number)]
    for copied in made:
        copied.positions += generator.normal(0, rattle, copied.positions.shape)
    return made


def calls(starts: list[Atoms], adapt: bool | Adaptation, calculator: str) -> list[int]:
    found = []
    for start in starts:
        atoms = start.copy()
        atoms.calc = potential(calculator).as_calculator()
        optimizer = Relaxer(atoms, logfile=None, policy=POLICY, adapt=adapt)
        found.append(optimizer.force_calls if optimizer.run(fmax=FMAX, steps=CAP) else CAP)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--calc", default="chgnet")
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--rattle", type=float, default=0.12, help="Å")
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator, policy = np.random.default_rng(SEED), load(POLICY).policy
    assert isinstance(policy, MetricPolicy)
    rows = {"as shipped": [], "adapting": []}
    for atoms in read(given.file, ":"):
        starts = copies(atoms, given.copies, given.rattle, generator)
        rows["as shipped"].append(calls(starts, False, given.calc))
        rows["adapting"].append(calls(starts, Adaptation(policy.network), given.calc))
        means = {name: np.mean(found[-1]) for name, found in rows.items()}
        print(
            f"{atoms.get_chemical_formula():20s}",
            {name: round(float(mean), 1) for name, mean in means.items()},
            flush=True,
        )
    third = given.copies // 3
    for name, found in rows.items():
        each = np.array(found)
        parts = [each[:, k * third : (k + 1) * third].mean() for k in range(3)]
        print(f"{name:12s} mean {each.mean():.2f}; by thirds of the row {', '.join(f'{part:.2f}' for part in parts)}")


if __name__ == "__main__":
    main()
