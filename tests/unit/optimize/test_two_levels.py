"""Two levels: a cheap potential plans, the expensive one is asked only where that leads."""

import logging
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc100, molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.calculators.morse import MorsePotential
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.units import GPa

from relaxion import Relaxer
from relaxion.errors import RestartError
from relaxion.optimizer.hessian.potential import SurfaceCorrection
from relaxion.optimizer.point import Point
from relaxion.optimizer.two_levels import astray


class Stiffer(Calculator):
    """EMT with an additional spring of every atom to its place: alike, but with other minima."""

    implemented_properties = ("energy", "free_energy", "forces", "stress")

    def __init__(self, places: np.ndarray, stiffness: float = 1.0) -> None:
        super().__init__()
        self.places, self.stiffness, self.asked = places, stiffness, 0
        self.emt = EMT()

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.asked += 1
        self.emt.calculate(self.atoms, ["energy", "forces", "stress"], all_changes)
        away = self.atoms.positions - self.places
        if not self.atoms.constraints:
            away = away - away.mean(axis=0)  # a crystal may stand anywhere
        energy = self.emt.results["energy"] + self.stiffness * float((away**2).sum()) / 2
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "forces": self.emt.results["forces"] - self.stiffness * away,
            "stress": self.emt.results.get("stress", np.zeros(6)),
        }


class Wrong(Calculator):
    """EMT that fails in one way or another after some calls; without a stress."""

    implemented_properties = ("energy", "forces")

    def __init__(self, after: int = 0, how: str = "raise") -> None:
        super().__init__()
        self.after, self.how = after, how

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.after -= 1
        if self.after < 0 and self.how == "raise":
            raise RuntimeError("the machine is on fire")
        emt = EMT()
        emt.calculate(self.atoms, ["energy", "forces"], all_changes)
        self.results = {"energy": emt.results["energy"], "forces": emt.results["forces"]}
        if self.after < 0:
            self.results["forces"] = np.full((len(self.atoms), 3), np.nan)


def rattled(seed: int = 0, size: float = 0.15) -> Atoms:
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.numbers[[1, 4]] = 79
    atoms.positions += size * np.random.default_rng(seed).standard_normal(atoms.positions.shape)
    return atoms


def expensive() -> Stiffer:
    places = rattled(size=0).positions
    return Stiffer(places + 0.05 * np.random.default_rng(5).standard_normal(places.shape))


def relaxed(atoms: Atoms, calculator: Calculator, fmax: float = 0.02, **options) -> Relaxer:
    atoms.calc = calculator
    optimizer = Relaxer(atoms, logfile=None, **options)
    assert optimizer.run(fmax=fmax, steps=100)
    return optimizer


def energy_of(optimizer: Relaxer) -> float:
    return optimizer.history[-1].energy_ev


def test_the_model_saves_calls_and_both_are_counted():
    alone = relaxed(rattled(), expensive())
    calculator = expensive()
    helped = relaxed(rattled(), calculator, model=EMT())
    assert helped.force_calls < alone.force_calls
    assert helped.force_calls == calculator.asked
    assert helped.model_calls > helped.force_calls
    assert alone.model_calls == 0
    assert alone.model_used == ""
    assert helped.model_used == "EMT"
    assert helped.model_steps > 0
    assert energy_of(helped) == pytest.approx(energy_of(alone), abs=2e-3)
    assert {entry.method for entry in helped.history} <= {"start", "model", "springs", "plain"}


def test_a_relaxed_start_costs_one_call_and_is_kept():
    atoms = rattled()
    relaxed(atoms, expensive())
    before = atoms.positions.copy()
    again = relaxed(atoms, expensive(), model=EMT())
    assert again.force_calls == 1
    assert np.array_equal(atoms.positions, before)


def test_the_surface_has_the_expensive_forces_where_they_are_known():
    random = np.random.default_rng(0)
    here, before, forces, other = (random.standard_normal((4, 3)) for _ in range(4))

    def at(coordinates: np.ndarray) -> Point:
        return Point(coordinates, np.zeros((4, 3)), 0.0, None)

    correction = SurfaceCorrection(at(here), forces, [(at(before), other)])

    def corrected(coordinates: np.ndarray) -> Point:
        return correction.of(at(coordinates))

    assert np.allclose(corrected(here).forces, forces)
    assert np.allclose(corrected(before).forces, other)
    step = 1e-5 * random.standard_normal((4, 3))
    work = -float(np.vdot(step, corrected(before).forces + corrected(before + step).forces)) / 2
    assert corrected(before + step).energy - corrected(before).energy == pytest.approx(work, abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"scalar_pressure": 5 * GPa}, {"mask": [1, 1, 1, 0, 0, 0]}])
def test_free_cells(options):
    ends = []
    for model in (None, MorsePotential(epsilon=0.35, rho0=4.0, r0=2.65, rcut1=5.0, rcut2=6.0)):
        atoms = rattled(size=0.1)
        atoms.set_cell(1.03 * atoms.cell.array, scale_atoms=True)
        atoms.calc = EMT()
        optimizer = Relaxer(FrechetCellFilter(atoms, **options), logfile=None, model=model)
        assert optimizer.run(fmax=0.02, steps=100)
        ends.append(atoms.get_potential_energy())
    assert ends[0] == pytest.approx(ends[1], abs=0.01)


