"""Crystals, slabs and molecules made without downloads: are they what they should be?"""

from __future__ import annotations

import numpy as np
import pytest
from ase.data import covalent_radii
from ase.neighborlist import neighbor_list

from relaxion.train.data.dataset import ELEMENTS
from relaxion.train.data.prototypes import (
    COMMON_ELEMENTS,
    NOBLE,
    bond_length,
    charges_balance,
    electronegativity,
    is_salt,
    prototypes,
    random_crystal,
    random_element,
    random_perovskite,
    similar,
)
from relaxion.train.data.slabs import g2_molecules, random_molecule, random_surface


def nearest_share(atoms) -> float:
    """The shortest distance as a share of the sum of covalent radii."""
    first, second, distances = neighbor_list("ijd", atoms, 6.0)  # caesium needs it
    return float((distances / (covalent_radii[atoms.numbers[first]] + covalent_radii[atoms.numbers[second]])).min())


def test_89_elements() -> None:
    assert len(COMMON_ELEMENTS) == 89


def test_all_prototypes_are_read() -> None:
    found = prototypes()
    assert len(found) == 288
    salt = next(p for p in found if p.label == "AB_cF8_225_a_b" and p.species == ("Cl", "Na"))
    assert salt.is_salt
    assert len(salt.atoms) == 2


def test_own_elements_give_the_prototype_back() -> None:
    for prototype in prototypes()[:40]:
        again = prototype.with_elements({species: species for species in prototype.species})
        assert again.get_volume() >= prototype.atoms.get_volume() * (1 - 1e-9)  # pressed ones grow a little


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ("Na", "Cl", 2.82),
        ("Mg", "O", 2.10),
        ("Cu", "Cu", 2.56),
        ("Si", "Si", 2.35),
        ("Cs", "I", 3.83),
        ("Zr", "N", 2.29),
    ],
)
def test_bond_lengths_are_near_the_measured_ones(first: str, second: str, length: float) -> None:
    assert bond_length(first, second) == pytest.approx(length, rel=0.1)


def test_who_may_stand_in_for_whom() -> None:
    assert similar("Na", "K")
    assert similar("O", "S")
    assert similar("Fe", "Co")
    assert not similar("Na", "Cl")
    assert not similar("O", "Fe")
    assert not similar("Ne", "F")


def test_charges() -> None:
    assert charges_balance({"Na": 1, "Cl": 1})
    assert charges_balance({"Mn": 3, "O": 4})  # mixed valence
    assert not charges_balance({"Na": 1, "Cl": 2})
    assert not charges_balance({"Mg": 2, "O": 1})


def test_crystals_are_plausible_and_of_every_element() -> None:
    random = np.random.default_rng(0)
    crystals = [random_crystal(random, side="training") for _ in range(300)]
    elements = {symbol for atoms in crystals for symbol in atoms.get_chemical_symbols()}
    assert elements <= set(COMMON_ELEMENTS) - ELEMENTS
    assert len(elements - set(NOBLE)) >= 65
    assert len({atoms.info["prototype"] for atoms in crystals}) > 90
    assert all(2 <= len(atoms) <= 16 for atoms in crystals)
    assert min(nearest_share(atoms) for atoms in crystals[:100]) > 0.6
    salts = [a for a in crystals if is_salt(a.get_chemical_symbols()) and len(set(a.numbers)) > 1]
    assert len(salts) > 60
    anions = {max(set(a.get_chemical_symbols()), key=electronegativity) for a in salts}
    assert anions >= {"O", "F", "Cl", "S", "N"}


def test_large_crystals_and_perovskites() -> None:
    random = np.random.default_rng(1)
    assert all(17 <= len(random_crystal(random, side="training", sizes=(17, 40))) <= 40 for _ in range(5))
    perovskite = random_perovskite(random, side="training")
    assert len(perovskite) == 5
    assert 3.2 < perovskite.cell.lengths()[0] < 7.5


def test_pure_elements() -> None:
    random = np.random.default_rng(4)
    crystals = [random_element(random, side="training") for _ in range(60)]
    assert all(len(set(atoms.numbers)) == 1 for atoms in crystals)
    assert any(atoms.info["prototype"].startswith("dcdft/") for atoms in crystals)
    assert max(atoms.get_volume() / len(atoms) for atoms in crystals) < 150  # no metals in crystals of molecules
    carbon = [random_element(random, side="training", element="C", sizes=(4, 16)) for _ in range(10)]
    assert {atoms.get_chemical_symbols()[0] for atoms in carbon} == {"C"}
    assert len({atoms.info["prototype"] for atoms in carbon}) > 3


def test_slabs_have_vacuum_and_fixed_bottoms() -> None:
    random = np.random.default_rng(2)
    slabs = [random_surface(random, side="training", sizes=(4, 16)) for _ in range(25)]
    assert any(slab.constraints for slab in slabs)
    assert any(not slab.constraints for slab in slabs)
    for slab in slabs:
        assert slab.cell.lengths()[2] - np.ptp(slab.positions[:, 2]) > 4.0
        assert nearest_share(slab) > 0.6
        if slab.constraints:
            fixed = slab.constraints[0].index
            assert slab.positions[fixed, 2].max() < slab.positions[:, 2].max()


def test_molecules_are_whole_and_not_crowded() -> None:
    random = np.random.default_rng(3)
    molecules = [random_molecule(random, side="training", joined_share=1.0) for _ in range(60)]
    assert len({atoms.info["molecule"] for atoms in molecules}) > 50
    assert any("/" in atoms.info["molecule"] for atoms in molecules)  # halogens
    for atoms in molecules:
        distances = atoms.get_all_distances() + np.diag(np.full(len(atoms), np.inf))
        reduced = distances / (covalent_radii[atoms.numbers][:, None] + covalent_radii[atoms.numbers])
        assert reduced.min() > 0.75
        assert _connected(reduced < 1.3)


def _connected(bonds: np.ndarray) -> bool:
    reached = np.zeros(len(bonds), dtype=bool)
    reached[0] = True
    for _ in range(len(bonds)):
        reached |= bonds[reached].any(axis=0)
    return bool(reached.all())


def test_g2_has_no_single_atoms() -> None:
    assert len(g2_molecules()) == 148
    assert min(len(atoms) for atoms in g2_molecules().values()) == 2
