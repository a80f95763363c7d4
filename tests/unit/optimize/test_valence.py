"""Valence coordinates: derivatives, what is a molecule and what is not, the model, secants and curved steps."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111, graphene, molecule
from ase.build.tube import nanotube

from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.internal import (
    LARGEST_DENSE,
    InternalHessian,
    InternalSecants,
    JoinedHessian,
    along_internals,
    internal_at,
    moved,
)
from relaxion.optimizer.hessian.internal_coordinates import constants_of, difference, factors_of, values_at
from relaxion.optimizer.hessian.internal_topology import Topology, bonds_in, topology_of
from relaxion.optimizer.hessian.springs import SpringSettings, bonds_of, springs_at
from relaxion.optimizer.point import Geometry, Point, longest
from relaxion.optimizer.step import propose

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "relaxation"))  # last: `tables` is PyTables too

from flexible_molecules import flexible_molecule


def geometry(atoms: Atoms, cell_factor: float = 0.0, fixed: tuple[int, ...] = ()) -> Geometry:
    free = np.ones((len(atoms) + (3 if cell_factor else 0), 3), dtype=bool)
    free[list(fixed)] = False
    numbers = atoms.numbers.astype(np.int64)
    return Geometry(atoms.positions.copy(), np.array(atoms.cell), np.array(atoms.pbc), numbers, free, cell_factor)


def topology(place: Geometry, known: Topology | None = None) -> Topology | None:
    return topology_of(place, bonds_in(place, bonds_of([place])[0], known))


def model(place: Geometry, known: Topology | None = None) -> InternalHessian:
    found = internal_at(place, bonds_of([place])[0], known, SpringSettings())
    assert found is not None
    return found


def rattled(name: str, width: float = 0.03) -> Atoms:
    atoms = molecule(name)
    atoms.rattle(width, seed=1)
    return atoms


def wrapped_methanol() -> Atoms:
    """A molecule cut by the faces of its cell."""
    atoms = molecule("CH3OH", cell=[3.9, 4.5, 4.0], pbc=True)
    atoms.positions += [2.7, 0.1, 0.2]
    atoms.wrap()
    atoms.rattle(0.02, seed=2)
    return atoms


NAMES = ["C2H6", "C6H6", "H2CO", "C2H2", "CO2", "C3H4_C3v", "C3H4_D2d", "2-butyne", "BF3", "ClF3", "bicyclobutane"]


@pytest.mark.parametrize(
    ("atoms", "factor"),
    [*((rattled(name), 0.0) for name in NAMES), (wrapped_methanol(), 0.0), (wrapped_methanol(), 6.0)],
    ids=[*NAMES, "periodic", "strained"],
)
def test_derivatives_are_those_of_the_values(atoms, factor):
    place = geometry(atoms, factor)
    found = topology(place)
    assert found is not None
    slopes = values_at(found, place).matrix(found, place).toarray()
    for column in range(slopes.shape[1]):
        step = np.zeros(place.free.shape)
        step.flat[column] = 1e-5
        after, before = (values_at(found, moved(place, sign * step)).q for sign in (1, -1))
        assert np.allclose(difference(found, after, before) / 2e-5, slopes[:, column], atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_all_vibrations_are_described(name):
    atoms = rattled(name)
    place = geometry(atoms)
    found = topology(place)
    slopes = values_at(found, place).matrix(found, place).toarray()
    assert np.linalg.matrix_rank(slopes, tol=1e-2) >= 3 * len(atoms) - 6


@pytest.mark.parametrize("name", ["CO2", "C2H2", "HCN"])
def test_a_bend_is_smooth_through_a_straight_line(name):
    """Exactly straight, and bent by little to both sides: two perpendicular bends that change sign."""
    atoms = molecule(name)
    place = geometry(atoms)
    found = topology(place)
    assert len(found.bends) == 0
    assert len(found.straight) == len(atoms) - 2
    step = np.zeros((len(atoms), 3))
    step[0] = [0.1, 0, 0]
    there, back = (values_at(found, moved(place, sign * step)).q for sign in (1, -1))
    bends = slice(found.n_bonds, None)
    assert np.abs(there[bends]).max() > 0.05
    assert np.allclose(there[bends], -back[bends], atol=1e-10)
    assert np.isfinite(model(place).solve(np.ones((len(atoms), 3)))).all()


def test_torsions_look_across_straight_chains():
    allene, butyne = topology(geometry(molecule("C3H4_D2d"))), topology(geometry(molecule("2-butyne")))
    assert len(allene.torsions) == 4
    assert len(butyne.torsions) == 9
    assert len(allene.links.first) == 2 * allene.n_bonds + 1


@pytest.mark.parametrize(
    "atoms",
    [
        Atoms("C"),
        Atoms("H2", [[0, 0, 0], [0, 0, 0.74]]),
        Atoms("H8", np.random.default_rng(0).uniform(0, 1, (8, 3))),
        bulk("Cu", cubic=True),
        bulk("C", "diamond", a=3.57, cubic=True),
        graphene(size=(3, 3, 1), vacuum=5),
        Atoms("Ar2", [[0, 0, 0], [0, 0, 1.9]]),
        Atoms("C8", np.random.default_rng(0).uniform(0, 1.2, (8, 3))),
    ],
    ids=["atom", "hydrogen", "heap", "metal", "diamond", "graphene", "noble", "crowded"],
)
def test_what_is_no_molecule_keeps_springs(atoms):
    place = geometry(atoms)
    assert internal_at(place, bonds_of([place])[0], None, SpringSettings()) is None


def test_chains_and_molecules_on_metals_are_molecules():
    tube = nanotube(3, 3, length=1, vacuum=5)
    assert topology(geometry(tube)).n_bonds == 18
    slab = fcc111("Cu", (2, 2, 2), vacuum=6, periodic=True)
    guest = molecule("CH3OH")
    guest.positions += slab.positions[-1] + [0, 0, 2.2]
    found = topology(geometry(slab + guest))
    assert found.members.tolist() == [False] * 8 + [True] * 6
    assert found.n_bonds == 5


def test_bonds_stay_until_they_break():
    def water(length: float) -> Geometry:
        return geometry(Atoms("OH2", [[0, 0, 0], [length, 0, 0], [0, 0.97, 0]]))

    natural = 0.66 + 0.31
    bound = topology(water(1.25 * natural))
    assert bound.n_bonds == 2
    assert topology(water(1.5 * natural)).n_bonds == 1
    assert topology(water(1.5 * natural), bound).n_bonds == 2
    assert topology(water(1.7 * natural), bound).n_bonds == 1
    assert model(water(1.2 * natural), bound).topology is bound


def test_force_constants_are_those_of_lindh():
    """Ethane's C-C bond as long as R = 2.87 bohr: g is 1."""
    atoms = molecule("C2H6")
    place = geometry(atoms)
    found = topology(place)
    constants = constants_of(found, place, found.links.vectors(place))
    lengths = np.linalg.norm(found.links.vectors(place), axis=1)[0]
    g = np.exp(0.28 * (2.87**2 - (lengths / 0.529177) ** 2))
    assert constants[0] == pytest.approx(0.45 * g * 97.1736, rel=1e-4)
    assert constants.min() > 0.05


