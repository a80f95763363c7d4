"""The guard: a good stiffness is used, a bad one costs little, and no force call is spent on telling them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms

from relaxion import Relaxer
from relaxion.errors import PolicyError, SettingsError, StructureError
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.base import Base, Hessian, Secant, believed, corrected, damped, hessians_at, missed
from relaxion.optimizer.point import Geometry, Point, Proposal, dot, read_point
from relaxion.optimizer.safeguard import (
    DEFAULT,
    POLICY,
    Feedback,
    Safeguard,
    StepRule,
    constant_network,
    rule_of,
)
from relaxion.optimizer.step import Stepper, propose

FMAX = 0.02


class Planted:
    """A stiffness given as a matrix."""

    has_curvature = True

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix

    def apply(self, step: np.ndarray) -> np.ndarray:
        return (self.matrix @ step.ravel()).reshape(step.shape)

    def solve(self, forces: np.ndarray, shift: float = 0.0) -> np.ndarray:
        matrix = self.matrix + shift * np.eye(len(self.matrix))
        return np.linalg.solve(matrix, forces.ravel()).reshape(forces.shape)


class Source:
    """A policy that answers each point with a function of it; None: it has no say."""

    method = "policy"

    def __init__(self, answer: Callable[[Point], Hessian | None]) -> None:
        self.answer = answer

    def covers(self, _: Geometry) -> bool:
        return True

    def at(self, bases: Sequence[Base], _) -> list[Any]:
        return [self.answer(one.point) for one in bases]


def rattled(seed: int) -> Atoms:
    generator = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.set_chemical_symbols(list(generator.choice(["Cu", "Au", "Pd"], len(atoms))))
    atoms.positions += generator.normal(0, 0.12, (len(atoms), 3))
    atoms.calc = EMT()
    return atoms


def curvature(atoms: Atoms) -> np.ndarray:
    """The true stiffness by finite differences, made positive definite."""
    here, size = atoms.positions.copy(), 1e-3
    columns = []
    for k in range(here.size):
        forces = []
        for sign in (1, -1):
            moved = here.copy()
            moved.flat[k] += sign * size
            atoms.positions = moved
            forces.append(atoms.get_forces().ravel())
        columns.append((forces[1] - forces[0]) / (2 * size))
    atoms.positions = here
    values, vectors = np.linalg.eigh(np.array(columns + np.transpose(columns)) / 2)
    return vectors @ np.diag(np.maximum(np.abs(values), 0.5)) @ vectors.T


def calls(atoms: Atoms, chain: Stepper, fmax: float = FMAX) -> int:
    """Force calls until the largest force is below fmax."""
    for call in range(1, 200):
        point = read_point(atoms)
        if point.largest_force < fmax:
            return call
        (proposal,) = propose([chain], [point])
        atoms.set_positions(proposal.base.coordinates + proposal.step)
    return 200


def guarded(source, rule: StepRule | None = None, *, credulous: bool = False) -> tuple[Stepper, Safeguard]:
    stepper = Stepper(ClassicalSettings(internal=False), Source(source), rule)
    if credulous:
        stepper.safeguard.smallest_cosine = -1.0
        stepper.safeguard.largest_ratio = 1e9
    return stepper, stepper.safeguard


def core() -> Stepper:
    return Stepper()


def exact(point: Point) -> Hessian:
    assert point.geometry is not None
    atoms = Atoms(
        point.geometry.numbers, point.geometry.positions, cell=point.geometry.cell, pbc=True, calculator=EMT()
    )
    return Planted(curvature(atoms))


def test_true_curvature_saves_calls() -> None:
    ours = [calls(rattled(seed), guarded(exact)[0]) for seed in range(8)]
    classical = [calls(rattled(seed), core()) for seed in range(8)]
    assert sum(ours) < 0.9 * sum(classical)
    assert max(ours) <= 7
    alone = [calls(rattled(seed), guarded(exact, replace(DEFAULT, secant_weight=0.0))[0]) for seed in range(8)]
    assert sum(alone) < 0.85 * sum(classical)  # no secant could tell it anything
    assert max(alone) <= 6


@pytest.mark.parametrize("times", [1.9, 2.2])
@pytest.mark.parametrize("has_curvature", [True, False])
def test_steps_that_are_too_long_cost_little(times: float, has_curvature: bool) -> None:
    """Also of a policy that has a move only, which no secants correct."""

    def long(point: Point) -> Hessian:
        true = exact(point)
        assert isinstance(true, Planted)
        stiffness = Planted(true.matrix / times)
        stiffness.has_curvature = has_curvature
        return stiffness

    ours = [calls(rattled(seed), guarded(long)[0]) for seed in range(3)]
    assert sum(ours) <= 1.75 * sum(calls(rattled(seed), core()) for seed in range(3))


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_noise_in_place_of_a_stiffness_costs_little(size: float) -> None:
    """Any symmetric positive definite matrix: soft, stiff, pointing anywhere."""
    generator = np.random.default_rng(0)

    def noise(point: Point) -> Hessian:
        root = generator.normal(size=(point.forces.size, point.forces.size))
        return Planted(size * (root @ root.T) + 1e-3 * np.eye(len(root)))

    ours = [calls(rattled(seed), guarded(noise)[0]) for seed in range(8)]
    classical = [calls(rattled(seed), core()) for seed in range(8)]
    assert max(ours) < 200
    assert sum(ours) <= 2 * sum(classical)  # a new matrix at every point; weights of noise are tested elsewhere


def test_not_a_number_and_no_stiffness_are_the_core() -> None:
    for source in (lambda _: None, lambda point: Planted(np.full((point.forces.size,) * 2, np.nan) + 0.0)):
        chain, guard = guarded(source)
        assert calls(rattled(3), chain) == calls(rattled(3), core())
        assert guard.policy_steps == 0
        assert guard.classical_steps > 0


def test_mistrust_is_told_and_ends_by_itself() -> None:
    """A stiffness that is far too stiff at first and right from the third point on."""
    seen = 0

    def late(point: Point) -> Hessian:
        nonlocal seen
        seen += 1
        true = exact(point)
        assert isinstance(true, Planted)
        return true if seen > 2 else Planted(1e4 * np.eye(point.forces.size))

    chain, guard = guarded(late)
    atoms, methods = rattled(5), []
    while (point := read_point(atoms)).largest_force >= 1e-4:
        (proposal,) = propose([chain], [point])
        methods.append((proposal.method, proposal.reason))
        atoms.set_positions(proposal.base.coordinates + proposal.step)
    assert methods[0][0] == "springs"
    assert "times as long" in methods[0][1]
    assert methods[-1][0] == "policy"
    assert guard.policy_steps + guard.classical_steps == len(methods)


def test_damped_secants_keep_the_correction_positive() -> None:
    """Also where a secant is softer than the stiffness, or would be without Powell's damping."""
    generator = np.random.default_rng(1)
    stiffness = Planted(np.eye(9) * 10)
    step = generator.normal(size=(3, 3))
    (softened,) = damped([Secant(step, 1e-3 * step)], stiffness.apply)
    assert softened.curvature == pytest.approx(0.2 * dot(step, stiffness.apply(step)))


