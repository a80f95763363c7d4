"""A stiffness network in the coordinates of ASE's filters says exactly what it says by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms, FixCartesian
from ase.filters import Filter, FrechetCellFilter, UnitCellFilter
from ase.stress import voigt_6_to_full_3x3_stress

from relaxion import Relaxer
from relaxion.model import solve as stiffness_solve
from relaxion.model.stiffness import strain_matrices
from relaxion.model.stiffness_network import StiffnessNetwork, pulls_of
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian import learned as learned_stiffness
from relaxion.optimizer.hessian.base import Base, Hessian, Models, hessians_at
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.optimizer.point import Point, cell_factor_of, read_point
from relaxion.optimizer.step import propose
from relaxion.structures import Evaluation, State, Structures

MASK = [1, 1, 0, 0, 0, 1]  # xx yy zz yz xz xy


@pytest.fixture(scope="module")
def network(make_stiffness_policy: Callable) -> StiffnessNetwork:
    network = make_stiffness_policy(3).network.double()
    with torch.no_grad():
        for parameter in network.parameters():  # further from the springs than an untrained one
            parameter.mul_(1.5)
    return network


def alloy() -> Atoms:
    generator = np.random.default_rng(4)
    atoms = bulk("Cu", a=3.7, cubic=True) * (2, 1, 1)
    atoms.symbols[[1, 6]] = "Au"
    atoms.set_cell(atoms.cell.array @ np.array([[1.02, 0.01, 0], [0.01, 0.98, 0.02], [0, 0.02, 1.01]]), True)
    atoms.positions += generator.normal(0, 0.1, atoms.positions.shape)
    atoms.calc = EMT()
    return atoms


def own_state(atoms: Atoms, free_cell: bool, mask: np.ndarray) -> State:
    """As training makes it, without any of ASE's filters. Stress that a mask forbids to relax drives nothing."""
    structures = Structures.from_ase(atoms, cell_free=free_cell)
    bare = atoms.copy()
    bare.set_constraint()
    bare.calc = EMT()
    evaluation = Evaluation(
        torch.tensor([bare.get_potential_energy()]),
        torch.from_numpy(bare.get_forces()),
        torch.from_numpy(bare.get_stress(voigt=False) * mask)[None],
    )
    return State.without_past(structures, evaluation, 0.3)


def hessian_at(target: Atoms | Filter, network: StiffnessNetwork) -> tuple[Hessian, np.ndarray]:
    point = read_point(target)
    stiffness = asked(LearnedHessians(network), point)
    assert stiffness is not None
    return stiffness, point.forces


def asked(source: LearnedHessians, point: Point) -> Hessian | None:
    return hessians_at([Base(point)], [Models(policy=source)])[0].learned


FILTERS: dict[str, Callable[[Atoms], Atoms | Filter]] = {
    "fixed": lambda atoms: atoms,
    "frechet": FrechetCellFilter,
    "frechet other factor": lambda atoms: FrechetCellFilter(atoms, exp_cell_factor=3.0),
    "unit cell": UnitCellFilter,
    "frechet mask": lambda atoms: FrechetCellFilter(atoms, mask=MASK),
    "unit cell mask": lambda atoms: UnitCellFilter(atoms, mask=MASK),
}


@pytest.mark.parametrize("fixed", [(), (0, 5)])
@pytest.mark.parametrize("name", FILTERS)
def test_the_networks_own_solve(name: str, fixed: tuple[int, ...], network: StiffnessNetwork) -> None:
    atoms = alloy()
    atoms.set_constraint(FixAtoms(fixed))
    target = FILTERS[name](atoms)
    stiffness, forces = hessian_at(target, network)
    step = stiffness.solve(forces)

    mask = voigt_6_to_full_3x3_stress(MASK) if "mask" in name else np.ones((3, 3))
    state = own_state(atoms, name != "fixed", mask)
    stiffness = network(state)
    if "mask" in name:
        stiffness = stiffness.restricted(cells=torch.tensor([MASK], dtype=torch.bool))
    own = stiffness_solve.solve(stiffness, pulls_of(state))
    np.testing.assert_allclose(step[: len(atoms)], own.atoms.numpy(force=True), rtol=1e-6, atol=1e-9)
    assert np.linalg.norm(step) > 0.05
    if name != "fixed":
        factor = cell_factor_of(atoms.numbers)  # whatever that of the filter is
        strain = strain_matrices(own.cells)[0].numpy(force=True)
        np.testing.assert_allclose(step[len(atoms) :], factor * strain, rtol=1e-6, atol=1e-9)
        assert np.abs(strain).max() > 1e-4


