"""Two levels: a cheap potential plans, the expensive one is asked only where that leads."""

import logging
from dataclasses import replace
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
from scipy.spatial.transform import Rotation

from relaxion import Relaxer, relax_batch
from relaxion.errors import RestartError
from relaxion.optimizer.hessian.internal_topology import bonds_in, topology_of
from relaxion.optimizer.hessian.potential import PotentialHessian, SurfaceCorrection, differences
from relaxion.optimizer.hessian.springs import bonds_of
from relaxion.optimizer.point import Point, read_geometry
from relaxion.optimizer.two_levels import astray
from relaxion.potentials.base import PotentialCalculator
from relaxion.potentials.engines import Gfn2


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
    """EMT, or another one, that fails in one way or another after some calls; without a stress."""

    implemented_properties = ("energy", "forces")

    def __init__(self, after: int = 0, how: str = "raise", inner: Calculator | None = None) -> None:
        super().__init__()
        self.after, self.how, self.inner = after, how, inner or EMT()

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.after -= 1
        if self.after < 0 and self.how == "raise":
            raise RuntimeError("the machine is on fire")
        self.inner.calculate(self.atoms, ["energy", "forces"], all_changes)
        self.results = {name: self.inner.results[name] for name in ("energy", "forces")}
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


def test_a_relaxed_free_cell_costs_one_call_though_the_model_has_another_volume():
    atoms = bulk("Cu", a=3.62, cubic=True)
    atoms.calc = EMT()
    assert Relaxer(FrechetCellFilter(atoms), logfile=None).run(fmax=0.005)
    again = Relaxer(FrechetCellFilter(atoms), logfile=None, model="eam")
    assert again.run(fmax=0.01)
    assert again.force_calls == 1
    assert again.model_calls > 1


class Pressed(Calculator):
    """EMT under a pressure of its own: other volumes, the same places."""

    implemented_properties = ("energy", "free_energy", "forces", "stress")

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        emt = EMT()
        emt.calculate(self.atoms, ["energy", "forces", "stress"], all_changes)
        pressure = 25 * GPa
        energy = emt.results["energy"] + pressure * self.atoms.get_volume()
        stress = emt.results["stress"] + pressure * np.array([1, 1, 1, 0, 0, 0])
        self.results = {"energy": energy, "free_energy": energy, "forces": emt.results["forces"], "stress": stress}


def test_a_relaxed_free_cell_costs_one_call_where_the_model_disagrees_widely_too():
    atoms = rattled(size=0)
    atoms.calc = EMT()
    assert Relaxer(FrechetCellFilter(atoms), logfile=None).run(fmax=0.005)
    before = atoms.get_positions()
    again = Relaxer(FrechetCellFilter(atoms), logfile=None, model=Pressed())
    assert again.run(fmax=0.01)
    assert again.force_calls == 1
    assert np.allclose(atoms.positions, before, atol=1e-9)


def test_of_start_and_cheap_minimum_the_lower_one_is_gone_on_from():
    alone = rattled(size=0.1)
    alone.set_cell(alone.cell * 1.06, scale_atoms=True)
    helped = alone.copy()
    calls = {}
    for atoms, model in ((alone, None), (helped, Pressed())):
        atoms.calc = EMT()
        optimizer = Relaxer(FrechetCellFilter(atoms), logfile=None, model=model)
        assert optimizer.run(fmax=0.02, steps=60)
        calls[model is None] = optimizer.force_calls
    assert calls[False] <= calls[True] + 2
    assert helped.get_potential_energy() == pytest.approx(alone.get_potential_energy(), abs=2e-3)


def test_the_hessian_of_a_quadratic_surface_is_exact_and_made_positive():
    random = np.random.default_rng(0)
    geometry = read_geometry(rattled())
    assert geometry is not None
    free = np.ones((8, 3), dtype=bool)
    free[:3] = False
    factor = random.standard_normal((24, 24))
    matrix = factor @ factor.T + 2 * np.eye(24)
    base = Point(rattled().positions, np.zeros((8, 3)), 0.0, replace(geometry, free=free))
    found = differences(base, lambda there: -(matrix @ (there - base.coordinates).ravel()).reshape(8, 3))
    assert np.allclose(found, matrix[9:, 9:])
    hessian = PotentialHessian(found, free)
    forces = random.standard_normal((8, 3)) * free
    step = hessian.solve(forces, 0.5)
    assert np.allclose(hessian.apply(step) + 0.5 * step, forces)
    assert not step[:3].any()
    upside_down = PotentialHessian(-found, free)  # every mode is as stiff as it is curved, whichever way
    assert np.vdot(forces, upside_down.solve(forces)) > 0
    assert np.allclose(upside_down.solve(forces), hessian.solve(forces))
    assert np.allclose(PotentialHessian(1e-3 * found, free).apply(forces), forces)  # nothing is softer than 1 eV/Å²


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