def test_secants_are_believed_by_length_and_age() -> None:
    """y ← w·y + (1 - w)·B·s, w = 0.9 · 0.8^age / (1 + (longest displacement / length)²)."""
    stiffness, generator = Planted(np.eye(6) * 4), np.random.default_rng(2)
    steps = [generator.normal(size=(2, 3)) for _ in range(3)]
    lengths = [0.1, 0.2, 0.05]
    steps = [length * step / np.linalg.norm(step, axis=1).max() for length, step in zip(lengths, steps, strict=True)]
    found = believed([Secant(step, 6 * step) for step in steps], stiffness.apply, 0.9, 0.1)
    weights = [0.9 * 0.64 / 2, 0.9 * 0.8 / 5, 0.9 / 1.25]  # the last is the newest
    for secant, step, weight in zip(found, steps, weights, strict=True):
        np.testing.assert_array_equal(secant.step, step)
        np.testing.assert_allclose(secant.drop, (6 * weight + 4 * (1 - weight)) * step)
    assert believed([Secant(steps[0], steps[0])], stiffness.apply, 0.0, 0.1) == []


def test_secants_that_the_stiffness_knows_change_nothing() -> None:
    generator = np.random.default_rng(3)
    root = generator.normal(size=(6, 6))
    stiffness, forces = Planted(root @ root.T + np.eye(6)), generator.normal(size=(2, 3))
    steps = [0.1 * generator.normal(size=(2, 3)) for _ in range(4)]
    secants = believed([Secant(step, stiffness.apply(step)) for step in steps], stiffness.apply, 0.9, 0.3)
    np.testing.assert_allclose(corrected(forces, secants, stiffness.solve), stiffness.solve(forces), rtol=1e-9)