@pytest.mark.parametrize(("factor", "fixed"), [(0.0, ()), (6.0, ()), (0.0, (0, 3))], ids=["atoms", "cell", "fixed"])
def test_solve_undoes_apply(factor, fixed):
    place = geometry(wrapped_methanol(), factor, fixed)
    stiffness = model(place)
    step = np.random.default_rng(0).normal(size=place.free.shape) * place.free
    assert np.allclose(stiffness.solve(stiffness.apply(step)), step, atol=1e-8)
    assert (stiffness.solve(np.ones(place.free.shape))[~place.free] == 0).all()
    dense = stiffness.matrix.toarray()
    assert np.allclose(dense, dense.T, atol=1e-10)
    assert np.linalg.eigvalsh(dense).min() > 0


def test_gradients_split_and_join():
    """Also of two molecules: what turns and moves them as a whole is left to their Cartesian coordinates."""
    pair = molecule("H2O") + molecule("NH3")
    pair.positions[3:] += [0, 0, 3]
    place = model(geometry(pair))
    gradient = np.random.default_rng(0).normal(size=(len(pair), 3))
    by_q, by_x = place.split(gradient)
    assert np.allclose(place.joined(by_q, by_x), gradient.ravel(), atol=1e-10)
    step = 1e-3 * np.random.default_rng(1).normal(size=gradient.shape)
    assert np.allclose(place.carried_out(place.slopes @ step.ravel(), step.ravel()), step.ravel(), atol=1e-12)


