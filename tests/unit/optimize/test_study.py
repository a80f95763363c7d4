"""Studies: examples are exact where the physics is, only a better student takes over, and a resumed one is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms

from relaxion.files import Stored
from relaxion.memory.trajectory import Trajectory
from relaxion.networks.metric.network import MetricNetwork, MetricSettings
from relaxion.networks.metric.teacher import relative_errors
from relaxion.optimize.examples import ExampleSettings, bases_of, examples_of
from relaxion.optimize.study import Study, StudySettings, is_apart
from relaxion.structures import Outcome

SMALL = MetricSettings(channels=8, n_hidden=8, n_layers=1, cutoff_angstrom=4.0)


def network(seed: int = 0) -> MetricNetwork:
    return MetricNetwork(SMALL, torch.Generator().manual_seed(seed))


def quadratic(
    seed: int, *, stiffness: float = 3.0, outcome: Outcome = Outcome.CONVERGED, points: int = 4
) -> Trajectory:
    """Three atoms held by springs of their own, on their way home."""
    random, stiffness = np.random.default_rng(seed), 3.0  # eV/Å²
    home = Atoms("Cu3", [[0, 0, 0], [2.5, 0, 0], [0, 2.5, 0]]).positions
    start = random.normal(0, 0.15, (3, 3))
    start -= start.mean(axis=0)
    ways = np.stack([start * 0.35**number for number in range(points)])
    return Trajectory(
        key=f"{seed}",
        kind="memory",
        engine="springs",
        outcome=int(outcome),
        cell_free=False,
        numbers=torch.tensor([29, 29, 29]),
        pbc=torch.zeros(3, dtype=torch.bool),
        movable=torch.ones(3, dtype=torch.bool),
        cells=torch.zeros(points, 3, 3, dtype=torch.float64),
        positions=torch.from_numpy(home + ways),
        energies=torch.from_numpy((0.5 * stiffness * ways**2).sum(axis=(1, 2))),
        forces=torch.from_numpy(-stiffness * ways),
        stresses=torch.zeros(points, 3, 3, dtype=torch.float64),
    )


def test_secants_lead_to_the_end_and_are_exact():
    found = examples_of(quadratic(0), ExampleSettings())
    assert found is not None
    assert (found.number, found.finished, found.formula) == (3, True, "Cu3")
    lessons = found.lessons
    pulls = lessons.state.evaluation.forces - lessons.left_over.atoms
    assert pulls.numpy() == pytest.approx(3.0 * lessons.goal.displacements.numpy(), abs=1e-9)


def test_an_unfinished_relaxation_teaches_from_base_to_base():
    unfinished = replace(quadratic(0, outcome=Outcome.STEP_LIMIT), bases=torch.tensor([-1, 0, 0, 2]))
    assert bases_of(unfinished).tolist() == [0, 2, 3]  # the second point was rejected
    found = examples_of(unfinished, ExampleSettings())
    assert found is not None
    assert (found.number, found.finished) == (2, False)
    assert found.lessons.goal.displacements[:3].numpy() == pytest.approx(
        (unfinished.positions[2] - unfinished.positions[0]).numpy(), abs=1e-9
    )


def test_what_teaches_nothing_is_left_out():
    good = quadratic(0)
    assert examples_of(replace(good, forces=-good.forces), ExampleSettings()) is None  # bends downwards
    assert examples_of(replace(good, forces=good.forces * torch.nan), ExampleSettings()) is None
    assert examples_of(good, ExampleSettings(largest_n_atoms=2)) is None
    assert examples_of(quadratic(0, points=1), ExampleSettings()) is None


def filled(settings: StudySettings, number: int = 24) -> Study:
    study = Study(network(), settings)
    for seed in range(number):
        found = examples_of(quadratic(seed), settings)
        assert found is not None
        study.add(found)
    return study


def test_a_better_student_takes_over_and_its_origin_stays():
    study = filled(StudySettings(n_updates=30, n_lessons=8, learning_rate=3e-3, least_apart=3))
    before = [parameter.clone() for parameter in study.network.parameters()]
    assert {is_apart(one.key, 4) for one in study.taught} == {False}
    found = study.learn()
    assert found is not None
    assert found.better
    assert found.high < 1
    assert study.n_adopted == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, study.network.parameters(), strict=True))
    assert found.n_apart == len(study.apart) >= 3


def test_a_worse_student_never_takes_over_and_starts_again():
    study = filled(StudySettings(n_updates=30, n_lessons=8, learning_rate=3e-3, least_apart=3))
    for _ in range(30):
        study.update()
    study.network.load_state_dict(study.student.state_dict())  # good already
    study.student.load_state_dict(network(0).state_dict())  # has learned nothing
    before = [parameter.clone() for parameter in study.network.parameters()]
    found = study.judge()
    assert found is not None
    assert found.worse
    assert study.n_adopted == 0
    for kept, used, student in zip(before, study.network.parameters(), study.student.parameters(), strict=True):
        assert torch.equal(kept, used)
        assert torch.equal(kept, student)


def test_too_few_judges_prove_nothing():
    study = filled(StudySettings(n_updates=2, n_lessons=4, least_apart=1000))
    assert study.learn() is None
    assert study.n_adopted == 0
    assert Study(network()).learn() is None  # nothing to learn from


def test_a_round_that_brought_nothing_new_is_studied_too():
    study = filled(StudySettings(n_updates=1, n_lessons=4))
    study.learn()
    assert study.n_new == 0
    study.learn()
    assert study.n_studies == 2


def test_long_relaxations_held_apart_are_judged_by_few_examples():
    study = filled(StudySettings(most_judged=2))
    assert {one.number for one in study.apart} == {2}
    assert max(one.number for one in study.taught) > 2


def test_a_resumed_study_is_the_same_to_the_bit():
    settings = StudySettings(n_updates=6, n_lessons=4)
    straight, first, second = filled(settings), filled(settings), filled(settings)
    straight.learn()
    for _ in range(3):
        first.update()
    second.restore(Stored(first.snapshot(), {}))
    assert second.n_updates == 3
    second.learn()
    for one, other in zip(straight.student.parameters(), second.student.parameters(), strict=True):
        assert torch.equal(one, other)
    assert straight.verdict == second.verdict


def test_mixed_with_secants_of_unfinished_ones():
    finished, other = examples_of(quadratic(1), ExampleSettings()), quadratic(2, outcome=Outcome.RUNNING)
    unfinished = examples_of(other, ExampleSettings())
    assert finished is not None
    assert unfinished is not None
    both = type(finished.lessons).concatenate([finished.lessons, unfinished.lessons])
    assert bool(torch.isfinite(relative_errors(network(), both)).all())


def test_what_turned_out_worse_than_the_beginning_is_taken_back():
    study = filled(StudySettings(n_updates=30, n_lessons=8, learning_rate=3e-3, least_apart=3))
    for _ in range(30):
        study.update()
    study.origin.load_state_dict(study.student.state_dict())  # it began well
    study.network.load_state_dict(network(0).state_dict())
    study.student.load_state_dict(network(0).state_dict())
    study.n_adopted = 1
    study.judge()
    assert study.n_adopted == 0
    for begun, used in zip(study.origin.parameters(), study.network.parameters(), strict=True):
        assert torch.equal(begun, used)