def told(**changes: float | bool) -> Safeguard:
    """A safeguard that has just seen where a step of its policy led, with this feedback."""
    stepper, guard = guarded(exact)
    guard._feedback = lambda *_, **__: Feedback(**changes)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    point = read_point(rattled(0))
    last = Proposal(point, np.zeros_like(point.forces), -1.0, POLICY)
    guard.watch(point, last, stepper.region, accepted=True)
    return guard


def test_which_steps_hand_over_to_the_core() -> None:
    wrong, slow = float(np.log(3.5)), -0.1
    assert told(rejected=True).classical_steps_left == 1
    assert told(log_curvature_ratio=wrong, log_force_ratio=slow).classical_steps_left == 1
    assert told(log_curvature_ratio=-wrong, log_force_ratio=slow).classical_steps_left == 1
    # what was shortened, what got ahead, and what was about right all the same
    assert told(log_curvature_ratio=wrong, log_force_ratio=slow, back_off=0.5).classical_steps_left == 0
    assert told(log_curvature_ratio=wrong, log_force_ratio=-0.3).classical_steps_left == 0
    assert told(log_curvature_ratio=0.5, log_force_ratio=0.3, energy_ratio=0.1).classical_steps_left == 0


def with_control(control: StepRule, base: Point) -> Proposal:
    return propose([guarded(exact, control)[0]], [base])[0]


def test_the_control_acts() -> None:
    """Scale and trust make the step longer or shorter, the floor shortens it."""
    base = read_point(rattled(2))

    def length(control: StepRule) -> float:
        return float(np.linalg.norm(with_control(control, base).step))

    plain = length(StepRule())
    assert length(StepRule(log_scale=-0.5)) < plain
    assert length(StepRule(log_trust=-3.0)) < plain
    assert length(StepRule(floor=2.0)) < plain


def test_the_rule_says_how_secants_correct_the_step() -> None:
    atoms = rattled(2)
    base, stiffness = read_point(atoms), exact(read_point(atoms))
    steps = [0.05 * np.random.default_rng(seed).normal(size=base.forces.shape) for seed in range(3)]
    secants = [Secant(step, 1.5 * stiffness.apply(step)) for step in steps]

    def step(control: StepRule, has_curvature: bool = True) -> np.ndarray:
        planted = Planted(stiffness.matrix) if isinstance(stiffness, Planted) else stiffness
        planted.has_curvature = has_curvature
        stepper, guard = guarded(lambda _: planted, control, credulous=True)
        stepper.judge(base)
        stepper.secants.recent = secants
        (hessians,) = hessians_at([Base(base)], [guard.models])
        return stepper.step_from(base, hessians).step

    free = StepRule(log_trust=5.0)  # nothing is cut
    expected = corrected(base.forces, believed(secants, stiffness.apply, 0.9, 0.1), stiffness.solve)
    np.testing.assert_allclose(step(free), expected, rtol=1e-9)
    newest = corrected(base.forces, believed(secants[-1:], stiffness.apply, 0.5, 0.3), stiffness.solve)
    np.testing.assert_allclose(
        step(replace(free, secant_weight=0.5, n_secants=1, secant_length=0.3)), newest, rtol=1e-9
    )
    for plain in (step(replace(free, secant_weight=0.0)), step(free, has_curvature=False)):
        np.testing.assert_allclose(plain, stiffness.solve(base.forces), rtol=1e-9)
    floored = step(replace(free, floor=20.0))
    assert np.linalg.norm(floored) < 1.5 * np.linalg.norm(stiffness.solve(base.forces, 20.0))


