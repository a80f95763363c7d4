"""Where structures come from, and that the sides of a split share nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.io import write

from relaxion.errors import InputError, SettingsError
from relaxion.potentials.registry import potential
from relaxion.structures import Structures
from relaxion.train.data.dataset import composition
from relaxion.train.data.starts import (
    first_at_hand,
    held_apart_sides,
    potential_at_hand,
    source_at_hand,
    structure_source,
)


def images(word: str, number: int = 40, seed: int = 0) -> list[Atoms]:
    return structure_source(word)(number, torch.Generator().manual_seed(seed), potential("eam"))


def test_the_cubic_pair_is_at_its_minimum() -> None:
    (atoms,) = images("b2:AlFe")
    assert atoms.get_chemical_formula() == "AlFe"
    structures = Structures.from_ase([atoms], cell_free=True)
    answer = potential("eam")(structures)
    assert float(answer.forces.abs().max()) < 1e-8
    assert answer.stresses is not None
    assert float(answer.stresses.abs().max()) < 1e-5  # flat to 1e-6 Å of the edge


@pytest.mark.parametrize("kind", ["alloys", "packings"])
def test_random_structures_have_the_sizes_and_elements_asked_for(kind: str) -> None:
    found = images(f"{kind}:Al-Fe:2-7")
    assert {len(atoms) for atoms in found} == {2, 3, 4, 5, 6, 7}
    assert {symbol for atoms in found for symbol in atoms.symbols} == {"Al", "Fe"}
    again, other = images(f"{kind}:Al-Fe:2-7"), images(f"{kind}:Al-Fe:2-7", seed=1)
    assert [a.positions.tolist() for a in found] == [a.positions.tolist() for a in again]
    assert [str(a.symbols) for a in found] != [str(a.symbols) for a in other]


def test_a_slice_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "some.extxyz"
    write(file, [bulk("Al"), bulk("Cu"), bulk("Ni")])
    assert [str(a.symbols) for a in images(f"file:{file}")] == ["Al", "Cu", "Ni"]
    assert [str(a.symbols) for a in images(f"file:{file}@1:")] == ["Cu", "Ni"]
    assert [str(a.symbols) for a in images(f"file:{file}@0")] == ["Al"]


def test_the_first_alternative_at_hand_is_taken(tmp_path: Path) -> None:
    there = tmp_path / "there.fs"
    there.write_text("")
    assert first_at_hand(f"eam:{tmp_path}/no.fs | eam:{there} | emt", potential_at_hand) == f"eam:{there}"
    assert first_at_hand(f"eam:{tmp_path}/no.fs | eam", potential_at_hand) == "eam"
    assert first_at_hand(f"file:{tmp_path}/no@3: | b2:AlFe", source_at_hand) == "b2:AlFe"
    assert first_at_hand(f"file:{there}@3: | b2:AlFe", source_at_hand) == f"file:{there}@3:"
    assert first_at_hand(f"file:{tmp_path}/no", source_at_hand) == f"file:{tmp_path}/no"  # its own error comes later


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pakings:Al:2-3", "did you mean 'packings'"),
        ("alloys:Al-Xx:2-3", "'Xx' is not an element"),
        ("alloys:Al:5-3", "write the numbers of atoms as 2-16, got '5-3'"),
        ("alloys:Al", "got ''"),
        ("b2:Al2Fe", "needs two elements"),
    ],
)
def test_sources_that_cannot_be(word: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        structure_source(word)


def test_sides_share_no_composition() -> None:
    pools = [images("alloys:Al-Cu-Ni:2-6", 200, seed) for seed in (0, 20, 9000)]
    sides = held_apart_sides("composition:0.3", pools)
    keys = [{composition(atoms) for atoms in side} for side in sides]
    assert all(len(key) > 3 for key in keys)
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert 0.15 < len(sides[2]) / 200 < 0.45


def test_whole_elements_are_held_apart() -> None:
    pools = [images("alloys:Al-Cu-Ni:2-6", 60, seed) for seed in (0, 20, 9000)]
    training, _, held = held_apart_sides("elements:Ni", pools)
    assert all("Ni" not in atoms.symbols for atoms in training)
    assert held
    assert all("Ni" in atoms.symbols for atoms in held)


@pytest.mark.parametrize("rule", ["composition", "composition:0", "composition:half", "seed:1", "nothing:0.2"])
def test_rules_that_cannot_be(rule: str) -> None:
    with pytest.raises(InputError):
        held_apart_sides(rule, [[bulk("Al")]] * 3)


def test_the_same_atoms_are_strewn_anew_into_the_same_cell_and_unseen_crystals_stay_out() -> None:
    from relaxion.train.tasks.search import CRYSTALS, UNSEEN_CRYSTALS, systems, training_crystal

    random = np.random.default_rng(0)
    make = next(iter(systems("al-fe", "unseen").values()))
    first, second = make(random), make(random)
    assert np.array_equal(first.cell, second.cell)
    assert first.get_chemical_symbols() == second.get_chemical_symbols()
    assert not np.allclose(first.positions, second.positions)
    distances = second.get_all_distances(mic=True)
    assert distances[~np.eye(len(second), dtype=bool)].min() > 1.79
    assert len(UNSEEN_CRYSTALS) == 16
    assert set(UNSEEN_CRYSTALS) < set(CRYSTALS)
    for _ in range(20):
        counts = training_crystal(random).symbols.formula.count()
        assert (counts["Al"], counts["Fe"]) not in UNSEEN_CRYSTALS