def matrix_of(stiffness: Hessian, shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([stiffness.apply(unit.reshape(shape)).ravel() for unit in np.eye(int(np.prod(shape)))])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["fixed", "frechet", "unit cell mask"])
def test_apply_and_solve_belong_together(
    name: str, large: bool, network: StiffnessNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with conjugate gradients, as for large structures; with constraints on single coordinates; with a floor."""
    if large:
        monkeypatch.setattr(learned_stiffness, "LARGEST_DENSE", 0)
        monkeypatch.setattr(stiffness_solve, "LARGEST_DENSE", 0)
    exact = {"rtol": 1e-2, "atol": 3e-4} if large else {"rtol": 2e-5, "atol": 1e-7}  # a step need not be better
    atoms = alloy()
    atoms.set_constraint([FixAtoms([2]), FixCartesian([4], mask=(True, False, True))])
    stiffness, forces = hessian_at(FILTERS[name](atoms), network)
    matrix = matrix_of(stiffness, forces.shape)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-5 if large else 1e-9)
    free = np.flatnonzero(np.diag(matrix))
    assert set(range(6, 9)) | {12, 14} <= set(range(matrix.shape[0])) - set(free), "what is fixed does not answer"
    for floor in (0.0, 0.7):
        stiffer = matrix[np.ix_(free, free)] + floor * np.diag(free < 3 * len(atoms))
        # the three rows of a cell hold six unknowns: each pair across the diagonal is one of them, hence lstsq
        expected = np.linalg.lstsq(stiffer, forces.ravel()[free], rcond=1e-9)[0]
        np.testing.assert_allclose(stiffness.solve(forces, floor).ravel()[free], expected, **exact)
    assert np.linalg.eigvalsh(matrix[np.ix_(free, free)]).min() > -1e-5


def test_one_is_many(network: StiffnessNetwork) -> None:
    """Sizes that are solved apart, in no order; cells that are free, fixed, partly fixed and fixed by their filter."""

    def crystal(size: tuple[int, int, int], seed: int) -> Atoms:
        atoms = bulk("Cu") * size
        atoms.rattle(0.1, seed=seed)
        atoms.calc = EMT()
        return atoms

    held = crystal((3, 3, 3), 2)
    held.set_constraint([FixAtoms([2]), FixCartesian([4], mask=(True, False, True))])
    targets: list[Atoms | Filter] = [
        FrechetCellFilter(crystal((2, 2, 2), 1), mask=[0] * 6),
        held,
        FrechetCellFilter(crystal((3, 3, 2), 3)),
        crystal((1, 1, 1), 4),
        FrechetCellFilter(crystal((4, 3, 3), 5), mask=MASK),
        FrechetCellFilter(crystal((2, 2, 2), 6)),
    ]
    points, source = [read_point(target) for target in targets], LearnedHessians(network)
    models = [Models(policy=source)] * len(points)
    for point, model in zip(points, hessians_at([Base(point) for point in points], models), strict=True):
        alone = asked(source, point)
        assert alone is not None
        assert model.learned is not None
        step = model.learned.solve(point.forces)
        np.testing.assert_allclose(step, alone.solve(point.forces), rtol=1e-6, atol=1e-9)
        assert np.abs(step).max() > 1e-3 or len(point.forces) == 1


def test_a_cell_that_a_mask_holds_is_relaxed_by_the_policy() -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc, cell = EMT(), atoms.cell.array.copy()
    opt = Relaxer(FrechetCellFilter(atoms, mask=[0] * 6), logfile=None, policy="metals")
    assert opt.run(fmax=0.05)
    assert (opt.policy_used, opt.fallback_used) == ("metals", 0)
    np.testing.assert_array_equal(atoms.cell.array, cell)


def test_steps_keep_to_what_is_free_and_go_downhill(network: StiffnessNetwork) -> None:
    atoms = alloy()
    atoms.set_constraint([FixAtoms([2]), FixCartesian([4], mask=(True, False, True))])
    stiffness, forces = hessian_at(FrechetCellFilter(atoms, mask=MASK), network)
    step = stiffness.solve(forces)
    assert np.array_equal(step[2], np.zeros(3))
    assert np.array_equal(step[4, [0, 2]], [0, 0])
    assert step[4, 1] != 0
    assert np.array_equal(step[8:][[2, 2, 2, 0, 1], [0, 1, 2, 2, 2]], np.zeros(5))
    assert np.vdot(step, forces) > 0


def test_a_base_is_looked_at_once(network: StiffnessNetwork) -> None:
    """After a rejected point the next step begins at the same base again."""
    seen = []
    handle = network.register_forward_hook(lambda *_: seen.append(1))
    stepper, atoms = new_stepper(policy_model=LearnedHessians(network)), alloy()
    (first,) = propose([stepper], [read_point(atoms)])
    worse = replace(
        read_point(atoms),
        coordinates=first.base.coordinates + first.step,
        energy=first.base.energy + 0.2,
        forces=-first.base.forces,
    )
    (second,) = propose([stepper], [worse])
    handle.remove()
    assert second.base is first.base
    assert len(seen) == 1


def test_many_at_once_are_one_by_one(network: StiffnessNetwork) -> None:
    """Free and fixed cells, constraints, elements it does not cover: the same answers in one call of the network."""
    atoms = [alloy(), alloy() * (2, 1, 1), alloy()]
    for one in atoms:
        one.calc = EMT()
    atoms[1].set_constraint(FixAtoms([0, 5]))
    gold = alloy()
    gold.symbols[:] = "Ag"
    gold.calc = EMT()
    points = [read_point(one) for one in (atoms[0], atoms[1], FrechetCellFilter(atoms[2], mask=MASK), gold)]
    source, calls = LearnedHessians(network, elements=[29, 79]), []
    handle = network.register_forward_hook(lambda *_: calls.append(1))
    models = [Models(policy=source)] * len(points)
    together = [found.learned for found in hessians_at([Base(point) for point in points], models)]
    handle.remove()
    assert len(calls) == 1
    assert together[3] is None
    for point, stiffness in zip(points[:3], together, strict=False):
        alone = asked(source, point)
        assert stiffness is not None
        assert alone is not None
        np.testing.assert_allclose(stiffness.solve(point.forces), alone.solve(point.forces), rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(stiffness.apply(point.forces), alone.apply(point.forces), rtol=1e-7, atol=1e-10)


def test_where_it_has_no_say(network: StiffnessNetwork) -> None:
    point = read_point(alloy())
    assert asked(LearnedHessians(network, elements=[29, 79]), point) is not None
    assert asked(LearnedHessians(network, elements=[29]), point) is None
    hydrostatic = read_point(FrechetCellFilter(alloy(), hydrostatic_strain=True))
    assert asked(LearnedHessians(network), hydrostatic) is None


def test_weights_that_are_no_numbers_answer_with_none(make_stiffness_policy: Callable) -> None:
    network = make_stiffness_policy(0).network
    with torch.no_grad():
        network.to_springs.weight.fill_(torch.nan)
    stiffness, forces = hessian_at(alloy(), network)
    assert np.isnan(stiffness.solve(forces)).all()