def test_a_constant_rule_says_the_same_always() -> None:
    rule = StepRule(log_trust=0.7, secant_weight=0.5, n_secants=1, secant_length=0.25)
    described = constant_network(rule)
    assert rule_of(described, "mine") == rule
    of_before = {name: value for name, value in described.weights.items() if name != "secant_length"}
    of_before = rule_of(replace(described, weights=of_before), "mine")  # its weight was one of steps, not of secants
    assert (of_before.secant_weight, of_before.n_secants, of_before.secant_length) == (0.9, 8, 0.3)
    for name, value in (("secant_weight", 2.0), ("n_secants", 0.0), ("secant_length", 0.0), ("floor", -1.0)):
        weights = {**described.weights, name: torch.tensor(value)}
        with pytest.raises(PolicyError, match="mine sets parameters out of their ranges"):
            rule_of(replace(described, weights=weights), "mine")
    for weights in ({"secant_weight": torch.ones(1)}, {**described.weights, "floor": torch.ones(3)}):
        with pytest.raises(PolicyError, match="mine cannot be rebuilt"):
            rule_of(replace(described, weights=weights), "mine")


def test_feedback_by_hand() -> None:
    """On a quadratic energy the stiffness that made the step expects what is met."""
    matrix = np.diag(np.arange(1.0, 25.0))
    atoms = rattled(1)
    geometry = read_point(atoms).geometry
    place = np.full((8, 3), 0.01)

    def at(coordinates: np.ndarray) -> Point:
        forces = -(matrix @ coordinates.ravel()).reshape(-1, 3)
        return Point(coordinates, forces, 0.5 * float(coordinates.ravel() @ matrix @ coordinates.ravel()), geometry)

    stepper, guard = guarded(lambda _: Planted(2 * matrix), StepRule(), credulous=True)
    (proposal,) = propose([stepper], [at(place)])
    stepper.judge(at(place + proposal.step))
    assert guard.feedback.log_curvature_ratio == pytest.approx(np.log(0.5))
    # half the way to the minimum: ¾ of the energy is gone, where the stiffer stiffness expected ½ of ½
    assert guard.feedback.energy_ratio == pytest.approx(1.5)
    assert guard.feedback.log_force_ratio == pytest.approx(np.log10(0.5))
    assert guard.feedback.points == 2


def test_error_of_a_stiffness_counts_its_scale() -> None:
    step = np.ones((2, 3))
    secants = [Secant(step, 2 * step)]
    assert missed(secants, lambda rows: 2 * rows) == 0
    assert missed(secants, lambda rows: rows) == pytest.approx(0.5)
    assert missed([], lambda rows: rows) == 0


def test_guard_snapshot_goes_on_as_if_never_stopped() -> None:
    """With a stiffness that has just disappointed, which must be remembered."""

    def stiff(point: Point) -> Hessian:
        return Planted(2e3 * np.eye(point.forces.size))

    def made() -> Stepper:
        return guarded(stiff, StepRule(secant_weight=0.5), credulous=True)[0]

    straight, cut = made(), made()
    first, second = rattled(7), rattled(7)
    for _ in range(2):
        for atoms, chain in ((first, straight), (second, cut)):
            (proposal,) = propose([chain], [read_point(atoms)])
            atoms.set_positions(proposal.base.coordinates + proposal.step)
    fresh = made()
    fresh.restore(cut.snapshot())
    for _ in range(3):
        one, other = propose([straight, fresh], [read_point(first), read_point(second)])
        assert (one.method, one.reason) == (other.method, other.reason)
        np.testing.assert_array_equal(one.step, other.step)
        first.set_positions(one.base.coordinates + one.step)
        second.set_positions(other.base.coordinates + other.step)


def test_the_core_is_untouched() -> None:
    """A policy without an answer leaves exactly what the classical optimizer proposes."""
    atoms = rattled(4)
    point = read_point(atoms)
    alone, guard = core(), guarded(lambda _: None)[0]
    np.testing.assert_array_equal(propose([alone], [point])[0].step, propose([guard], [point])[0].step)


def test_a_stiffness_that_cannot_be_made_leaves_it_to_the_core() -> None:
    """For instance atoms strewn so far apart that no neighbours can be searched."""

    def broken(_: Point) -> Hessian:
        raise StructureError("extends over 2 km")

    chain, guard = guarded(broken)
    assert calls(rattled(3), chain) == calls(rattled(3), core())
    assert guard.policy_steps == 0


def test_mistrust_outlives_the_help_of_fire() -> None:
    _, guard = guarded(exact)
    guard.bad_steps, guard.classical_steps, guard.policy_steps = 3, 5, 2
    guard.reset()
    assert (guard.bad_steps, guard.classical_steps, guard.policy_steps) == (3, 5, 2)


