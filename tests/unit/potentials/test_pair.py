"""Lennard-Jones and Morse against ASE's calculators with the same settings."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.calculator import Calculator
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.calculators.morse import MorsePotential

from relaxion.errors import SettingsError
from relaxion.potentials import LennardJones, Morse, Potential
from relaxion.structures import Structures

PAIRS = {
    "lj default": (lambda: LennardJones(), lambda: AseLennardJones()),
    "lj argon": (
        lambda: LennardJones(sigma=3.4, epsilon=0.0104, cutoff=8.5),
        lambda: AseLennardJones(sigma=3.4, epsilon=0.0104, rc=8.5),
    ),
    "lj smooth": (
        lambda: LennardJones(sigma=2.5, epsilon=0.4, smooth=True),
        lambda: AseLennardJones(sigma=2.5, epsilon=0.4, smooth=True),
    ),
    "lj smooth onset": (
        lambda: LennardJones(sigma=2.5, epsilon=0.4, cutoff=7.0, smooth=True, onset=5.0),
        lambda: AseLennardJones(sigma=2.5, epsilon=0.4, rc=7.0, ro=5.0, smooth=True),
    ),
    "morse default": (lambda: Morse(), lambda: MorsePotential()),
    "morse": (
        lambda: Morse(epsilon=0.5, rho0=4.5, r0=2.6, switch_start=1.6, switch_end=2.2),
        lambda: MorsePotential(epsilon=0.5, rho0=4.5, r0=2.6, rcut1=1.6, rcut2=2.2),
    ),
}


def images(scale: float) -> list[Atoms]:
    """Crystals and clusters with nearest distances near `scale`."""
    generator = np.random.default_rng(7)
    made = []
    for count in (1, 2, 5, 8):
        cell = scale * count ** (1 / 3) * (np.eye(3) + generator.normal(0, 0.1, (3, 3)))
        positions = generator.random((count, 3)) @ cell
        made.append(Atoms(["Xe"] * count, positions=positions, cell=cell, pbc=True))
    cluster = Atoms("ArKr3", positions=scale * np.array([[0, 0, 0], [1, 0.1, 0], [0, 1.1, 0.2], [1, 1, 1.9]]))
    return [*made, cluster]


@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_ase(name: str) -> None:
    ours, theirs = PAIRS[name]
    potential: Potential = ours()
    calculator: Calculator = theirs()
    scale = getattr(potential, "sigma", getattr(potential, "r0", 1.0))
    batch = images(scale)
    evaluation = potential(Structures.from_ase(batch))
    assert evaluation.stresses is not None
    forces = evaluation.forces.split([len(atoms) for atoms in batch])
    for number, atoms in enumerate(batch):
        atoms.calc = calculator
        assert float(evaluation.energies[number]) == pytest.approx(atoms.get_potential_energy(), rel=1e-8)
        largest = np.abs(atoms.get_forces()).max()
        np.testing.assert_allclose(forces[number], atoms.get_forces(), rtol=0, atol=1e-8 * largest + 1e-12)
        if atoms.cell.rank == 3:
            stress = atoms.get_stress(voigt=False)
            np.testing.assert_allclose(evaluation.stresses[number], stress, rtol=0, atol=1e-8 * np.abs(stress).max())


def test_minimum_of_lennard_jones_is_where_it_should_be() -> None:
    distance = 2 ** (1 / 6) * 3.0
    pair = Structures.from_ase(Atoms("Ar2", positions=[[0, 0, 0], [0, 0, distance]]))
    evaluation = LennardJones(sigma=3.0, epsilon=0.2, cutoff=300.0)(pair)
    assert float(evaluation.energies) == pytest.approx(-0.2, rel=1e-10)
    assert float(evaluation.forces.abs().max()) < 1e-14


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: LennardJones(sigma=-1.0), "sigma must be a number above 0, got -1"),
        (lambda: LennardJones(cutoff=float("nan")), "onset must be a number above 0, got nan"),
        (
            lambda: LennardJones(cutoff=2.0, onset=2.5, smooth=True),
            "onset (2.5 Å) must be below cutoff (2 Å)",
        ),
        (lambda: Morse(switch_start=3.0), "switch_start (3 Å) must be below switch_end (2.7 Å)"),
    ],
)
def test_nonsense_is_refused(make, word: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert word in str(caught.value)
