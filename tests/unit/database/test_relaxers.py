"""Relaxers with a memory: every evaluated geometry is there, and no force call was made for it."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch
from ase.build import add_adsorbate, bulk, fcc111
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter

from relaxion import Relaxer, relax_batch
from relaxion.database import RelaxationDatabase
from relaxion.errors import SettingsError
from relaxion.optimizer.records import Remembered
from relaxion.structures import Outcome


class Counting(EMT):
    calls = 0

    def calculate(self, *args, **kwargs):
        self.calls += 1
        super().calculate(*args, **kwargs)


def slab(seed: int = 0):
    atoms = fcc111("Cu", (2, 2, 3), vacuum=6)
    add_adsorbate(atoms, "O", 1.2, "fcc")
    atoms.positions += np.random.default_rng(seed).normal(0, 0.08, (13, 3))
    atoms.set_constraint(FixAtoms(mask=atoms.get_tags() == 3))
    return atoms


def test_every_point_is_kept_and_no_call_is_made_for_it(tmp_path):
    atoms = slab()
    atoms.calc = Counting()
    seen = list[np.ndarray]()
    relaxer = Relaxer(atoms, database=tmp_path / "memory", logfile=None)
    relaxer.attach(lambda: seen.append(atoms.positions.copy()))
    assert relaxer.run(fmax=0.05)
    assert atoms.calc.calls == relaxer.force_calls
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
    assert len(found) == relaxer.force_calls
    assert found.positions.numpy() == pytest.approx(np.stack(seen), abs=1e-7)
    assert found.energies.tolist() == pytest.approx([entry.energy_ev for entry in relaxer.history])
    assert not found.movable[:4].any()
    assert float(found.forces[0, :4].abs().max()) > 0  # as the calculator said, before constraints
    assert found.outcome == Outcome.CONVERGED
    assert found.policy == relaxer.policy_used


def test_free_cells_and_step_limits(tmp_path):
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell * 1.05, scale_atoms=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc = EMT()
    relaxer = Relaxer(FrechetCellFilter(atoms), database=tmp_path / "memory", logfile=None, policy=None)
    relaxer.run(fmax=0.001, steps=2)
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
    assert found.outcome == Outcome.STEP_LIMIT
    assert found.cell_free
    assert len(found) == 3
    assert float(found.stresses[0].abs().max()) > 0
    assert found.cells[-1].numpy() == pytest.approx(np.asarray(atoms.cell), abs=1e-6)
    relaxer.run(fmax=0.05)  # goes on, and so does what is written
    (found,) = RelaxationDatabase.open(tmp_path / "memory")
    assert found.outcome == Outcome.CONVERGED
    assert len(found) == relaxer.force_calls


def test_batches_are_kept_as_single_ones_are(tmp_path):
    starts = [slab(seed) for seed in range(2)]
    relaxed = relax_batch(starts, "emt", database=tmp_path / "batch")
    for start in starts:
        start.calc = EMT()
        Relaxer(start, database=tmp_path / "single", logfile=None).run(fmax=0.05)
    batch, single = (sorted(RelaxationDatabase.open(tmp_path / name), key=len) for name in ("batch", "single"))
    assert sorted(one.force_calls for one in relaxed) == [len(one) for one in batch]
    for one, other in zip(batch, single, strict=True):
        assert torch.equal(one.numbers, other.numbers)
        assert torch.equal(one.bases, other.bases)
        assert one.positions.numpy() == pytest.approx(other.positions.numpy(), abs=1e-5)


def test_the_same_start_relaxed_twice_is_there_once(tmp_path):
    for _ in range(2):
        atoms = slab()
        atoms.calc = EMT()
        Relaxer(atoms, database=tmp_path / "memory", logfile=None).run(fmax=0.05)
    assert len(RelaxationDatabase.open(tmp_path / "memory")) == 1


def test_a_number_is_the_memory_of_another_optimizer(caplog):
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    with caplog.at_level(logging.WARNING):
        Relaxer(atoms, memory=100, logfile=None)
    assert "memory: options of other optimizers" in caplog.text


def test_the_former_name_of_the_option_is_refused_and_nothing_is_lost(tmp_path):
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    with pytest.raises(SettingsError, match="database"):
        Relaxer(atoms, memory=tmp_path / "kept", logfile=None)


def test_it_takes_less_than_two_milliseconds_per_call(tmp_path):
    atoms = slab()
    atoms.calc = EMT()
    atoms.get_forces()
    remembered = Remembered(RelaxationDatabase.at(tmp_path / "memory"), atoms, "")
    took = []
    for number in range(50):
        began = time.process_time()
        remembered.point(number, number - 1)
        took.append(time.process_time() - began)
    assert float(np.median(took)) < 2e-3