class Stiff(EMT):
    """Three times as stiff as what the policy learned from."""

    def calculate(self, *arguments: Any) -> None:
        super().calculate(*arguments)
        self.results = {name: 3 * np.asarray(value) for name, value in self.results.items()} | {
            "energy": 3 * self.results["energy"]
        }


def test_a_stiffness_from_a_softer_potential_is_scaled_by_the_curvature_met(monkeypatch) -> None:
    def counted() -> int:
        total = 0
        for seed in range(4):
            atoms = rattled(seed)
            atoms.calc = Stiff()
            relaxer = Relaxer(atoms, policy="metals", logfile=None)
            assert relaxer.run(fmax=FMAX, steps=200)
            total += relaxer.force_calls
        return total

    scaled = counted()
    monkeypatch.setattr(Safeguard, "another_scale", 1e9)
    assert scaled < counted() - 3


class Well(Calculator):
    """One atom that moves along x through a well; energies with noise, as of a self-consistent code."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def __init__(self, energy: Callable[[float], float], force: Callable[[float], float], noise: float = 0.0) -> None:
        super().__init__()
        self.energy, self.force, self.noise = energy, force, noise
        self.generator = np.random.default_rng(0)

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        x, *across = self.atoms.positions[-1] - [2.0, 2.0, 6.0]
        forces = np.zeros((len(self.atoms), 3))
        forces[-1] = [self.force(x), *(-2.0 * place for place in across)]
        energy = self.energy(x) + sum(place**2 for place in across)
        self.results = {"energy": energy + self.noise * self.generator.normal(), "forces": forces}


WELLS = {
    "one minimum": (lambda x: x**2, lambda x: -2 * x),
    "two minima": (
        lambda x: 0.004 * ((x / 0.1) ** 2 - 1) ** 2,
        lambda x: -0.16 * (x / 0.1) * ((x / 0.1) ** 2 - 1),
    ),
}


@pytest.mark.parametrize("noise", [0.0, 0.004])
@pytest.mark.parametrize("start", [0.3, 0.31, 0.25])
@pytest.mark.parametrize("name", WELLS)
def test_steps_to_and_fro_are_noticed(name: str, start: float, noise: float) -> None:
    """A policy that is far too soft steps over the minimum, as far as it may, and back again."""
    atoms = Atoms("Al4H", [[0, 0, 0], [4, 0, 0], [0, 4, 0], [4, 4, 0], [2 + start, 2, 6]], cell=[8, 8, 20], pbc=True)
    atoms.set_constraint(FixAtoms(range(4)))
    atoms.calc = Well(*WELLS[name], noise=noise)
    soft = Planted(0.3 * np.eye(15))
    assert calls(atoms, guarded(lambda _: soft)[0]) <= 16


def test_small_forces_lead_to_small_steps() -> None:
    atoms = rattled(0)
    point = read_point(atoms)
    small = replace(point, forces=1e-3 * point.forces / point.largest_force)
    (proposal,) = propose([guarded(lambda _: Planted(1e-3 * np.eye(24)))[0]], [small])
    assert proposal.base.reach(proposal.step) <= 1e-3 / 0.2 + 1e-12


FAULTS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "factor": torch.linalg.LinAlgError("the factorization could not be completed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_policy_without_an_answer_is_named_with_its_reason(name: str) -> None:
    def fail(_: Point) -> Hessian:
        raise FAULTS[name]

    stepper, guard = guarded(fail)
    (proposal,) = propose([stepper], [read_point(rattled(0))])
    assert proposal.method == "springs"
    assert str(FAULTS[name]) in proposal.reason
    assert (stepper.policy_steps, guard.classical_steps) == (0, 1)


def test_faults_of_the_network_are_raised() -> None:
    """A tensor on the wrong device is no reason to go on quietly with another method."""

    def fail(_: Point) -> Hessian:
        raise RuntimeError("Expected all tensors to be on the same device")

    with pytest.raises(RuntimeError, match="same device"):
        propose([guarded(fail)[0]], [read_point(rattled(0))])
    with pytest.raises((RuntimeError, SettingsError)):
        Relaxer(rattled(0), logfile=None, device="meta").run(0.02)
