"""Named sets: what they hold, and that a start depends on set, seed and place only."""

from __future__ import annotations

import numpy as np
import pytest
from ase.data import covalent_radii

from relaxion.apps.cli.inputs import check_structure
from relaxion.apps.comparison import SETS, find_set
from relaxion.errors import SettingsError
from relaxion.train.data.alloys import LATTICE_CONSTANTS

DEAR = ("crystals", "crystals-cell", "new-elements")  # brought to equilibrium first, by CHGNet


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in SETS]
)
def test_starts_can_be_relaxed_and_repeat(name):
    known = find_set(name)
    many, few = known.starts(4, 9000), known.starts(2, 9000)
    other = known.starts(1, 9001)[0]
    for first, again in zip(few, many, strict=False):
        assert np.array_equal(first.positions, again.positions)
        assert np.array_equal(first.numbers, again.numbers)
    assert len(other) != len(few[0]) or not np.allclose(other.positions, few[0].positions)
    for atoms in many:
        check_structure(atoms, known.make_potential(), free_cell=known.free_cell)


def test_two_sets_of_one_kind_have_different_starts():
    bulk, mixed = SETS["emt-bulk"].starts(1, 9000)[0], SETS["mixed"].starts(1, 9000)[0]
    assert len(bulk) != len(mixed) or not np.allclose(bulk.positions, mixed.positions)


@pytest.mark.parametrize(("name", "smallest", "largest"), [("emt-bulk", 4, 32), ("emt-large", 24, 64)])
def test_sizes(name, smallest, largest):
    sizes = [len(atoms) for atoms in SETS[name].starts(40, 9000)]
    assert smallest <= min(sizes) <= 1.2 * smallest
    assert 0.8 * largest <= max(sizes) <= largest


def test_the_strained_cells_are_strained_by_three_per_cent_at_most():
    largest = []
    for atoms in SETS["emt-bulk-cell"].starts(20, 9000):
        half = np.mean([LATTICE_CONSTANTS[symbol] for symbol in atoms.get_chemical_symbols()]) / 2
        lattice = half * np.round(atoms.cell.array / half)  # fcc: whole numbers of half an edge
        strain = np.linalg.solve(lattice, atoms.cell.array) - np.eye(3)
        assert np.allclose(strain, strain.T, atol=1e-12)
        largest.append(np.abs(strain).max())
    assert 0.025 < max(largest) <= 0.03


def test_lj38_follows_the_rule_of_optbench():
    """Also what a cluster stored with OptBench (its first: 0.53–0.79 σ among the first eleven) shows."""
    assert covalent_radii[1] == 0.31
    for atoms in SETS["lj38"].starts(5, 9000):
        assert len(atoms) == 38
        nearest = [np.linalg.norm(atoms.positions[:k] - atoms.positions[k], axis=1).min() for k in range(1, 38)]
        assert min(nearest) > 0.8 * 0.62
        assert max(nearest) < 1.3 * 0.62


def test_lj38_has_the_energy_of_its_known_dimer_bond():
    from ase import Atoms

    calculator = SETS["lj38"].make_potential().as_calculator()
    pair = Atoms("H2", [[0, 0, 0], [2 ** (1 / 6), 0, 0]], calculator=calculator)
    assert pair.get_potential_energy() == pytest.approx(-1, abs=1e-6)
    assert np.abs(pair.get_forces()).max() < 1e-10


def test_unknown():
    with pytest.raises(SettingsError, match="unknown set 'emt-bluk': did you mean 'emt-bulk'"):
        find_set("emt-bluk")
