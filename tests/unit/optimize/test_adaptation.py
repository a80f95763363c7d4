"""Learning on the job: no extra force call, better with every relaxation, and nothing shared that should not be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.filters import FrechetCellFilter

from relaxion import Relaxer
from relaxion.errors import SettingsError
from relaxion.networks.metric.network import MetricNetwork, MetricSettings
from relaxion.optimize.adaptation import Adaptation, AdaptationSettings
from relaxion.optimize.choice import load
from relaxion.potentials import potential
from relaxion.potentials.ase import PotentialCalculator


class Counting(PotentialCalculator):
    calls = 0

    def calculate(self, *args, **kwargs):
        self.calls += 1
        super().calculate(*args, **kwargs)


def rattled(seed, symbol="Cu"):
    atoms = bulk(symbol, cubic=True) * (2, 1, 1)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = Counting(potential("emt"))
    return atoms


def untrained():
    settings = MetricSettings(channels=8, n_hidden=8, n_layers=1, cutoff_angstrom=4.0)
    return MetricNetwork(settings, torch.Generator().manual_seed(0))


def test_no_force_call_is_made_for_it():
    shared, atoms = Adaptation(load("metals").policy.network), rattled(0)
    relaxer = Relaxer(atoms, policy="metals", adapt=shared, logfile=None)
    assert relaxer.run(fmax=0.05)
    assert atoms.calc.calls == relaxer.force_calls
    assert shared.n_relaxations == 1
    assert shared.n_secants == relaxer.force_calls - 1


def test_it_learns_the_stiffness_of_what_it_relaxes():
    """A network that knows nothing but the springs needs fewer calls after some relaxations of one metal."""
    shared = Adaptation(untrained(), AdaptationSettings(learning_rate=3e-3, n_updates=60))
    calls = []
    for seed in range(14):
        relaxer = Relaxer(rattled(seed, "Cu"), policy="metals", adapt=shared, logfile=None)
        assert relaxer.run(fmax=0.01)
        calls.append(relaxer.force_calls)
    assert np.mean(calls[-4:]) < np.mean(calls[:2]) - 1


def test_the_bundle_stays_as_it_is():
    before = {name: tensor.clone() for name, tensor in load("metals").policy.state_dict().items()}
    Relaxer(rattled(1), policy="metals", adapt=True, logfile=None).run(fmax=0.05)
    after = load("metals").policy.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_relaxers_of_a_process_share_what_they_learn_if_asked_to():
    first = Relaxer(rattled(2), policy="metals", adapt=True, logfile=None)
    second = Relaxer(rattled(3), policy="metals", adapt=True, logfile=None)
    alone = Relaxer(rattled(3), policy="metals", logfile=None)
    assert first._adaptation is second._adaptation
    assert alone._adaptation is None


def test_free_cells_teach_too():
    shared, atoms = Adaptation(load("metals").policy.network), rattled(4)
    atoms.set_cell(atoms.cell * 1.02, scale_atoms=True)
    assert Relaxer(FrechetCellFilter(atoms), policy="metals", adapt=shared, logfile=None).run(fmax=0.05)
    assert shared.n_secants > 0


def test_without_a_policy_there_is_nothing_to_adapt():
    relaxer = Relaxer(rattled(5), policy=None, adapt=True, logfile=None)
    assert relaxer.run(fmax=0.05)
    assert relaxer._adaptation is None


def test_points_that_are_no_numbers_teach_nothing():
    shared = Adaptation(untrained())
    relaxer = Relaxer(rattled(6), policy=None, logfile=None)
    relaxer.run(fmax=0.05)
    assert shared.learn([]) == 0
    assert shared.n_relaxations == 0


def test_a_bad_setting_is_named():
    with pytest.raises(SettingsError, match="learning_rate"):
        AdaptationSettings.read({"learning_rate": -1})
