"""R7.2, R7.4: rewards and the one measure of convergence."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter

from relaxion.errors import SettingsError
from relaxion.potentials import potential
from relaxion.potentials.base import AsePotential
from relaxion.structures import Evaluation, Structures
from relaxion.train.experience.environment import REWARDS, Reward, largest_force


def two_copper(force_x: float, energy: float) -> tuple[Structures, Evaluation]:
    """Two structures of 4 atoms; in the second all is zero."""
    structures = Structures.from_ase([bulk("Cu", cubic=True)] * 2)
    forces = torch.zeros_like(structures.positions)
    forces[1, 0] = force_x
    return structures, Evaluation(torch.tensor([energy, 0.0], dtype=torch.float64), forces, None)


def reward_of(before: float, after: float, energies: tuple[float, float] = (0.0, 0.0), **settings) -> float:
    start, first = two_copper(before, energies[0])
    end, second = two_copper(after, energies[1])
    back_off = torch.tensor([settings.pop("back_off", 0.0), 0.0], dtype=torch.float64)
    return float(Reward(**settings)(start, first, end, second, back_off)[0])


def test_each_reward_by_hand() -> None:
    assert reward_of(1.0, 0.1) == pytest.approx(1.0)  # the default: one decade of force
    assert reward_of(1.0, 0.1, weights={"force": 1}) == pytest.approx(-0.1)
    assert reward_of(1.0, 0.1, weights={"log_force": 1}) == pytest.approx(1.0)
    assert reward_of(1.0, 0.01, weights={"log_force": 1}) == pytest.approx(2.0)
    assert reward_of(1.0, 0.1, weights={"step": 1}) == -1
    assert reward_of(1.0, 0.1, (2.0, -2.0), weights={"energy": 1}) == pytest.approx(1.0)  # 4 eV / 4 atoms


def test_weighted_sum_and_back_off() -> None:
    both = reward_of(1.0, 0.1, weights={"log_force_decrease": 2, "step": 0.5, "back_off": 3}, back_off=0.25)
    assert both == pytest.approx(2 * 1 - 0.5 - 3 * 0.25)


@pytest.mark.parametrize("name", sorted(REWARDS))
@pytest.mark.parametrize(("before", "after"), [(1e12, 1.0), (1.0, 1e12), (0.0, 0.0), (1.0, 0.0)])
def test_no_start_makes_a_reward_explode(name: str, before: float, after: float) -> None:
    reward = reward_of(before, after, (1e9, -1e9), weights={name: 1})
    assert math.isfinite(reward)
    assert abs(reward) <= 1e3


def test_the_energy_that_is_left_ranks_steps_to_a_minimum() -> None:
    """More the nearer it ends, the same on both sides, and a loss beyond."""
    engine, minimum = potential("emt"), Structures.from_ase([bulk("Cu", cubic=True)])
    displaced = torch.zeros_like(minimum.positions)
    displaced[0, 0] = 0.1
    share = torch.tensor([0.5, 0.9, 1.0, 1.5, 2.5], dtype=torch.float64)
    nothing, rewards = torch.zeros(1, dtype=torch.float64), list[float]()
    reward = Reward({"log_gap_decrease": 1})
    for part in share:
        places = [replace(minimum, positions=minimum.positions + left * displaced) for left in (1.0, 1 - part)]
        first, second = (engine(place) for place in places)
        rewards.append(float(reward(places[0], first, places[1], second, nothing)))
    assert 0.3 < rewards[0] < rewards[1] <= rewards[2]
    assert rewards[3] == pytest.approx(rewards[0], abs=0.1)
    assert rewards[4] < 0


def test_unknown_reward_is_an_error() -> None:
    with pytest.raises(SettingsError, match="log_forces"):
        Reward({"log_forces": 1.0})


def strained_alloy():
    atoms = bulk("Cu", cubic=True)
    atoms.numbers[0] = 79
    atoms.rattle(0.1, seed=3)
    strain = np.array([[0.03, 0.02, 0], [0.02, -0.01, 0.01], [0, 0.01, 0.0]])
    atoms.set_cell(atoms.cell @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


@pytest.mark.parametrize("fixed", [[], [0, 2]])
def test_largest_force_is_that_of_the_frechet_filter(fixed: list[int]) -> None:
    atoms = strained_alloy()
    atoms.set_constraint(FixAtoms(fixed) if fixed else [])
    structures = Structures.from_ase(atoms, cell_free=True)
    evaluation = AsePotential(EMT())(structures)
    atoms.calc = EMT()
    rows = np.linalg.norm(FrechetCellFilter(atoms).get_forces(), axis=1)
    assert float(largest_force(structures, evaluation)) == pytest.approx(rows.max(), rel=1e-10)
    # weaken the atoms' forces until the cell decides
    weak = Evaluation(evaluation.energies, evaluation.forces * 1e-3, evaluation.stresses)
    assert float(largest_force(structures, weak)) == pytest.approx(rows[-3:].max(), rel=1e-8)


def test_fixed_cell_and_fixed_atoms_do_not_count() -> None:
    atoms = strained_alloy()
    free = AsePotential(EMT())(Structures.from_ase(atoms, cell_free=True))
    forces = free.forces.norm(dim=1)
    fixed_cell = Structures.from_ase(atoms)
    assert float(largest_force(fixed_cell, free)) == pytest.approx(float(forces.max()))
    atoms.set_constraint(FixAtoms([int(forces.argmax())]))
    assert float(largest_force(Structures.from_ase(atoms), free)) == pytest.approx(float(forces.sort().values[-2]))


def test_free_cell_without_stress_is_an_error() -> None:
    structures = Structures.from_ase(bulk("Cu"), cell_free=True)
    with pytest.raises(SettingsError, match="stress"):
        largest_force(structures, Evaluation(torch.zeros(1), torch.zeros(1, 3), None))
