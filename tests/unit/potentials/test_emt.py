"""Batched EMT against ASE's EMT, over everything the two can meet."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.emt import EMT, parameters

from relaxion.potentials import Emt
from relaxion.structures import Structures

METALS = ["Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt"]


def random_alloys(number: int, seed: int) -> list[Atoms]:
    """Crystals of 1 to 12 atoms at metallic density in skewed cells; atoms may come close."""
    generator = np.random.default_rng(seed)
    images = []
    for _ in range(number):
        count = int(generator.integers(1, 13))
        length = (14.0 * count) ** (1 / 3)
        cell = length * (np.eye(3) + generator.normal(0, 0.12, (3, 3)))
        symbols = generator.choice(METALS, count)
        images.append(Atoms(symbols, scaled_positions=generator.random((count, 3)), cell=cell, pbc=True))
    return images


def clusters(number: int, seed: int) -> list[Atoms]:
    generator = np.random.default_rng(seed)
    return [
        Atoms(generator.choice(list(parameters), 9), positions=generator.normal(0, 2.5, (9, 3))) for _ in range(number)
    ]


def slabs() -> list[Atoms]:
    flat = fcc111("Cu", (2, 2, 3))  # no third lattice vector at all
    thick = fcc111("Pt", (1, 2, 4), vacuum=6.0)
    for seed, slab in enumerate((flat, thick)):
        slab.rattle(0.1, seed=seed)
    return [flat, thick]


def special_cases() -> list[Atoms]:
    water = molecule("H2O", cell=[9, 9, 9], pbc=True)
    wire = Atoms("AuAg", positions=[[0, 0, 0], [0.3, 0.1, 2.4]], cell=[0, 0, 5.2], pbc=[False, False, True])
    return [
        Atoms("Ni"),
        Atoms("Cu", cell=[30, 30, 30], pbc=True),
        bulk("Al"),
        bulk("Ag", a=2.6),  # strongly pressed: an atom sees many of its own images
        Atoms("Pt2", positions=[[0, 0, 0], [0, 0, 5.8]]),  # inside of the search, beyond the smoothing
        water,
        wire,
    ]


@pytest.mark.parametrize(
    "images",
    [random_alloys(40, seed=1), clusters(10, seed=2), slabs(), special_cases()],
    ids=["alloys", "clusters", "slabs", "special"],
)
def test_equal_to_ase(images: list[Atoms]) -> None:
    evaluation = Emt()(Structures.from_ase(images))
    assert evaluation.stresses is not None
    forces = evaluation.forces.split([len(atoms) for atoms in images])
    for number, atoms in enumerate(images):
        atoms.calc = EMT()
        expected = atoms.get_potential_energy()
        assert float(evaluation.energies[number]) == pytest.approx(expected, rel=1e-8, abs=1e-10)
        largest = np.abs(atoms.get_forces()).max()
        np.testing.assert_allclose(forces[number], atoms.get_forces(), rtol=0, atol=1e-8 * largest + 1e-12)
        if atoms.cell.rank == 3:
            stress = atoms.get_stress(voigt=False)
            limit = 1e-8 * np.abs(stress).max() + 1e-14
            np.testing.assert_allclose(evaluation.stresses[number], stress, rtol=0, atol=limit)
        else:
            assert not evaluation.stresses[number].any()


def test_knows_the_elements_of_ase() -> None:
    assert Emt().elements == {1, 6, 7, 8, 13, 28, 29, 46, 47, 78, 79}


def test_isolated_atom_has_the_cohesive_energy_of_its_metal() -> None:
    evaluation = Emt()(Structures.from_ase(Atoms("Pt")))
    assert float(evaluation.energies) == -parameters["Pt"][0]
    assert not evaluation.forces.any()
