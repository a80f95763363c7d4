"""`Relaxer(atoms, leave_saddles=True)`: ends that are minima, and what the check costs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms, FixBondLength, FixedPlane, FixSymmetry
from ase.filters import FrechetCellFilter, StrainFilter
from ase.io import read

import relaxion
from relaxion import Outcome, Relaxer
from relaxion.optimizer.point import place, read_point
from relaxion.optimizer.saddles import MOST_CALLS, NEGATIVE, CurvatureSearch, kinds_of, symmetries_of, zero_modes


class CountedEMT(EMT):
    """Counts its calls; `stop_at`: raises there instead of answering."""

    def __init__(self, stop_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.calls, self.stop_at, self.error = 0, stop_at, error

    def calculate(self, *given: object, **named: object) -> None:
        self.calls += 1
        if self.calls == self.stop_at:
            raise self.error("stopped")
        super().calculate(*given, **named)


def square(**calculator: object) -> Atoms:
    """Four copper atoms in a plane: a saddle point."""
    atoms = Atoms("Cu4", [(0, 0, 0), (2.4, 0, 0), (0, 2.4, 0), (2.4, 2.4, 0)])
    atoms.calc = CountedEMT(**calculator)
    return atoms


def on_bridge() -> Atoms:
    atoms = fcc100("Cu", (2, 2, 3), vacuum=6.0)
    add_adsorbate(atoms, "Au", 1.9, "bridge")
    atoms.set_constraint(FixAtoms(np.flatnonzero(atoms.get_tags() == 3)))
    atoms.calc = CountedEMT()
    return atoms


def alloy() -> Atoms:
    atoms = bulk("Cu", cubic=True)
    atoms.symbols[0] = "Au"
    atoms.rattle(0.05, seed=1)
    atoms.calc = CountedEMT()
    return atoms


def relaxed(target: Atoms | FrechetCellFilter, **options: object) -> Relaxer:
    relaxer = Relaxer(target, logfile=None, leave_saddles=True, **options)
    relaxer.run(0.02, 200)
    return relaxer


@pytest.mark.parametrize("start", [square, on_bridge])
@pytest.mark.parametrize("policy", ["auto", None])
def test_saddle_points_are_left_for_lower_ends(start, policy):
    plain = start()
    assert Relaxer(plain, logfile=None, policy=policy).run(0.02, 200)
    atoms = start()
    relaxer = relaxed(atoms, policy=policy)
    assert relaxer.outcome is Outcome.CONVERGED
    assert atoms.get_potential_energy() < plain.get_potential_energy() - 0.05
    check = relaxer.end_check
    assert check.checked
    assert not check.is_saddle
    assert check.saddle_energies_ev[0] == pytest.approx(plain.get_potential_energy(), abs=1e-3)
    assert relaxer.force_calls == atoms.calc.calls
    assert [entry.method for entry in relaxer.history].count("curvature") == check.calls


def test_a_free_cell_leaves_a_foreign_lattice():
    atoms = bulk("Cu", "bcc", a=3.0, cubic=True) * (2, 1, 1)
    atoms.calc = CountedEMT()
    relaxer = relaxed(FrechetCellFilter(atoms))
    assert len(relaxer.end_check.saddle_energies_ev) == 1
    assert atoms.get_potential_energy() < relaxer.end_check.saddle_energies_ev[0] - 0.02


def test_a_minimum_costs_at_most_four_calls_and_stays_what_it_was():
    plain, atoms = alloy(), alloy()
    Relaxer(plain, logfile=None).run(0.02)
    before = plain.calc.calls
    relaxer = relaxed(atoms)
    assert np.array_equal(atoms.positions, plain.positions)
    assert before < relaxer.force_calls == atoms.calc.calls <= before + MOST_CALLS
    called = atoms.calc.calls
    assert atoms.get_potential_energy() == plain.get_potential_energy()
    assert np.array_equal(atoms.get_forces(), plain.get_forces())
    assert atoms.calc.calls == called  # nothing was asked again
    assert relaxer.end_check.lowest_curvature_ev_per_angstrom2 > 0.1


def test_without_the_option_the_report_says_that_nobody_looked():
    atoms = square()
    relaxer = Relaxer(atoms, logfile=None)
    relaxer.run(0.02)
    assert not relaxer.end_check.checked
    assert "not checked" in relaxer.end_check.in_words()
    assert "not checked for negative curvature" in str(relaxion.report(relaxer))


def test_log_and_trajectory_end_with_the_end(tmp_path: Path):
    atoms = square()
    log = io.StringIO()
    relaxer = Relaxer(atoms, logfile=log, trajectory=tmp_path / "way.traj", leave_saddles=True)
    with relaxer:
        relaxer.run(0.02)
    images = read(tmp_path / "way.traj", ":")
    assert np.allclose(images[-1].positions, atoms.positions)
    assert len(images) == relaxer.force_calls - relaxer.end_check.calls
    assert log.getvalue().splitlines()[-1].startswith("Relaxer:  1 saddle point left; a minimum") or (
        "saddle points left; a minimum" in log.getvalue().splitlines()[-1]
    )


def test_irun_ends_with_the_same():
    atoms, other = square(), square()
    relaxed(atoms)
    relaxer = Relaxer(other, logfile=None, leave_saddles=True)
    told = list(relaxer.irun(0.02, 200))
    assert told[-1] is True
    assert not any(told[:-1])
    assert np.array_equal(atoms.positions, other.positions)


def test_a_calculator_that_fails_in_the_check_leaves_the_end():
    plain = square()
    Relaxer(plain, logfile=None).run(0.02)
    atoms = square(stop_at=plain.calc.calls + 1)
    relaxer = relaxed(atoms)
    assert relaxer.outcome is Outcome.CONVERGED
    assert np.array_equal(atoms.positions, plain.positions)
    assert not relaxer.end_check.checked
    assert "RuntimeError" in relaxer.end_check.note


def test_no_more_steps_than_allowed():
    plain = square()
    Relaxer(plain, logfile=None).run(0.02)
    for more in range(3):
        atoms = square()
        relaxer = Relaxer(atoms, logfile=None, leave_saddles=True)
        relaxer.run(0.02, plain.calc.calls - 1 + more)
        assert atoms.calc.calls == relaxer.force_calls <= plain.calc.calls + more


def test_stopped_in_any_call_and_resumed_it_ends_where_the_straight_run_does(tmp_path: Path):
    straight = square()
    whole = relaxed(straight)
    looks = [entry.call for entry in whole.history if entry.method == "curvature"]
    for call in [looks[0], looks[1], looks[-1], looks[-1] - MOST_CALLS - 1]:
        restart = tmp_path / f"{call}.json"
        first = square(stop_at=call, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            relaxed(first, restart=restart)
        atoms = square()
        relaxer = Relaxer(atoms, logfile=None, leave_saddles=True, restart=restart)
        relaxer.go_on()
        assert relaxer.run(0.02, 200)
        assert np.allclose(atoms.positions, straight.positions, atol=1e-9)
        assert relaxer.end_check.saddle_energies_ev == pytest.approx(whole.end_check.saddle_energies_ev)
        again = relaxer.force_calls - whole.force_calls
        assert again in ((0, 1) if call in looks else (0,))  # the end is asked about again, its answer is in no file


def test_constraints_that_keep_the_symmetry_keep_it():
    atoms = bulk("Cu", "bcc", a=2.9, cubic=True)
    atoms.set_constraint(FixSymmetry(atoms))
    atoms.calc = CountedEMT()
    relaxer = relaxed(FrechetCellFilter(atoms))
    assert not relaxer.end_check.saddle_energies_ev
    assert np.allclose(atoms.cell.lengths(), atoms.cell.lengths()[0])


def test_other_filters_are_not_checked():
    atoms = alloy()
    relaxer = relaxed(StrainFilter(atoms))
    assert not relaxer.end_check.checked
    assert relaxer.end_check.note


@pytest.mark.parametrize(
    ("atoms", "number"),
    [
        (Atoms("Cu3", [(0, 0, 0), (2.4, 0, 0), (0, 2.4, 0)]), 6),
        (Atoms("Cu3", [(0, 0, 0), (2.4, 0, 0), (4.8, 0, 0)]), 5),
        (Atoms("Cu3", [(0, 0, 0), (2.4, 0, 0), (0, 2.4, 0)], constraint=FixAtoms([0])), 3),
        (bulk("Cu", cubic=True), 3),
        (on_bridge(), 0),
    ],
)
def test_what_costs_nothing_is_projected_out(atoms, number):
    atoms.calc = EMT()
    zero = zero_modes(read_point(atoms))
    assert zero.shape[1] == number
    assert np.allclose(zero.T @ zero, np.eye(number))


def test_turns_of_a_free_cell_cost_nothing():
    atoms = alloy()
    assert zero_modes(read_point(FrechetCellFilter(atoms))).shape[1] == 6


def test_symmetries_carry_products_of_the_hessian():
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    point = read_point(FrechetCellFilter(atoms))
    symmetries = symmetries_of(point, kinds_of(atoms))
    assert len(symmetries) == 4 * 48 - 1
    random = np.random.default_rng(0)
    step = 1e-3 * random.standard_normal(point.coordinates.shape)
    step[4:] = (step[4:] + step[4:].T) / 2

    def drop(along: np.ndarray) -> np.ndarray:
        moved = bulk("Cu", cubic=True)
        moved.calc = EMT()
        target = FrechetCellFilter(moved)
        place(target, point.coordinates + along)
        return point.forces - read_point(target).forces

    for one in symmetries[::17]:
        assert np.allclose(one.of(drop(step)), drop(one.of(step)), atol=2e-5)


def test_magnetic_order_breaks_symmetry():
    atoms = bulk("Cu", cubic=True)
    atoms.calc = EMT()
    fewer = atoms.copy()
    fewer.set_initial_magnetic_moments([1, -1, 1, -1])
    point = read_point(atoms)
    assert len(symmetries_of(point, kinds_of(fewer))) < len(symmetries_of(point, kinds_of(atoms)))


def test_the_lowest_curvature_of_a_known_hessian_is_found():
    atoms = square()
    point = read_point(atoms)
    zero = zero_modes(point)
    rest = scipy.linalg.null_space(zero.T)
    rest = rest @ np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    values = np.array([-0.5, 1.0, 2.0, 4.0, 7.0, 9.0])
    hessian = (rest * values) @ rest.T
    model = (rest * [0.7, 1.5, 1.5, 3.0, 9.0, 9.0]) @ rest.T + zero @ zero.T
    search = CurvatureSearch(point, lambda forces: np.linalg.solve(model, forces.ravel()).reshape(-1, 3))
    while (step := search.next()) is not None:
        forces = point.forces - (hessian @ step.ravel()).reshape(-1, 3)
        search.learn(replace(point, coordinates=point.coordinates + step, forces=forces))
    assert len(search.steps) <= MOST_CALLS
    assert -0.5 - 1e-9 <= search.curvature < NEGATIVE


@pytest.mark.parametrize("potential", ["emt", EMT()])
def test_a_batch_leaves_the_same_saddle_points(potential):
    starts = [square(), alloy(), on_bridge()]
    singles = [start.copy() for start in starts]
    found = relaxion.relax_batch(starts, potential, fmax=0.02, leave_saddles=True)
    for atoms, own in zip(singles, found, strict=True):
        atoms.calc = CountedEMT()
        relaxer = relaxed(atoms)
        assert own.converged
        assert own.force_calls == relaxer.force_calls
        assert own.energy_ev == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
        assert own.end_check.saddle_energies_ev == pytest.approx(relaxer.end_check.saddle_energies_ev, abs=1e-6)
        assert np.allclose(own.atoms.positions, atoms.positions, atol=1e-5)
    assert not relaxion.relax_batch([alloy()], "emt")[0].end_check.checked


def test_a_potential_that_fails_in_the_check_of_a_batch_leaves_the_end():
    plain = relaxion.relax_batch([square()], EMT(), fmax=0.02)[0]
    failing = CountedEMT(stop_at=plain.force_calls + 1)
    [own] = relaxion.relax_batch([square()], failing, fmax=0.02, leave_saddles=True)
    assert own.converged
    assert own.error is None
    assert "failed" in own.end_check.note
    assert np.allclose(own.atoms.positions, plain.atoms.positions)


@pytest.mark.parametrize("constraint", [FixedPlane(0, [0, 0, 1]), FixBondLength(0, 1)])
def test_constraints_that_act_as_atoms_move_are_kept(constraint):
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.rattle(0.05, seed=1)
    atoms.set_constraint(constraint)
    atoms.calc = CountedEMT()
    before = atoms.positions[0, 2], atoms.get_distance(0, 1, mic=True)
    relaxer = relaxed(atoms)
    assert relaxer.end_check.checked
    assert not relaxer.end_check.is_saddle
    after = atoms.positions[0, 2], atoms.get_distance(0, 1, mic=True)
    held = 0 if isinstance(constraint, FixedPlane) else 1
    assert after[held] == pytest.approx(before[held])


def test_where_nothing_can_move_nobody_looks():
    atoms = Atoms("Cu", calculator=CountedEMT())
    relaxer = relaxed(atoms)
    assert relaxer.force_calls == atoms.calc.calls == 1
    assert relaxer.end_check.in_words() == "nothing could change"
