"""The spring stiffness: symmetric, positive definite, the same dense and sparse, and what its docstring says."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxion.optimizer.hessian import springs
from relaxion.optimizer.hessian.springs import SpringHessian, SpringSettings, bonds_of, radii_scale, springs_at
from relaxion.optimizer.point import Geometry


def geometry(atoms, cell_factor=0.0, fixed=()) -> Geometry:
    free = np.ones((len(atoms) + (3 if cell_factor else 0), 3), dtype=bool)
    free[list(fixed)] = False
    return Geometry(
        atoms.positions.copy(), np.array(atoms.cell), atoms.pbc, atoms.numbers.astype(np.int64), free, cell_factor
    )


def alloy(seed=0):
    atoms = bulk("Cu", cubic=True)
    atoms.symbols[0] = "Au"
    atoms.rattle(0.2, seed=seed)
    return atoms


def springs_of(place: Geometry, chosen: SpringSettings | None = None) -> SpringHessian:
    (found,) = springs_at([place], chosen or SpringSettings())
    return found


def matrix(stiffness: SpringHessian) -> np.ndarray:
    shape = stiffness.geometry.free.shape
    return np.stack([stiffness.apply(unit.reshape(shape)).ravel() for unit in np.eye(stiffness.geometry.free.size)])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    decay=st.floats(0, 20),
    across=st.floats(0, 1),
    floor=st.floats(1e-3, 10),
    factor=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_symmetric_and_positive_definite_whatever_the_settings(seed, decay, across, floor, factor):
    stiffness = springs_of(
        geometry(alloy(seed), factor), SpringSettings(decay=decay, across=across, floor=floor, cell_floor=0.1)
    )
    stiffness = matrix(stiffness)
    assert np.allclose(stiffness, stiffness.T, rtol=1e-10, atol=1e-10)
    assert np.linalg.eigvalsh(stiffness).min() > 0


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_solve_undoes_apply(factor):
    stiffness = springs_of(geometry(alloy(), factor))
    step = np.random.default_rng(0).normal(size=stiffness.geometry.free.shape)
    assert np.allclose(stiffness.solve(stiffness.apply(step)), step, atol=1e-10)


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_large_systems_get_the_same_answer_from_conjugate_gradients(factor, monkeypatch):
    forces = np.random.default_rng(0).normal(size=geometry(alloy(), factor).free.shape)
    dense = springs_of(geometry(alloy(), factor)).solve(forces)
    monkeypatch.setattr(springs, "LARGEST_DENSE", 0)
    sparse = springs_of(geometry(alloy(), factor)).solve(forces)
    assert np.allclose(sparse, dense, rtol=1e-4, atol=1e-5)


def test_energy_is_that_of_the_springs():
    """½ uᵀBu must equal the sum over bonds written out, strain included."""
    settings_, place = SpringSettings(), geometry(alloy(), 4.0)
    stiffness = springs_of(place, settings_)
    step = 0.01 * np.random.default_rng(1).normal(size=place.free.shape)
    total = 0.5 * settings_.floor * (step[:4] ** 2).sum()
    total += 0.5 * settings_.cell_floor * place.volume * ((step[4:] / 4.0) ** 2).sum()
    bonds = stiffness.bonds
    for i, j, r, natural in zip(bonds.first, bonds.second, bonds.vectors, bonds.natural_lengths, strict=True):
        length = np.linalg.norm(r)
        along = settings_.stiffness * np.exp(min(-settings_.decay * (length / natural - 1), 3.0))
        change = step[j] - step[i] + (step[4:] / 4.0) @ r
        parallel = change @ r / length
        total += 0.5 * along * (parallel**2 + settings_.across * (change @ change - parallel**2))
    assert 0.5 * np.vdot(step, stiffness.apply(step)) == pytest.approx(total, rel=1e-10)


def test_first_order_bond_change_is_right():
    atoms = alloy()
    place = geometry(atoms, 4.0)
    step = 1e-6 * np.random.default_rng(2).normal(size=place.free.shape)
    deform = np.eye(3) + step[4:] / 4.0
    moved = atoms.copy()
    moved.set_cell(atoms.cell.array @ deform.T)
    moved.positions = atoms.positions @ deform.T + step[:4]
    before, after = springs.bonds_of([place, geometry(moved)])
    assert np.allclose(before.changes(step, place), after.vectors - before.vectors, atol=1e-10)


def test_fixed_coordinates_stay_and_hold_the_others():
    place = geometry(alloy(), fixed=[0])
    stiffness = springs_of(place)
    step = stiffness.solve(np.ones((4, 3)))
    assert np.array_equal(step[0], np.zeros(3))
    free_step = springs_of(geometry(alloy())).solve(np.ones((4, 3)))
    assert np.linalg.norm(step[1:]) < np.linalg.norm(free_step[1:])


def test_a_rigid_shift_costs_the_floor_only():
    stiffness = springs_of(geometry(alloy()), SpringSettings(floor=0.5))
    assert np.allclose(stiffness.apply(np.ones((4, 3))), 0.5)


def test_springs_turn_with_the_structure():
    atoms = molecule("CH3OH")
    turned = atoms.copy()
    turned.rotate(70, (1, 2, 3))
    forces = np.random.default_rng(0).normal(size=(len(atoms), 3))
    turn = np.linalg.lstsq(atoms.positions - atoms.positions[0], turned.positions - turned.positions[0], rcond=None)[0]
    plain = springs_of(geometry(atoms)).solve(forces)
    assert np.allclose(springs_of(geometry(turned)).solve(forces @ turn), plain @ turn, atol=1e-9)


def test_a_supercell_answers_like_its_cell():
    atoms = alloy()
    forces = np.random.default_rng(0).normal(size=(4, 3))
    single = springs_of(geometry(atoms)).solve(forces)
    double = springs_of(geometry(atoms * (2, 1, 1))).solve(np.tile(forces, (2, 1)))
    assert np.allclose(double, np.tile(single, (2, 1)), atol=1e-10)


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_many_at_once_are_one_by_one(factor):
    """Structures of several sizes, one with fixed atoms, one without neighbours, one too large for a matrix."""
    large = bulk("Cu", cubic=True) * (5, 4, 4)
    large.rattle(0.1, seed=1)
    lone = molecule("H")
    lone.center(8.0)
    atoms = [alloy(1), alloy(2) * (2, 1, 1), lone, molecule("CH3CH2OH"), large]
    fixed = [(), (0, 3), (), (1,), ()]
    places = [geometry(one, factor if one.pbc.all() else 0.0, rows) for one, rows in zip(atoms, fixed, strict=True)]
    generator = np.random.default_rng(0)
    for place, together in zip(places, springs_at(places, SpringSettings()), strict=True):
        forces = generator.normal(size=place.free.shape)
        alone = springs_of(place)
        np.testing.assert_allclose(together.solve(forces), alone.solve(forces), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(together.apply(forces), alone.apply(forces), rtol=1e-9, atol=1e-12)


def scale_of(atoms) -> float:
    place = geometry(atoms)
    return radii_scale(place, bonds_of([place])[0])


@pytest.mark.parametrize("atoms", [alloy(), bulk("Al"), bulk("Pb"), bulk("NaCl", "rocksalt", 5.64), molecule("H2")])
def test_covalent_radii_fit_ordinary_structures(atoms):
    assert scale_of(atoms) == 1


@pytest.mark.parametrize("factor", [0.1, 3.0, 10.0])
def test_radii_follow_the_unit_of_length(factor):
    atoms = bulk("Cu", cubic=True)
    nearest = atoms.cell.lengths()[0] / np.sqrt(2) / (2 * 1.32)
    atoms.set_cell(factor * atoms.cell, scale_atoms=True)
    assert scale_of(atoms) == pytest.approx(factor * nearest)


def test_radii_of_noble_gases_are_scaled():
    assert scale_of(bulk("Ar", "fcc", 5.26)) == pytest.approx(5.26 / np.sqrt(2) / (2 * 1.06))


def test_a_lonely_atom_has_no_scale():
    assert scale_of(Atoms("Ar")) == 1