def ethanol(seed: int = 0) -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.15, seed=seed)
    return atoms


def tight_binding(method: str) -> Gfn2:
    pytest.importorskip("tblite")
    return Gfn2(method=method)


def test_steps_of_molecules_are_planned_in_internal_coordinates():
    alone = relaxed(ethanol(), PotentialCalculator(tight_binding("GFN2-xTB")), fmax=0.01)
    helped = relaxed(
        ethanol(), PotentialCalculator(tight_binding("GFN2-xTB")), fmax=0.01, model=tight_binding("GFN1-xTB")
    )
    assert helped.model_steps > 0
    assert helped.force_calls < alone.force_calls
    assert energy_of(helped) == pytest.approx(energy_of(alone), abs=2e-3)


def test_the_correction_turns_with_a_molecule():
    atoms = molecule("CH3CH2OH")
    geometry = read_geometry(atoms)
    assert geometry is not None
    topology = topology_of(geometry, bonds_in(geometry, bonds_of([geometry])[0], None))
    assert topology is not None
    offset = np.random.default_rng(0).standard_normal((len(atoms), 3))
    centred = atoms.positions - atoms.positions.mean(axis=0)
    offset -= offset.mean(axis=0)
    spin = np.linalg.lstsq(
        sum((np.dot(r, r) * np.eye(3) - np.outer(r, r)) for r in centred), np.cross(centred, offset).sum(axis=0)
    )[0]
    offset -= np.cross(spin, centred)  # forces of a real potential turn nothing
    base = Point(atoms.positions, np.zeros_like(offset), 0.0, geometry)
    correction = SurfaceCorrection(base, offset, [], topology)
    turn = Rotation.from_rotvec([0.0, 0.0, 0.8]).as_matrix()
    positions = centred @ turn.T
    turned = replace(base, coordinates=positions, geometry=replace(geometry, positions=positions))
    assert np.allclose(correction.of(base).forces, offset)
    assert np.allclose(correction.of(turned).forces, offset @ turn.T, atol=0.05)
    assert correction.of(turned).energy == pytest.approx(0.0, abs=0.1)


def test_the_surface_has_the_expensive_forces_where_they_are_known():
    atoms = ethanol()
    geometry = read_geometry(atoms)
    assert geometry is not None
    topology = topology_of(geometry, bonds_in(geometry, bonds_of([geometry])[0], None))
    assert topology is not None

    def at(positions: np.ndarray) -> Point:
        return Point(positions, np.zeros((9, 3)), 0.0, replace(geometry, positions=positions))

    def towards(positions: np.ndarray, stiffness: float) -> np.ndarray:
        """Forces of springs between all atoms: they turn nothing and push nothing away."""
        ways = positions[:, None] - positions
        lengths = np.linalg.norm(ways, axis=2) + np.eye(9)
        return -stiffness * ((1 - 2.0 / lengths)[..., None] * ways).sum(axis=1)

    here, before = atoms.positions, ethanol(1).positions
    forces, other = towards(here, 0.5), towards(before, 0.8)
    correction = SurfaceCorrection(at(here), forces, [(at(before), other)], topology)
    assert np.allclose(correction.of(at(here)).forces, forces, atol=1e-6)
    assert np.allclose(correction.of(at(before)).forces, other, atol=1e-3)


