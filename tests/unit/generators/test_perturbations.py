"""Perturbations: what they change, what they leave, and that the generator decides everything."""

from __future__ import annotations

import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111
from ase.constraints import FixAtoms
from ase.geometry import get_distances

from relaxion.errors import SettingsError, StructureError
from relaxion.structures import Graph, Structures
from relaxion.train.data.alloys import pack
from relaxion.train.data.perturbations import compose, perturbation, rattle, strain, vacancy


def slab() -> Atoms:
    atoms = fcc111("Al", (2, 2, 3), vacuum=6.0)
    atoms.set_constraint(FixAtoms(mask=atoms.get_tags() > 1))
    return atoms


def test_rattle_has_no_rigid_shift(mixed_structures: Structures, generator: torch.Generator) -> None:
    moved = rattle(mixed_structures, generator, size_angstrom=0.3).positions - mixed_structures.positions
    for number in range(mixed_structures.n_structures):
        mine = moved[mixed_structures.structure_index == number]
        assert mine.mean(dim=0).abs().max() < 1e-12
        assert len(mine) == 1 or mine.abs().max() > 0.01


def test_rattle_has_the_asked_size(generator: torch.Generator) -> None:
    structures = Structures.from_ase([bulk("Cu", cubic=True)] * 3000)
    moved = rattle(structures, generator, size_angstrom=0.2).positions - structures.positions
    assert float(moved.std()) == pytest.approx(0.2, rel=0.02)


def test_rattle_leaves_fixed_atoms_and_shakes_a_lone_adatom(generator: torch.Generator) -> None:
    atoms = slab()
    structures = Structures.from_ase(atoms)
    moved = rattle(structures, generator, size_angstrom=0.3).positions - structures.positions
    assert torch.equal(moved[~structures.movable], torch.zeros_like(moved[~structures.movable]))
    atoms.set_constraint(FixAtoms(indices=range(1, len(atoms))))
    lone = Structures.from_ase(atoms)
    assert (rattle(lone, generator, size_angstrom=0.3).positions - lone.positions)[0].abs().max() > 0.01


def test_strain_is_symmetric_and_bounded(generator: torch.Generator) -> None:
    structures = Structures.from_ase([bulk("Cu", cubic=True)] * 500)
    strained = strain(structures, generator, largest=0.08)
    strains = torch.linalg.solve(structures.cells, strained.cells) - torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(strains, strains.transpose(1, 2), rtol=0, atol=1e-12)
    stretches = torch.linalg.eigvalsh(strains).abs().amax(dim=1)
    assert 0.075 < float(stretches.max()) <= 0.08 + 1e-12
    assert float(stretches.mean()) == pytest.approx(0.04, rel=0.1)
    before = torch.linalg.solve(structures.cells[0].T, structures.positions[:4].T)
    after = torch.linalg.solve(strained.cells[0].T, strained.positions[:4].T)
    torch.testing.assert_close(before, after)  # fractional positions are kept


def test_strain_leaves_slabs_and_clusters(generator: torch.Generator) -> None:
    structures = Structures.from_ase([slab(), Atoms("Cu2", positions=[[0, 0, 0], [2, 0, 0]])])
    strained = strain(structures, generator, largest=0.1)
    assert torch.equal(strained.positions, structures.positions)
    assert torch.equal(strained.cells, structures.cells)


def test_vacancy_takes_movable_atoms_only(generator: torch.Generator) -> None:
    structures = Structures.from_ase([slab(), bulk("Cu", cubic=True)] * 20)
    fewer = vacancy(structures, generator, count=2)
    assert torch.equal(fewer.counts, structures.counts - 2)
    assert int((~fewer.movable).sum()) == int((~structures.movable).sum())
    left = {tuple(row) for row in structures.positions.tolist()}
    assert all(tuple(row) in left for row in fewer.positions.tolist())
    coppers = fewer.select(torch.arange(1, 40, 2)).positions.reshape(20, 2, 3)
    assert len({str(rows.tolist()) for rows in coppers}) > 3  # not always the same atoms


def test_vacancy_needs_an_atom_left(generator: torch.Generator) -> None:
    with pytest.raises(StructureError, match="structure 1 has 1 atoms"):
        vacancy(Structures.from_ase([bulk("Cu", cubic=True), bulk("Cu")]), generator)


@pytest.mark.parametrize("distance", [1.0, 2.0])
def test_packing_keeps_atoms_apart_through_images(generator: torch.Generator, distance: float) -> None:
    packed = pack(
        ["Al2Fe2", "Cu", "AlNi3"] * 10,
        generator,
        volume_per_atom_angstrom3=16.0,
        minimum_distance_angstrom=distance,
    )
    assert Graph.of(packed, distance - 1e-9).n_pairs == 0
    for atoms in packed.to_ase():
        _, lengths = get_distances(atoms.positions, cell=atoms.cell, pbc=True)
        assert (lengths[lengths > 1e-9] >= distance - 1e-9).all()
        assert atoms.get_volume() / len(atoms) == pytest.approx(16.0, rel=0.0501)
    assert str(packed.to_ase()[0].symbols.formula.count()) == "{'Al': 2, 'Fe': 2}"


@pytest.mark.parametrize("formula", ["Cu", "Cu8"])
def test_impossible_packing_is_explained(generator: torch.Generator, formula: str) -> None:
    with pytest.raises(StructureError, match="more room"):
        pack([formula], generator, volume_per_atom_angstrom3=5.0, minimum_distance_angstrom=2.5)


def test_words(mixed_structures: Structures, make_generator) -> None:
    words = perturbation("strain:0.05 + rattle:0.1")(mixed_structures, make_generator(3))
    plain = compose(lambda s, g: strain(s, g, largest=0.05), lambda s, g: rattle(s, g, size_angstrom=0.1))(
        mixed_structures, make_generator(3)
    )
    assert torch.equal(words.positions, plain.positions)
    assert torch.equal(words.cells, plain.cells)


@pytest.mark.parametrize("text", ["ratle:0.1", "rattle", "rattle:-1", "vacancy:1.5", "rattle:nan", ""])
def test_wrong_words_are_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        perturbation(text)


@pytest.mark.parametrize("text", ["rattle:0.1", "strain:0.1", "vacancy:1", "vacancy:1+strain:0.05+rattle:0.2"])
def test_same_generator_same_structures(text: str, make_generator) -> None:
    structures = Structures.from_ase([bulk("Cu", cubic=True)] * 5)
    first, second = (perturbation(text)(structures, make_generator(11)) for _ in range(2))
    assert torch.equal(first.positions, second.positions)
    assert torch.equal(first.cells, second.cells)
    assert not torch.equal(first.positions, perturbation(text)(structures, make_generator(12)).positions)
