"""Processor time of one step on molecules, by size: python benchmarks/relaxation/overhead_of_molecules.py

The forces are harmonic and cost nothing; the time is that of `propose`, median and largest of twelve steps.
"""

from __future__ import annotations

import time

import numpy as np
from ase import Atoms
from flexible_molecules import flexible_molecule

from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.point import Geometry, Point
from relaxion.optimizer.step import propose

STEPS = 12
STIFFNESS = 5.0  # eV/Å²


def milliseconds(atoms: Atoms) -> list[float]:
    """Of each step towards a rattled copy."""
    random, stepper, found = np.random.default_rng(0), new_stepper(), list[float]()
    target = atoms.positions + random.normal(0, 0.1, atoms.positions.shape)
    positions, free = atoms.positions.copy(), np.ones((len(atoms), 3), dtype=bool)
    for _ in range(STEPS):
        place = Geometry(positions, np.zeros((3, 3)), np.zeros(3, dtype=bool), atoms.numbers.astype(np.int64), free)
        apart = target - positions
        point = Point(positions, STIFFNESS * apart, STIFFNESS / 2 * float((apart**2).sum()), place)
        began = time.process_time()
        (proposal,) = propose([stepper], [point])
        found.append(1e3 * (time.process_time() - began))
        positions = proposal.base.coordinates + proposal.step
    return found


def side_by_side(number: int) -> Atoms:
    """So many flexible molecules on a grid."""
    whole = Atoms()
    for k in range(number):
        part = flexible_molecule(np.random.default_rng([1, k]), k)
        part.positions += 14.0 * np.array([k % 3, k // 3 % 3, k // 9]) - part.positions.mean(axis=0)
        whole += part
    return whole


def main() -> None:
    for number in (1, 2, 8, 30):
        atoms = side_by_side(number)
        found = milliseconds(atoms)
        print(f"{len(atoms):5d} atoms: median {np.median(found):6.1f} ms, largest {max(found):6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
