"""Noise as DFT has it: no false rejections, no oscillation near the tolerance, the same minimum."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.filters import FrechetCellFilter

from relaxion import Relaxer
from relaxion.apps.comparison import find_set
from relaxion.optimizer.point import Point
from relaxion.optimizer.trust_region import CERTAIN_CHANGE, energy_change
from relaxion.potentials import Emt
from relaxion.structures import Structures

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "noise"))
from noisy import Noise, Noisy

FMAX = 0.01


def relaxed(start: Atoms, noise: Noise, policy: str | None, *, cell: bool, seed: int) -> Relaxer:
    atoms = start.copy()
    atoms.calc = Noisy(Emt(), noise, seed).as_calculator()
    optimizer = Relaxer(FrechetCellFilter(atoms) if cell else atoms, policy=policy, logfile=None)
    optimizer.run(fmax=FMAX, steps=150)
    return optimizer


def rejected(optimizer: Relaxer) -> int:
    return sum(not entry.accepted for entry in optimizer.history)


def exact_energy(optimizer: Relaxer) -> float:
    """What the potential says without its noise."""
    atoms = getattr(optimizer.atoms, "atoms", optimizer.atoms).copy()
    atoms.set_constraint()
    return float(Emt()(Structures.from_ase(atoms)).energies) / len(atoms)


@pytest.mark.parametrize("policy", ["auto", None])
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("emt-slabs", Noise(force=1e-3, energy=1e-4)),
        ("emt-slabs", Noise(force=1e-3, energy=1e-2)),
        ("emt-bulk-cell", Noise(force=1e-3, stress=1e-5, energy=1e-2)),
        ("emt-bulk-cell", Noise(force=1e-3, stress=1e-5, energy=1e-4, jump=1e-1)),
    ],
)
def test_noise_costs_little(name: str, noise: Noise, policy: str | None) -> None:
    chosen, calls, without, false = find_set(name), 0, 0, 0
    for seed, start in enumerate(chosen.starts(2, 8000)):
        noisy = relaxed(start, noise, policy, cell=chosen.free_cell, seed=seed)
        exact = relaxed(start, Noise(), policy, cell=chosen.free_cell, seed=seed)
        assert noisy.outcome.label == "converged"
        assert exact_energy(noisy) == pytest.approx(exact_energy(exact), abs=2e-3), "eV per atom: the same minimum"
        calls, without = calls + noisy.force_calls, without + exact.force_calls
        false += rejected(noisy) - rejected(exact)
    assert calls <= 1.35 * without + 2
    assert false <= 0


def test_small_differences_of_energies_are_taken_from_the_forces() -> None:
    def point(place: float, energy: float) -> Point:
        return Point(np.array([[place, 0, 0]]), np.array([[-2 * place, 0, 0]]), energy, None)

    before, after = point(0.1, 0.0), point(0.05, 0.6 * CERTAIN_CHANGE)
    step = after.coordinates - before.coordinates
    assert energy_change(before, after, step) == pytest.approx(0.05**2 - 0.1**2), "E = x², whatever the energies say"
    assert energy_change(before, point(0.05, 2 * CERTAIN_CHANGE), step) == 2 * CERTAIN_CHANGE


def test_noise_is_repeatable_and_as_large_as_said() -> None:
    start = find_set("emt-bulk").starts(1, 8000)[0]
    noise = Noise(force=1e-3, energy=1e-2, stress=1e-4)
    images = [start.copy() for _ in range(60)]
    for number, atoms in enumerate(images):
        atoms.positions += 1e-9 * number
    structures = Structures.from_ase(images)
    exact, first, second = (engine(structures, stresses=True) for engine in (Emt(), *2 * [Noisy(Emt(), noise)]))
    assert (first.energies == second.energies).all()
    assert (first.forces == second.forces).all()
    assert float((first.energies - exact.energies).std()) == pytest.approx(1e-2, rel=0.3)
    assert float((first.forces - exact.forces).std()) == pytest.approx(1e-3, rel=0.1)
    other = Noisy(Emt(), noise, seed=1)(structures)
    assert not (other.energies == first.energies).any()