def test_a_batch_is_relaxed_as_one_by_one():
    starts = [rattled(seed) for seed in range(3)]
    single = [relaxed(start.copy(), EMT(), model="morse?epsilon=0.35&rho0=4.0&r0=2.65") for start in starts]
    many = relax_batch(starts, "emt", fmax=0.02, model="morse?epsilon=0.35&rho0=4.0&r0=2.65")
    assert [one.force_calls for one in many] == [one.force_calls for one in single]
    assert [one.model_calls for one in many] == [one.model_calls for one in single]
    assert all(one.model_used.startswith("Morse") for one in many)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_restart_of_a_molecule_is_equal_too(tmp_path: Path, stop_after: int):
    expensive_one = PotentialCalculator(tight_binding("GFN2-xTB"))
    cheap = tight_binding("GFN1-xTB")
    through = relaxed(ethanol(2), expensive_one, fmax=2e-3, model=cheap)
    file = tmp_path / "relaxation.json"
    for steps in (stop_after, 100):
        atoms = ethanol(2)
        atoms.calc = expensive_one
        part = Relaxer(atoms, logfile=None, restart=file, model=cheap)
        part.go_on()
        part.run(fmax=2e-3, steps=steps)
    assert part.force_calls == through.force_calls
    assert np.allclose(atoms.positions, through.atoms.positions, atol=1e-4)


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
    cheap = PotentialCalculator(tight_binding("GFN1-xTB"))
    calculator = PotentialCalculator(tight_binding("GFN2-xTB"))
    counted = Wrong(after=10**6, inner=cheap)
    relaxed(ethanol(), calculator, fmax=1e-3, model=counted)
    calls = 10**6 - counted.after
    helped = relaxed(ethanol(), calculator, fmax=1e-3, model=Wrong(after=calls - 2, inner=cheap))
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


def test_a_hessian_of_another_structure_is_refused_and_the_rule_is_that_of_the_start():
    optimizer = Relaxer(rattled(), logfile=None, model=EMT())
    model = optimizer._levels.model
    plain = model.plain() | {"hessian": [rattled().positions.tolist(), np.eye(24).tolist()], "molecular": True}
    model.restore(plain)
    assert optimizer._levels.planner.safeguard.rule.secant_weight == 0
    for shape in ((23, 23), (24, 23)):
        with pytest.raises(ValueError, match="free coordinates"):
            model.restore(plain | {"hessian": [rattled().positions.tolist(), np.zeros(shape).tolist()]})


def test_a_large_structure_only_begins_at_the_cheap_minimum():
    large = bulk("Cu", cubic=True).repeat((3, 3, 3))  # 324 coordinates
    large.rattle(0.05, seed=1)
    helped = relaxed(large, EMT(), model=MorsePotential(epsilon=0.35, rho0=4.0, r0=2.65, rcut1=5.0, rcut2=6.0))
    assert helped.model_steps == 0
    assert 0 < helped.model_calls < 50


@pytest.mark.parametrize(("seconds", "planned"), [(19.0, False), (20.0, True)])
def test_the_hessian_is_made_where_it_takes_no_longer_than_an_expensive_call(seconds, planned):
    model = Relaxer(bulk("Cu", cubic=True) * (2, 2, 2), logfile=None, model=EMT())._levels.model
    model.calls, model.seconds, model.call_seconds = 10, 1.0, seconds  # 96 coordinates, 192 calls of 0.1 s
    model.weigh()
    assert model.plans is planned
    assert planned or "would take 19 s" in model.used


class Refuses(Stiffer):
    """Has no answer at some of its calls."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__(expensive().places)
        self.at = at

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        if self.asked in self.at:
            self.results = {}
            raise RuntimeError("convergence NOT achieved")


@pytest.mark.parametrize("at", [(1,), (2,), (1, 3), (2, 3)])
def test_where_the_calculator_fails_at_a_planned_place_another_one_is_tried(at, caplog):
    through = relaxed(rattled(), expensive(), model=EMT())
    calculator = Refuses(at)
    with caplog.at_level(logging.WARNING, "relaxion"):
        helped = relaxed(rattled(), calculator, model=EMT())
    assert "convergence NOT achieved" in caplog.text
    assert helped.force_calls == calculator.asked
    assert np.isnan([helped.history[call - 1].energy_ev for call in at]).all()
    assert energy_of(helped) == pytest.approx(energy_of(through), abs=2e-3)
    [one] = relax_batch([rattled()], Refuses(at), fmax=0.02, model=EMT())
    assert one.converged
    assert one.force_calls == helped.force_calls


def test_the_third_failure_is_the_error_of_the_run():
    atoms = rattled()
    atoms.calc = Refuses((2, 3, 4))
    optimizer = Relaxer(atoms, logfile=None, model=EMT())
    with pytest.raises(RuntimeError, match="NOT achieved"):
        optimizer.run(fmax=0.02)
    assert optimizer.force_calls == 3
    [one] = relax_batch([rattled()], Refuses((2, 3, 4)), fmax=0.02, model=EMT())
    assert "NOT achieved" in one.error


def test_a_start_that_fails_is_told_at_once():
    atoms = rattled(size=0.01)  # the model leaves it where it is
    atoms.calc = Refuses((1,))
    with pytest.raises(RuntimeError, match="NOT achieved"):
        Relaxer(atoms, logfile=None, model=EMT()).run(fmax=0.02)