def test_fixed_atoms_stay():
    slab = fcc100("Cu", (2, 2, 3), vacuum=6)
    add_adsorbate(slab, "O", 1.4, "bridge")
    slab.set_constraint(FixAtoms(indices=range(8)))
    fixed = slab.positions[:8].copy()
    slab.rattle(0.05)
    relaxed(slab, EMT(), model=Stiffer(slab.positions.copy(), 0.2))
    assert np.array_equal(slab.positions[:8], fixed)


def test_molecules_get_the_cheap_minimum_and_internal_coordinates():
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.1)
    optimizer = relaxed(atoms, EMT(), model=Stiffer(molecule("CH3CH2OH").positions, 0.5))
    assert optimizer.model_steps == 0
    assert optimizer.model_calls > 0


def test_a_restart_is_equal_to_never_having_stopped(tmp_path: Path):
    through = relaxed(rattled(1), expensive(), fmax=1e-3, model=EMT())
    file = tmp_path / "relaxation.json"
    atoms = rattled(1)
    atoms.calc = expensive()
    Relaxer(atoms, logfile=None, restart=file, model=EMT()).run(fmax=1e-3, steps=2)
    atoms = rattled(1)
    atoms.calc = expensive()
    second = Relaxer(atoms, logfile=None, restart=file, model=EMT())
    second.go_on()
    assert second.run(fmax=1e-3, steps=100)
    assert np.allclose(atoms.positions, through.atoms.positions, atol=1e-9)
    assert second.force_calls == through.force_calls
    assert second.model_calls == through.model_calls
    with pytest.raises(RestartError, match="with the model"):
        Relaxer(atoms, logfile=None, restart=file)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Wrong(), "on fire"),
        (Wrong(how="nan"), "not finite"),
        (Wrong(after=3), "on fire"),
        (LennardJones(sigma=4.5, epsilon=5.0), ""),  # disagrees wildly
    ],
)
def test_a_model_that_fails_is_named_and_the_relaxation_goes_on(model, said, caplog):
    alone = relaxed(rattled(), expensive())
    with caplog.at_level(logging.WARNING, "relaxion"):
        helped = relaxed(rattled(), expensive(), model=model)
    assert said in helped.model_used
    assert said in caplog.text
    assert helped.force_calls <= alone.force_calls + 1
    assert energy_of(helped) == pytest.approx(energy_of(alone), abs=2e-3)


def test_a_model_may_fail_in_mid_run():
    counted = Wrong(after=10**6)
    relaxed(rattled(), expensive(), fmax=1e-3, model=counted)
    calls = 10**6 - counted.after
    helped = relaxed(rattled(), expensive(), fmax=1e-3, model=Wrong(after=calls - 2))
    assert "on fire" in helped.model_used
    assert helped.model_steps > 0


def test_the_calculator_itself_is_no_model(caplog):
    calculator = EMT()
    with caplog.at_level(logging.WARNING, "relaxion"):
        optimizer = relaxed(rattled(), calculator, model=calculator)
    assert "the calculator itself" in caplog.text
    assert optimizer.model_calls == 0


def test_elements_that_the_model_lacks(caplog):
    atoms = bulk("NaCl", "rocksalt", 5.6)
    atoms.rattle(0.05)
    with caplog.at_level(logging.WARNING, "relaxion"):
        optimizer = relaxed(atoms, LennardJones(sigma=2.5, epsilon=0.1), model="emt")
    assert "Na" in caplog.text
    assert optimizer.model_calls <= 1


def test_a_stress_that_the_model_lacks(caplog):
    atoms = rattled(size=0.1)
    atoms.calc = EMT()
    with caplog.at_level(logging.WARNING, "relaxion"):
        optimizer = Relaxer(FrechetCellFilter(atoms), logfile=None, model=Wrong(after=10**6))
        assert optimizer.run(fmax=0.05, steps=100)
    assert "stress" in caplog.text


def test_where_the_cheap_potential_went_astray():
    before = molecule("C2H6")
    after = before.copy()
    assert astray(before, after) == ""
    after.positions[0] += 3.0
    assert "broke the bond" in astray(before, after)
    crystal = bulk("Cu", cubic=True)
    grown = crystal.copy()
    grown.set_cell(1.2 * crystal.cell.array, scale_atoms=True)
    assert "volume" in astray(crystal, grown)
    moved = crystal.copy()
    moved.positions[0] += 3.0
    assert "moved an atom" in astray(crystal, moved)


def test_the_log_shows_both_counts(tmp_path: Path):
    atoms = rattled()
    atoms.calc = expensive()
    with Relaxer(atoms, logfile=tmp_path / "log", model=EMT()) as optimizer:
        optimizer.run(fmax=0.05)
    line = (tmp_path / "log").read_text().splitlines()[0]
    assert "EMT" in line
    assert " calls" in line
