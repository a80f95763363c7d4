"""Programs behind calculators are started anew before the cell has changed much."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from scipy.spatial.transform import Rotation

from relaxion import Relaxer
from relaxion.potentials.counting import RelaunchedCalculator, cell_change


class OldCell(EMT):
    """As pw.x: beyond 10 % of the volume it was started with, its energies are wrong."""

    closed = False
    volume: float | None = None

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        assert atoms is not None
        assert not self.closed
        super().calculate(atoms, list(properties), list(system_changes))
        self.volume = self.volume or atoms.get_volume()
        if abs(atoms.get_volume() / self.volume - 1.0) > 0.1:
            self.results["energy"] += 0.27

    def close(self):
        self.closed = True


@pytest.fixture
def launches() -> list[OldCell]:
    return []


@pytest.fixture
def calculator(launches: list[OldCell]) -> RelaunchedCalculator:
    def make() -> OldCell:
        launches.append(OldCell())
        return launches[-1]

    return RelaunchedCalculator(make)


def strained(atoms: Atoms, factor: float | np.ndarray) -> Atoms:
    atoms = atoms.copy()
    atoms.set_cell(atoms.cell @ (factor * np.eye(3)), scale_atoms=True)
    return atoms


def test_right_energies_however_far_the_volume_goes(calculator, launches):
    for factor in np.linspace(0.92, 1.05, 12):
        atoms = strained(bulk("Cu", cubic=True), factor)
        expected = EMT().get_potential_energy(atoms)
        assert calculator.get_potential_energy(atoms) == pytest.approx(expected, abs=1e-9)
    assert 4 <= calculator.launches == len(launches) <= 8
    assert [one.closed for one in launches] == [True] * (len(launches) - 1) + [False], "one program at a time"
    calculator.close()
    assert launches[-1].closed


def test_small_changes_and_moves_of_atoms_launch_nothing(calculator, launches):
    atoms = bulk("Cu", cubic=True)
    for seed in range(4):
        moved = strained(atoms, 1.0 + 0.004 * seed)
        moved.rattle(0.1, seed=seed)
        calculator.get_forces(moved)
        calculator.get_stress(moved)
    assert len(launches) == 1


def test_a_shear_that_keeps_the_volume_counts(calculator):
    atoms = bulk("Cu", cubic=True)
    calculator.get_potential_energy(atoms)
    calculator.get_potential_energy(strained(atoms, np.diag([1.07, 1 / 1.07, 1.0])))
    assert calculator.launches == 2


def test_a_free_cell_is_relaxed_across_launches(calculator):
    atoms = strained(bulk("Cu", cubic=True), 0.95)
    atoms.calc = calculator
    assert Relaxer(FrechetCellFilter(atoms), policy=None, logfile=None).run(fmax=0.01)
    assert calculator.launches > 1
    assert atoms.cell.lengths() == pytest.approx([3.59] * 3, abs=0.01)


def test_a_program_that_gave_up_is_started_anew(calculator, launches):
    atoms = bulk("Cu", cubic=True)
    expected = calculator.get_potential_energy(atoms)
    launches[0].calculate = lambda *_, **__: 1 / 0
    atoms.rattle(0.01)
    with pytest.raises(ZeroDivisionError):
        calculator.get_potential_energy(atoms)
    assert launches[0].closed
    assert calculator.get_potential_energy(bulk("Cu", cubic=True)) == pytest.approx(expected)
    assert calculator.launches == 2


def test_change_of_a_cell():
    cell = np.array(bulk("Si").cell)
    assert cell_change(cell, 1.02 * cell) == pytest.approx(1.02**3 - 1)
    assert cell_change(cell, 0.98 * cell) == pytest.approx(1 - 0.98**3)
    turned = cell @ Rotation.from_rotvec([0.3, -0.2, 1.0]).as_matrix()
    assert cell_change(cell, turned) == pytest.approx(0.0, abs=1e-12)
    assert cell_change(np.zeros((3, 3)), np.zeros((3, 3))) == 0.0
    assert cell_change(np.zeros((3, 3)), cell) > 0.06
