"""Everything an ASE optimizer may be given: `Optimizable`s, dummy atoms, deprecated filters, an earlier trajectory.

`make test` runs these on the newest ASE and on 3.26, whose `Optimizable.get_gradient` has the other sign.
"""

from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.constraints import FixAtoms
from ase.filters import ExpCellFilter, FrechetCellFilter, StrainFilter
from ase.io import read
from ase.mep import NEB
from ase.optimize.basin import BasinHopping
from ase.utils.abc import Optimizable

import relaxion
from relaxion import Relaxer
from relaxion.errors import SettingsError, StructureError
from relaxion.optimizer.point import gradient_sign

TRIANGLE = [[0.0, 0.0, 0.0], [1.3, 0.0, 0.0], [0.0, 1.2, 0.3]]


class Booth(Optimizable):
    """(x + 2y - 7)² + (2x + y - 5)², as in ASE's own tests; its minimum is at (1, 3)."""

    def __init__(self) -> None:
        self.place = np.array([1.234, 2.345])

    def ndofs(self) -> int:
        return 2

    def get_x(self) -> np.ndarray:
        return self.place.copy()

    def set_x(self, x: np.ndarray) -> None:
        self.place[:] = x

    def _parts(self) -> np.ndarray:
        x, y = self.place
        return np.array([x + 2 * y - 7, 2 * x + y - 5])

    def get_value(self) -> float:
        return float((self._parts() ** 2).sum())

    def get_gradient(self) -> np.ndarray:
        first, second = self._parts()
        return gradient_sign() * np.array([2 * first + 4 * second, 4 * first + 2 * second])

    def gradient_norm(self, gradient: np.ndarray) -> float:
        return float(np.linalg.norm(gradient))

    def iterimages(self):
        return iter([])


def expanded() -> Atoms:
    atoms = bulk("Cu", a=3.8, cubic=True)
    atoms.rattle(0.05, seed=0)
    atoms.calc = EMT()
    return atoms


def test_basin_hopping_finds_the_pentagonal_bipyramid():
    np.random.seed(0)  # noqa: NPY002  what BasinHopping draws from
    atoms = Atoms("He7", 2.5 * np.random.default_rng(0).random((7, 3)), calculator=LennardJones())
    quiet = {"trajectory": None, "logfile": None, "optimizer_logfile": None, "local_minima_trajectory": None}
    hopping = BasinHopping(atoms, temperature=0.8, dr=0.4, fmax=0.005, optimizer=Relaxer, **quiet)
    hopping.run(30)
    assert hopping.get_minimum()[0] == pytest.approx(-16.505, abs=0.2)  # shifted by ASE's cutoff


@pytest.mark.parametrize("wrapped", [lambda atoms: atoms, FrechetCellFilter])
def test_an_optimizable_with_atoms_is_relaxed_as_these_atoms(wrapped):
    plain, inside = (wrapped(expanded()) for _ in range(2))
    first, second = Relaxer(plain, logfile=None), Relaxer(inside.__ase_optimizable__(), logfile=None)
    assert first.run(fmax=0.01)
    assert second.run(fmax=0.01)
    assert second.atoms is inside
    assert second.policy_used == first.policy_used == "metals"
    assert [entry.energy_ev for entry in second.history] == [entry.energy_ev for entry in first.history]


def test_a_function_without_atoms_is_relaxed_by_plain_steps(tmp_path):
    function = Booth()
    optimizer = Relaxer(function, logfile=None, restart=tmp_path / "restart.json")
    assert optimizer.run(fmax=1e-8)
    assert function.place == pytest.approx([1, 3], abs=1e-8)
    assert {entry.method for entry in optimizer.history[1:]} == {"plain"}
    assert optimizer.history[-1].fmax_ev_per_angstrom < 1e-8
    assert optimizer.force_calls < 20
    function.set_x(np.array([5.0, -2.0]))  # by somebody else: noticed
    assert optimizer.run(fmax=1e-6)
    assert function.place == pytest.approx([1, 3], abs=1e-6)


