"""The quasi-Newton core on problems whose answer is known."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
from ase import Atoms

from relaxion.apps.comparison import find_set
from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer import classical
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import Secant, Secants, corrected, weighted_error
from relaxion.optimizer.hessian.springs import bonds_of
from relaxion.optimizer.point import Geometry, Point, Proposal, dot, longest
from relaxion.optimizer.step import Fire, Stepper, propose
from relaxion.optimizer.trust_region import TrustRegionSettings, energy_change, noise, screened
from relaxion.potentials.base import Potential
from relaxion.potentials.pairwise import LennardJones
from relaxion.train.data.alloys import optbench_cluster

GENERATOR = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state


def bowl(coordinates, stiffness) -> Point:
    """A quadratic energy with its minimum at zero."""
    flat = coordinates.ravel()
    return Point(coordinates, -(stiffness @ flat).reshape(-1, 3), 0.5 * float(flat @ stiffness @ flat), None)


def random_stiffness(size, smallest=1.0, largest=30.0):
    directions, _ = np.linalg.qr(GENERATOR.normal(size=(size, size)))
    return directions @ np.diag(np.geomspace(smallest, largest, size)) @ directions.T


def proposed(stepper: Stepper, point: Point) -> Proposal:
    """One step with nothing known of the structure."""
    return propose([stepper], [point])[0]


def descend(proposing, start, stiffness, steps):
    point, track = bowl(start, stiffness), []
    for _ in range(steps):
        proposal = proposing(point)
        track.append(point)
        point = bowl(proposal.base.coordinates + proposal.step, stiffness)
    return point, track


def test_the_newest_secant_is_reproduced_exactly():
    secants = []
    stiffness = random_stiffness(12)
    for _ in range(4):
        step = GENERATOR.normal(size=(4, 3))
        secants.append(Secant(step, (stiffness @ step.ravel()).reshape(4, 3)))
    answer = corrected(secants[-1].drop, secants, lambda forces: 0.05 * forces)
    assert np.allclose(answer, secants[-1].step, atol=1e-12)


def test_the_correction_equals_dense_bfgs():
    """Two-loop recursion against the textbook update of the whole inverse matrix."""
    stiffness, secants = random_stiffness(6), []
    inverse = 0.1 * np.eye(6)
    for _ in range(3):
        step = GENERATOR.normal(size=6)
        drop = stiffness @ step
        left = np.eye(6) - np.outer(step, drop) / (step @ drop)
        inverse = left @ inverse @ left.T + np.outer(step, step) / (step @ drop)
        secants.append(Secant(step.reshape(2, 3), drop.reshape(2, 3)))
    forces = GENERATOR.normal(size=(2, 3))
    answer = corrected(forces, secants, lambda rows: 0.1 * rows)
    assert np.allclose(answer.ravel(), inverse @ forces.ravel(), atol=1e-12)


def test_finds_the_bottom_of_a_bowl():
    stiffness = random_stiffness(9)
    point, _ = descend(partial(proposed, Stepper()), 0.2 * GENERATOR.normal(size=(3, 3)), stiffness, 20)
    assert longest(point.forces) < 1e-4


def test_steps_never_exceed_the_trust_radius():
    method = Stepper(ClassicalSettings(TrustRegionSettings(largest=0.1)))
    proposal = proposed(method, bowl(5 * np.ones((2, 3)), np.eye(6)))
    assert longest(proposal.step) == pytest.approx(0.1)


def test_a_worse_point_is_rejected_and_teaches(monkeypatch):
    monkeypatch.setattr(classical, "PLAIN_STIFFNESS", 1.0)
    method = Stepper(ClassicalSettings(TrustRegionSettings(first=1.0, largest=1.0)))
    stiffness = 30.0 * np.eye(3)
    start = bowl(np.array([[0.2, 0.0, 0.0]]), stiffness)
    first = proposed(method, start)
    worse = bowl(start.coordinates + first.step, stiffness)
    assert worse.energy > start.energy
    second = proposed(method, worse)
    assert second.base is start
    assert len(method.secants.recent) == 1
    assert np.allclose(start.coordinates + second.step, 0, atol=1e-12)  # one secant suffices for one stiffness


def test_a_point_that_is_not_finite_is_rejected_and_not_learned():
    method = Stepper()
    start = bowl(np.ones((2, 3)), np.eye(6))
    proposed(method, start)
    broken = Point(np.zeros((2, 3)), np.full((2, 3), np.nan), 0.0, None)
    proposal = proposed(method, broken)
    assert proposal.base is start
    assert method.secants.recent == []
    assert np.isfinite(proposal.step).all()


def test_negative_curvature_is_not_learned():
    secants = Secants(10)
    secants.learn(bowl(np.ones((1, 3)), -np.eye(3)), bowl(2 * np.ones((1, 3)), -np.eye(3)))
    assert secants.recent == []
    secants.learn(bowl(np.ones((1, 3)), np.eye(3)), bowl(2 * np.ones((1, 3)), np.eye(3)))
    assert len(secants.recent) == 1


def test_many_rejections_hand_over_to_fire_and_back():
    chain = Stepper()
    stiffness = 10 * np.eye(6)
    point, methods = bowl(0.3 * np.ones((2, 3)), stiffness), []
    for number in range(40):
        (proposal,) = propose([chain], [point])
        methods.append(proposal.method)
        base, step = proposal.base, proposal.step
        point = bowl(base.coordinates + step, stiffness)
        if number < 7:  # a wall for a while: every point is worse than the one before
            point = Point(point.coordinates, -10 * base.forces, base.energy + 4.5 * dot(base.forces, step), None)
        if methods.count("fire") == 20 and methods[-1] == "fire":  # no answer where the quasi-Newton method is new
            point = Point(point.coordinates, np.full_like(point.forces, np.nan), np.nan, None)
    assert methods.count("fire") == chain.fallback_used == 21
    assert methods[-1] == "plain"
    assert longest(point.forces) < 1e-4


def test_fire_rolls_down_and_survives_nan():
    fire, stiffness = Fire(), random_stiffness(6)
    point, _ = descend(fire.propose, 0.3 * np.ones((2, 3)), stiffness, 300)
    assert longest(point.forces) < 1e-2
    back = fire.propose(Point(point.coordinates, point.forces * np.nan, np.nan, None))
    assert np.isfinite(back.step).all()


def test_rounding_noise_is_judged_by_forces():
    stiffness = np.eye(3)
    before, after = bowl(np.array([[1e-3, 0, 0]]), stiffness), bowl(np.array([[0.5e-3, 0, 0]]), stiffness)
    shifted = Point(after.coordinates, after.forces, before.energy + 0.5 * noise(before.energy), None)
    step = after.coordinates - before.coordinates
    assert shifted.energy > before.energy
    assert energy_change(before, shifted, step) == pytest.approx(after.energy - before.energy)


def test_the_better_stiffness_has_the_smaller_error():
    step = GENERATOR.normal(size=(2, 3))
    stiffness = random_stiffness(6)
    secant = Secant(step, (stiffness @ step.ravel()).reshape(2, 3))
    exact = np.linalg.solve(stiffness, secant.drop.ravel()).reshape(2, 3)
    assert weighted_error([secant], [exact]) == pytest.approx(0, abs=1e-10)
    assert weighted_error([secant], [7 * exact]) == pytest.approx(0, abs=1e-10)  # the scale is measured, not guessed
    assert weighted_error([secant], [secant.drop]) > 0.1


def test_the_screen_stops_atoms_before_they_collide():
    place = Geometry(
        np.array([[0.0, 0, 0], [2.6, 0, 0]]),
        np.zeros((3, 3)),
        np.zeros(3, bool),
        np.array([29, 29]),
        np.ones((2, 3), bool),
    )
    point = Point(place.positions, np.zeros((2, 3)), 0.0, place)
    collide = Proposal(point, np.array([[1.0, 0, 0], [-1.0, 0, 0]]), -1.0, "plain")
    (bonds,) = bonds_of([place])
    left = screened(collide, bonds)
    gap = (place.positions + left.step)[1, 0] - (place.positions + left.step)[0, 0]
    assert gap == pytest.approx(0.55 * 2 * 1.32, abs=1e-9)
    share = left.step[0, 0]
    assert left.expected_change == pytest.approx(-share * (2 - share))
    part = Proposal(point, -collide.step, -1.0, "plain")
    assert screened(part, bonds) is part


def mean_calls(relaxer: BatchRelaxer, starts: Iterable[Atoms], *, cell: bool = False) -> float:
    for atoms in starts:
        relaxer.add(atoms, cell=cell)
    found = list[int]()
    while relaxer.n_running or relaxer.has_finished:
        found += [relaxed.force_calls for relaxed in relaxer.advance()]
    return float(np.mean(found))


def core_and_plain(potential: Potential, limits: BatchSettings) -> list[BatchRelaxer]:
    """Plain: the same without springs, a curvature-scaled L-BFGS."""
    both = ClassicalSettings(), ClassicalSettings(use_springs=False)
    return [BatchRelaxer(potential, limits, lambda _, own=own: ("core", new_stepper(own))) for own in both]


@pytest.mark.parametrize(("scale", "depth"), [(0.5, 1.0), (1.0, 10.0), (5.0, 1.0)])
def test_springs_help_in_any_units(scale, depth):
    """Lennard-Jones clusters, whose bonds are not as long as the covalent radii of their element say."""
    generator = np.random.default_rng(5)
    starts = [optbench_cluster(generator, 20) for _ in range(3)]
    for atoms in starts:
        atoms.positions *= scale
    potential = LennardJones(epsilon=depth, sigma=scale, cutoff=15 * scale)
    limits = BatchSettings(fmax=0.05 * depth / scale, max_force_calls=600)
    core, plain = (mean_calls(relaxer, starts) for relaxer in core_and_plain(potential, limits))
    assert core <= 0.75 * plain


@pytest.mark.parametrize(
    ("name", "number", "most"),
    [("emt-slabs", 300, 1.05), ("emt-bulk", 30, 0.75), ("emt-bulk-cell", 15, 0.65), ("alfe", 40, 0.8)],
)
def test_plain_quasi_newton_does_not_beat_the_core(name, number, most):
    """R11.3; springs do not fit EMT's adsorbates, so slabs are where they could harm."""
    family = find_set(name)
    both = core_and_plain(family.make_potential(), BatchSettings(max_force_calls=500))
    core, plain = (mean_calls(relaxer, family.starts(number, 8151), cell=family.free_cell) for relaxer in both)
    assert core <= most * plain
