"""Each kind of move keeps what it must keep, and says None where it has nothing to do."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.constraints import FixAtoms, FixedPlane

from relaxion.errors import SettingsError
from relaxion.search.moves import MOVES, Distances, free_atoms, move_named, rotatable, usual_moves


def everything(atoms: Atoms) -> np.ndarray:
    return np.arange(len(atoms))


@pytest.mark.parametrize("kind", ["swap", "permute", "relocate", "twist", "rattle"])
def test_a_cluster_keeps_its_atoms_and_is_not_changed_itself(kind: str, cluster: Atoms) -> None:
    before = cluster.positions.copy()
    random = np.random.default_rng(1)
    made = [trial for _ in range(20) if (trial := MOVES[kind](cluster, everything(cluster), random)) is not None]
    assert made
    for trial in made:
        assert (trial.numbers == cluster.numbers).all()
        assert np.abs(trial.positions - before).max() > 0.1
    assert (cluster.positions == before).all()


def test_a_swap_exchanges_two_places_of_different_elements(cluster: Atoms) -> None:
    trial = MOVES["swap"](cluster, everything(cluster), np.random.default_rng(0))
    assert trial is not None
    moved = np.flatnonzero(np.abs(trial.positions - cluster.positions).max(axis=1) > 0)
    assert len(moved) == 2
    assert cluster.numbers[moved[0]] != cluster.numbers[moved[1]]
    assert (trial.positions[moved] == cluster.positions[moved[::-1]]).all()


def test_relocate_moves_one_atom_to_a_place_where_it_touches_three() -> None:
    atoms = fcc111("Cu", (3, 3, 3), vacuum=8)
    random = np.random.default_rng(0)
    trial = MOVES["relocate"](atoms, everything(atoms), random)
    assert trial is not None
    moved = np.flatnonzero(np.abs(trial.positions - atoms.positions).max(axis=1) > 1e-9)
    assert len(moved) == 1
    assert Distances.of(trial, Distances.of(atoms).scale).coordination[moved[0]] >= 3


def test_fixed_atoms_stay_and_partly_fixed_ones_are_not_hopped(cluster: Atoms) -> None:
    cluster.set_constraint([FixAtoms([0, 1]), FixedPlane(2, (0, 0, 1))])
    free = free_atoms(cluster)
    assert free.tolist() == list(range(3, len(cluster)))
    random = np.random.default_rng(0)
    for kind in ("swap", "relocate", "rattle", "permute"):
        for _ in range(10):
            trial = MOVES[kind](cluster, free, random)
            if trial is not None:
                assert (trial.positions[:3] == cluster.positions[:3]).all()


def test_nothing_to_do_is_none() -> None:
    copper = bulk("Cu", cubic=True)
    random = np.random.default_rng(0)
    assert MOVES["swap"](copper, everything(copper), random) is None
    assert MOVES["twist"](copper, everything(copper), random) is None
    assert MOVES["torsion"](copper, everything(copper), random) is None
    water = molecule("H2O")
    assert MOVES["torsion"](water, everything(water), random) is None
    assert MOVES["slip"](water, everything(water), random) is None
    assert MOVES["strain"](water, everything(water), random) is None


def test_torsions_keep_bond_lengths_and_leave_rings_alone() -> None:
    ethanol = molecule("CH3CH2OH")
    assert not rotatable(molecule("C6H6"))
    trial = MOVES["torsion"](ethanol, everything(ethanol), np.random.default_rng(2))
    assert trial is not None
    assert np.abs(trial.positions - ethanol.positions).max() > 0.1
    bonds = ethanol.get_all_distances() < 1.7
    assert np.allclose(trial.get_all_distances()[bonds], ethanol.get_all_distances()[bonds])


def test_slip_and_strain_of_a_crystal() -> None:
    crystal = bulk("NiAl", "cesiumchloride", a=2.9) * (2, 2, 1)
    random = np.random.default_rng(1)
    slips = [s for _ in range(10) if (s := MOVES["slip"](crystal, everything(crystal), random)) is not None]
    assert slips
    assert all((slip.cell.array == crystal.cell.array).all() for slip in slips)
    strained = MOVES["strain"](crystal, everything(crystal), random)
    assert strained is not None
    assert np.abs(strained.cell.array - crystal.cell.array).max() > 0.05


def test_the_usual_kinds_fit_the_structure(cluster: Atoms) -> None:
    assert set(usual_moves(cluster, everything(cluster), cell=False)) == {"swap", "relocate", "twist"}
    crystal = bulk("NiAl", "cesiumchloride", a=2.9)
    assert "strain" in usual_moves(crystal, everything(crystal), cell=True)
    ethanol = molecule("CH3CH2OH")
    assert "torsion" in usual_moves(ethanol, everything(ethanol), cell=False)
    copper = bulk("Cu", cubic=True)
    assert "swap" not in usual_moves(copper, everything(copper), cell=False)


def test_own_moves_by_module_and_name() -> None:
    assert move_named("relaxion.search.moves:swap") is MOVES["swap"]
    with pytest.raises(SettingsError, match="unknown kind of move 'swop'"):
        move_named("swop")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        move_named("no_such_module:move")
    with pytest.raises(SettingsError, match="give a function"):
        move_named("relaxion.search.moves:RATTLE_WIDTH")