def test_a_curved_step_turns_a_methyl_group_without_stretching_it():
    atoms = molecule("C2H6")
    place = geometry(atoms)
    stiffness = model(place)
    axis = atoms.positions[1] - atoms.positions[0]
    turning = [k for k in range(2, 8) if np.linalg.norm(atoms.positions[k] - atoms.positions[0]) < 1.2]
    straight = np.zeros((8, 3))
    straight[turning] = np.cross(axis / np.linalg.norm(axis), atoms.positions[turning] - atoms.positions[0])
    straight *= 0.5 / longest(straight)
    curved = along_internals(stiffness, straight, 0.6)
    bonds = slice(0, stiffness.topology.n_bonds)
    lengths = stiffness.values.q[bonds]
    apart = [
        np.abs(values_at(stiffness.topology, moved(place, s)).q[bonds] - lengths).max() for s in (straight, curved)
    ]
    assert apart[0] > 0.05
    assert apart[1] < 0.005
    assert longest(along_internals(stiffness, straight, 0.1)) == pytest.approx(0.1)


def test_a_molecule_that_may_not_move_leaves_everything_to_the_other_model():
    slab = fcc111("Pt", (2, 2, 2), vacuum=5, periodic=True)
    place = geometry(slab + Atoms("CO", slab.positions[-1] + [[0, 0, 1.9], [0, 0, 3.05]]), fixed=(0, 1, 2, 3, 8, 9))
    (other,) = springs_at([place], SpringSettings())
    joined = JoinedHessian(other, model(place))
    forces = np.random.default_rng(0).normal(size=place.free.shape) * place.free
    assert np.allclose(joined.solve(forces, 0.3), other.solve(forces, 0.3))
    assert np.allclose(joined.apply(forces), other.apply(forces))


@pytest.mark.parametrize("factor", [0.0, 6.0], ids=["fixed cell", "free cell"])
@pytest.mark.parametrize("name", ["CO", "H2O", "CH3OH", "C2H2"])
def test_a_joined_hessian_takes_deformations_from_one_model_and_the_rest_from_the_other(name, factor):
    slab = fcc111("Pt", (2, 2, 2), vacuum=5, periodic=True)
    guest = rattled(name)
    guest.positions += slab.positions[-1] + [0.3, 0.2, 2.2] - guest.positions.min(axis=0)
    place = geometry(slab + guest, factor, fixed=(0, 1, 2, 3))
    (other,) = springs_at([place], SpringSettings())
    internal = model(place)
    joined = JoinedHessian(other, internal)
    shape = place.free.shape
    free = place.free.ravel()
    columns = [joined.apply(column.reshape(shape)).ravel() for column in np.diag(free.astype(float))]
    matrix = np.stack(columns)[np.ix_(free, free)]
    assert np.allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > 0.01
    forces = np.random.default_rng(0).normal(size=shape) * place.free
    for shift in (0.0, 0.7, 0.0):
        step = joined.solve(forces, shift)
        assert np.allclose(joined.apply(step) + shift * step, forces)
    stretch = (
        internal.slopes[[0]].toarray().reshape(shape)
    )  # of the first bond: more than internal.matrix has by springs
    by_rule = (internal.slopes @ stretch.ravel()) ** 2 @ internal.constants
    assert np.sum(stretch * joined.apply(stretch)) == pytest.approx(by_rule + 0.1 * np.sum(stretch**2), rel=1e-6)
    shifted = np.zeros(shape)
    shifted[len(slab) : len(slab) + len(guest)] = [0.1, -0.2, 0.3]
    assert np.sum(shifted * joined.apply(shifted)) == pytest.approx(np.sum(shifted * other.apply(shifted)))