def test_a_function_has_no_structures_to_remember(tmp_path):
    with pytest.raises(SettingsError, match=r"database stores structures.*Booth"):
        Relaxer(Booth(), logfile=None, database=tmp_path)


def test_a_band_is_refused_as_an_optimizable_too():
    with pytest.raises(StructureError, match="NEB"):
        Relaxer(NEB([expanded(), expanded()], method="improvedtangent").__ase_optimizable__(), logfile=None)


@pytest.mark.parametrize("insisted", [{}, {"policy": "universal", "allow_unseen": True}])
def test_dummy_atoms_relax_without_a_policy(insisted):
    atoms = Atoms("X3", TRIANGLE, calculator=LennardJones())
    optimizer = Relaxer(atoms, logfile=None, **insisted)
    assert optimizer.run(fmax=0.001)
    assert optimizer.policy_used == "classical"
    assert atoms.get_all_distances()[np.triu_indices(3, 1)] == pytest.approx(2 ** (1 / 6), abs=1e-3)


def test_dummy_atoms_in_a_batch_and_without_parameters():
    (relaxed,) = relaxion.relax_batch([Atoms("X3", TRIANGLE)], "lj", fmax=0.001)
    assert relaxed.converged
    (refused,) = relaxion.relax_batch([Atoms("X3", TRIANGLE)], "emt", fmax=0.001)
    assert "no parameters for X" in str(refused.error)


def test_exp_cell_filter_is_relaxed_as_other_cell_filters():
    frechet = Relaxer(FrechetCellFilter(expanded()), logfile=None)
    with pytest.warns(DeprecationWarning, match="FrechetCellFilter"):
        target = ExpCellFilter(expanded())
    exponential = Relaxer(target, logfile=None)
    assert frechet.run(fmax=0.01)
    assert exponential.run(fmax=0.01)
    assert exponential.policy_used == "metals"
    assert exponential.force_calls <= frechet.force_calls + 2
    energies = [optimizer.atoms.atoms.get_potential_energy() for optimizer in (frechet, exponential)]
    assert energies[1] == pytest.approx(energies[0], abs=1e-4)


def silver_on_copper() -> Atoms:
    atoms = fcc100("Cu", (2, 2, 2), a=3.6, vacuum=6)
    add_adsorbate(atoms, "Ag", 2.6, "hollow", offset=(0.2, 0.1))
    atoms.set_constraint(FixAtoms(indices=range(4)))
    atoms.calc = EMT()
    return atoms


@pytest.mark.parametrize("wrapped", [lambda atoms: atoms, FrechetCellFilter])
def test_a_replayed_run_goes_on_as_if_it_had_not_ended(wrapped, tmp_path):
    start = silver_on_copper if wrapped is not FrechetCellFilter else expanded
    straight = Relaxer(wrapped(start()), logfile=None)
    straight.run(fmax=0.001)
    Relaxer(wrapped(start()), logfile=None, trajectory=tmp_path / "first.traj").run(fmax=0.1)
    atoms = read(tmp_path / "first.traj")
    atoms.calc = EMT()
    again = Relaxer(wrapped(atoms), logfile=None)
    where = atoms.positions.copy()
    again.replay_trajectory(str(tmp_path / "first.traj"))
    assert atoms.positions == pytest.approx(where)
    assert isinstance(atoms.calc, EMT)
    assert again.run(fmax=0.001)
    assert again.force_calls == pytest.approx(straight.force_calls, abs=0 if start is silver_on_copper else 1)
    afresh = Relaxer(wrapped(_last(tmp_path / "first.traj")), logfile=None)
    afresh.run(fmax=0.001)
    assert len(again.history) <= len(afresh.history)


def _last(trajectory: Path) -> Atoms:
    atoms = read(trajectory)
    atoms.calc = EMT()
    return atoms


def test_images_do_not_show_strains(tmp_path):
    atoms = expanded()
    Relaxer(atoms, logfile=None, trajectory=tmp_path / "first.traj").run(fmax=0.1)
    with pytest.raises(TypeError, match="StrainFilter has coordinates that images lack"):
        Relaxer(StrainFilter(atoms), logfile=None).replay_trajectory(tmp_path / "first.traj")
