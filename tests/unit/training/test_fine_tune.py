"""Fine-tuning: examples are exact, only a better network takes over, and a resumed fit is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms

from relaxion.files import Stored
from relaxion.model.stiffness_network import StiffnessNetwork, StiffnessSettings
from relaxion.structures import Outcome
from relaxion.structures.trajectory import Trajectory
from relaxion.train.supervised.fine_tune import USUAL, FineTune, held_out
from relaxion.train.supervised.fit import Examples, bases_of, relative_errors, secants_of

SMALL = StiffnessSettings(channels=8, n_hidden=8, n_layers=1, cutoff_angstrom=4.0)


def network(seed: int = 0) -> StiffnessNetwork:
    return StiffnessNetwork(SMALL, torch.Generator().manual_seed(seed))


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
    found = secants_of(quadratic(0))
    assert found is not None
    assert (found.number, found.finished, found.formula) == (3, True, "Cu3")
    examples = found.examples
    pulls = examples.state.evaluation.forces - examples.left_over.atoms
    assert pulls.numpy() == pytest.approx(3.0 * examples.goal.displacements.numpy(), abs=1e-9)


def test_an_unfinished_relaxation_gives_secants_from_base_to_base():
    unfinished = replace(quadratic(0, outcome=Outcome.STEP_LIMIT), bases=torch.tensor([-1, 0, 0, 2]))
    assert bases_of(unfinished).tolist() == [0, 2, 3]  # the second point was rejected
    found = secants_of(unfinished)
    assert found is not None
    assert (found.number, found.finished) == (2, False)
    assert found.examples.goal.displacements[:3].numpy() == pytest.approx(
        (unfinished.positions[2] - unfinished.positions[0]).numpy(), abs=1e-9
    )


def test_what_no_stiffness_fits_is_left_out():
    good = quadratic(0)
    assert secants_of(replace(good, forces=-good.forces)) is None  # bends downwards
    assert secants_of(replace(good, forces=good.forces * torch.nan)) is None
    assert secants_of(quadratic(0, points=1)) is None


def filled(number: int = 24, points: int = 4, least_validation: int = 10, **changes: float) -> FineTune:
    tuning = FineTune(network(), USUAL.model_copy(update=changes), least_validation=least_validation)
    for seed in range(number):
        found = secants_of(quadratic(seed, points=points))
        assert found is not None
        tuning.add(found)
    return tuning


def test_a_better_network_takes_over_and_its_origin_stays():
    tuning = filled(fit_updates=30, examples_per_update=8, fit_learning_rate=3e-3, least_validation=3)
    before = [parameter.clone() for parameter in tuning.network.parameters()]
    assert {held_out(one.key, 4) for one in tuning.training.relaxations} == {False}
    found = tuning.learn()
    assert found is not None
    assert found.better
    assert found.high < 1
    assert tuning.n_adopted == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, tuning.network.parameters(), strict=True))
    assert found.n_validation == len(tuning.validation) >= 3


def test_a_worse_network_never_takes_over_and_starts_again():
    tuning = filled(fit_updates=30, examples_per_update=8, fit_learning_rate=3e-3, least_validation=3)
    for _ in range(30):
        tuning.update()
    tuning.network.load_state_dict(tuning.learning.state_dict())  # good already
    tuning.learning.load_state_dict(network(0).state_dict())  # has learned nothing
    before = [parameter.clone() for parameter in tuning.network.parameters()]
    found = tuning.test()
    assert found is not None
    assert found.worse
    assert tuning.n_adopted == 0
    for kept, used, learning in zip(before, tuning.network.parameters(), tuning.learning.parameters(), strict=True):
        assert torch.equal(kept, used)
        assert torch.equal(kept, learning)


def test_too_few_relaxations_held_out_prove_nothing():
    tuning = filled(fit_updates=2, examples_per_update=4, least_validation=1000)
    assert tuning.learn() is None
    assert tuning.n_adopted == 0
    assert FineTune(network()).learn() is None  # nothing to learn from


def test_a_round_that_brought_nothing_new_is_fitted_to_too():
    tuning = filled(fit_updates=1, examples_per_update=4)
    tuning.learn()
    assert tuning.training.n_new == 0
    tuning.learn()
    assert tuning.n_fits == 2


def test_long_relaxations_are_validated_by_few_examples():
    tuning = filled(points=6)
    assert {one.number for one in tuning.validation} == {3}
    assert max(one.number for one in tuning.training.relaxations) > 3


def test_a_resumed_fit_is_the_same_to_the_bit():
    straight, first, second = (filled(fit_updates=6, examples_per_update=4) for _ in range(3))
    straight.learn()
    for _ in range(3):
        first.update()
    second.restore(Stored(first.snapshot(), {}))
    assert second.n_updates == 3
    second.learn()
    for one, other in zip(straight.learning.parameters(), second.learning.parameters(), strict=True):
        assert torch.equal(one, other)
    assert straight.acceptance == second.acceptance


def test_mixed_with_secants_of_unfinished_ones():
    finished, other = secants_of(quadratic(1)), quadratic(2, outcome=Outcome.RUNNING)
    unfinished = secants_of(other)
    assert finished is not None
    assert unfinished is not None
    both = Examples.concatenate([finished.examples, unfinished.examples])
    assert bool(torch.isfinite(relative_errors(network(), both)).all())


def test_what_turned_out_worse_than_the_beginning_is_taken_back():
    tuning = filled(fit_updates=30, examples_per_update=8, fit_learning_rate=3e-3, least_validation=3)
    for _ in range(30):
        tuning.update()
    tuning.origin.load_state_dict(tuning.learning.state_dict())  # it began well
    tuning.network.load_state_dict(network(0).state_dict())
    tuning.learning.load_state_dict(network(0).state_dict())
    tuning.n_adopted = 1
    tuning.test()
    assert tuning.n_adopted == 0
    for begun, used in zip(tuning.origin.parameters(), tuning.network.parameters(), strict=True):
        assert torch.equal(begun, used)
