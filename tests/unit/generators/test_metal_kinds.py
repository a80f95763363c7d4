"""Facets, steps, defects, boundaries and particles of metals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms

from relaxion.errors import SettingsError
from relaxion.train.data.alloys import (
    EAM_METALS,
    EMT_METALS,
    ball,
    bicrystal,
    defective_crystal,
    lattices_of,
    mean_volume,
)
from relaxion.train.data.perturbations import closest
from relaxion.train.data.slabs import ADSORBATES, faceted_slab
from relaxion.train.data.starts import MetalStarts


def slabs(number: int, elements: tuple[str, ...] = EMT_METALS, **how: bool) -> list[Atoms]:
    random = np.random.default_rng(3)
    return [faceted_slab(random, elements, (6, 40), **{"light": True, "stepped": False, **how}) for _ in range(number)]


def test_molecules_lie_on_facets_with_whole_bonds_and_nothing_too_near() -> None:
    found = slabs(40)
    assert max(int((atoms.numbers < 10).sum()) for atoms in found) >= 3
    assert min(closest(atoms) for atoms in found) > 0.9  # the bond of OH is 0.97 Å
    for atoms in found:
        light = atoms.numbers < 10
        if light.any():
            apart = atoms.get_all_distances(mic=True)[light][:, ~light].min(axis=1)
            assert apart.min() < 2.6
            assert atoms.positions[light, 2].min() > np.median(atoms.positions[~light, 2])


def test_where_metals_alone_may_be_no_light_atom_is() -> None:
    assert all((atoms.numbers > 10).all() for atoms in slabs(20, EAM_METALS, light=False))


def test_steps_lack_part_of_their_top_layer() -> None:
    random = np.random.default_rng(4)
    for _ in range(30):
        atoms = faceted_slab(random, EAM_METALS, (6, 40), light=False, stepped=True)
        tags = atoms.get_tags()[atoms.get_tags() > 0]  # fcc(211), and what is on top, have none
        if len(tags):
            assert 0 < (tags == 1).sum() < (tags == 2).sum()


def test_molecules_are_displaced_less_than_metals() -> None:
    starts = MetalStarts(sizes=(6, 20), shares={"surface": 1.0}, adsorbates=ADSORBATES, rattle_angstrom=(0.3, 0.3))
    found = starts.sample(torch.Generator().manual_seed(1), 40).to_ase()
    assert min(closest(atoms) for atoms in found) > 0.6


def test_lattices_are_those_of_the_elements() -> None:
    assert lattices_of(EMT_METALS) == ("fcc",)
    assert lattices_of(EAM_METALS) == ("fcc", "bcc", "hcp")


def test_a_defect_adds_an_atom_or_changes_one() -> None:
    random = np.random.default_rng(5)
    odd = 0
    for _ in range(40):
        atoms = defective_crystal(random, EAM_METALS, (8, 33), ADSORBATES)
        assert 8 <= len(atoms) <= 33
        assert closest(atoms) > 1.0
        odd += len(atoms) % 2
    assert 10 < odd < 30  # perfect crystals have an even number of atoms


def test_two_grains_fill_their_cell_and_mirror_each_other() -> None:
    random = np.random.default_rng(6)
    for elements in (EMT_METALS, EAM_METALS):
        for _ in range(10):
            atoms = bicrystal(random, elements, (2, 40))
            volume = mean_volume(atoms.get_chemical_symbols()) * len(atoms)
            assert atoms.pbc.all()
            assert 0.85 < atoms.get_volume() / volume < 1.3
            assert closest(atoms) > 0.75 * (volume / len(atoms)) ** (1 / 3)


def test_a_particle_is_compact() -> None:
    random = np.random.default_rng(7)
    for lattice in ("fcc", "bcc", "hcp"):
        atoms = ball(random, ["Cu"] * 55, lattice)
        radius = np.linalg.norm(atoms.positions, axis=1).max()
        assert radius < 1.4 * (55 * mean_volume(["Cu"]) * 3 / (4 * np.pi)) ** (1 / 3)
        assert closest(atoms) > 2.4


def test_sizes_that_cannot_be_are_refused() -> None:
    random = np.random.default_rng(8)
    with pytest.raises(SettingsError, match="no slab of 200 to 201"):
        faceted_slab(random, EMT_METALS, (200, 201), light=False, stepped=False)
    with pytest.raises(SettingsError, match="no two grains of 4 to 9"):
        bicrystal(random, EMT_METALS, (4, 9))
    with pytest.raises(SettingsError, match="no crystal of 5 to 6"):
        defective_crystal(random, EMT_METALS, (5, 7))