class Planted:
    """A molecule whose energy is a sum over its valence coordinates: quadratic, but for torsions with three minima."""

    def __init__(self, atoms: Atoms, seed: int = 0, scale: float = 0.6) -> None:
        self.atoms, place = atoms, geometry(atoms)
        self.topology = topology(place)
        values = values_at(self.topology, place)
        random = np.random.default_rng(seed)
        spread = random.uniform(0.5, 2.0, len(values.q))
        by_rule = constants_of(self.topology, place, values.vectors)
        self.k = scale * spread * by_rule * factors_of(self.topology)
        self.q = values.q

    def at(self, positions: np.ndarray) -> Point:
        place = geometry(Atoms(self.atoms.numbers, positions))
        values = values_at(self.topology, place)
        apart = difference(self.topology, values.q, self.q)
        forces = -(values.matrix(self.topology, place).T @ (self.k * apart)).reshape(-1, 3)
        return Point(positions, forces, 0.5 * float(self.k @ apart**2), place)


def calls(planted: Planted, start: np.ndarray, settings: ClassicalSettings | None = None) -> int:
    stepper, positions = new_stepper(settings), start
    for number in range(1, 200):
        point = planted.at(positions)
        if point.largest_force < 0.01:
            return number
        (proposal,) = propose([stepper], [point])
        assert longest(proposal.step) <= 0.6 + 1e-12
        positions = proposal.base.coordinates + proposal.step
    return 200


def test_fewer_calls_than_springs_on_a_flexible_molecule():
    atoms = flexible_molecule(np.random.default_rng(3), 1)
    planted = Planted(atoms)
    start = atoms.positions + np.random.default_rng(0).normal(0, 0.08, atoms.positions.shape)
    ours, springs = calls(planted, start), calls(planted, start, ClassicalSettings(internal=False))
    assert ours <= 20
    assert springs > 1.5 * ours


@pytest.mark.parametrize("name", ["CO2", "C6H6", "2-butyne", "C3H4_D2d", "H2O"])
def test_flat_and_straight_molecules_relax(name):
    atoms = molecule(name)
    start = atoms.positions + np.random.default_rng(0).normal(0, 0.05, atoms.positions.shape)
    assert calls(Planted(atoms), start) <= 20
    assert calls(Planted(atoms), 1.15 * atoms.positions) <= 20  # stays in its line or plane


def test_secants_survive_a_change_of_the_topology():
    atoms = flexible_molecule(np.random.default_rng(3), 1)
    planted, memory = Planted(atoms), InternalSecants()
    random = np.random.default_rng(0)
    one, two = (planted.at(atoms.positions + random.normal(0, 0.02, (len(atoms), 3))) for _ in range(2))
    here = model(one.geometry)
    memory.secants(here)
    memory.learn(one, two)
    (known,) = memory.secants(here)
    (again,) = memory.secants(model(two.geometry))
    for first, second in zip(known, again, strict=True):
        assert np.linalg.norm(first - second) < 0.2 * np.linalg.norm(first)
    restored = InternalSecants.restored(memory.plain(), two)
    assert restored.topology.made_of == memory.topology.made_of
    assert np.array_equal(restored.secants(model(two.geometry))[0][1], again[1])


def test_many_molecules_go_the_sparse_way():
    """Many molecules: the factorisation is sparse, and gives what a dense one of the same matrix gives."""
    one = molecule("CH3OH")
    many = Atoms()
    for k in range(24):
        part = one.copy()
        part.positions += 4.2 * np.array([k % 4, k // 4 % 4, k // 16])
        many += part
    many.rattle(0.03, seed=0)
    stiffness = model(geometry(many))
    assert stiffness.matrix.shape[0] > LARGEST_DENSE
    forces = np.random.default_rng(0).normal(size=(len(many), 3))
    assert np.allclose(stiffness.apply(stiffness.solve(forces)), forces, atol=1e-6)
