"""Relaxing with machine-learned potentials and with calculators that carry charges and moments."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from ase.calculators.calculator import all_changes
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS

from relaxion.policies import SHIPPED
from relaxion.potentials.chgnet import Chgnet
from relaxion.relaxer import Relaxer


def crystals() -> list[Atoms]:
    perovskite = Atoms(
        "SrTiO3", scaled_positions=[[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]],
        cell=[3.95, 3.9, 4.0], pbc=True,
    )  # fmt: skip
    slab = fcc111("Pt", (1, 2, 2), a=3.97, vacuum=6.0, orthogonal=True)
    slab.pbc = True
    images = [bulk("NaCl", "rocksalt", a=5.5, cubic=True), perovskite, slab]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.06, seed=seed)
    return images


@pytest.mark.parametrize("free_cell", [False, True])
@pytest.mark.parametrize("policy", [None, "universal"])
def test_float32_costs_no_calls_near_the_tolerance(policy: str | None, free_cell: bool) -> None:
    calls, rejected = {}, {}
    for dtype in (torch.float32, torch.float64):
        optimizers = []
        for atoms in crystals():
            atoms.calc = Chgnet(dtype).as_calculator()
            target = FrechetCellFilter(atoms) if free_cell else atoms
            optimizers.append(Relaxer(target, logfile=None, policy=policy, allow_unseen=True))
            assert optimizers[-1].run(fmax=0.01, steps=60)
        calls[dtype] = sum(optimizer.force_calls for optimizer in optimizers)
        rejected[dtype] = sum(not entry.accepted for optimizer in optimizers for entry in optimizer.history)
        assert not any(entry.method == "fire" for optimizer in optimizers for entry in optimizer.history)
    assert abs(calls[torch.float32] - calls[torch.float64]) <= 3
    assert abs(rejected[torch.float32] - rejected[torch.float64]) <= 2


def test_energies_rounded_to_float32_do_not_make_it_oscillate() -> None:
    """CHGNet's own calculator gives energies in steps of 1e-5 eV; the last steps gain less."""
    from chgnet.model.dynamics import CHGNetCalculator

    warnings.simplefilter("ignore")  # of their calculator; pytest sets it back
    atoms = crystals()[0]
    atoms.calc = CHGNetCalculator(use_device="cpu")
    optimizer = Relaxer(atoms, logfile=None, policy=None)
    assert optimizer.run(fmax=0.001, steps=60)
    assert optimizer.force_calls < 25


@pytest.mark.parametrize("free_cell", [False, True])
@pytest.mark.parametrize("policy", [None, "universal"])
def test_tight_tolerances_are_reached_in_single_precision(policy: str | None, free_cell: bool) -> None:
    """As for phonons: the last steps gain less energy than single precision can tell. It must cost no more calls."""
    for place in (0, 1):
        calls = {}
        for dtype in (torch.float32, torch.float64):
            atoms = crystals()[place]
            atoms.calc = Chgnet(dtype).as_calculator()
            optimizer = Relaxer(FrechetCellFilter(atoms) if free_cell else atoms, logfile=None, policy=policy)
            assert optimizer.run(fmax=2e-4, steps=80)
            assert not any(entry.method == "fire" for entry in optimizer.history)
            calls[dtype] = optimizer.force_calls
        assert calls[torch.float32] <= 1.25 * calls[torch.float64] + 2


class Charged(EMT):
    """Writes down what it is shown; knows a charge and a setting, as calculators of DFT codes do."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters |= {"charge": -1, "spinpol": True, "kpts": (2, 2, 2)}
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []

    def calculate(self, atoms: Any = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        self.seen.append((atoms.get_initial_charges(), atoms.get_initial_magnetic_moments()))


@pytest.mark.parametrize("free_cell", [False, True])
@pytest.mark.parametrize("policy", [None, "metals"])
def test_charges_moments_and_parameters_pass_through_untouched(policy: str | None, free_cell: bool) -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    charges, moments = np.array([1.0, -0.5, 0.0, 0.25]), np.array([2.0, -2.0, 0.0, 1.0])
    atoms.set_initial_charges(charges)
    atoms.set_initial_magnetic_moments(moments)
    atoms.info["label"] = "mine"
    calculator = Charged()
    before = copy.deepcopy(dict(calculator.parameters))
    atoms.calc = calculator
    target = FrechetCellFilter(atoms) if free_cell else atoms
    assert Relaxer(target, logfile=None, policy=policy).run(fmax=0.02)
    assert atoms.calc is calculator
    assert dict(calculator.parameters) == before
    assert len(calculator.seen) > 2
    for seen_charges, seen_moments in calculator.seen:
        assert np.array_equal(seen_charges, charges)
        assert np.array_equal(seen_moments, moments)
    assert np.array_equal(atoms.get_initial_charges(), charges)
    assert np.array_equal(atoms.get_initial_magnetic_moments(), moments)
    assert atoms.info == {"label": "mine"}


def test_an_ion_stays_an_ion() -> None:
    from tblite.ase import TBLite

    atoms = molecule("OH")
    atoms.positions[1] += [0.0, 0.05, 0.1]
    atoms.set_initial_charges([-1.0, 0.0])
    atoms.set_initial_magnetic_moments([0.0, 0.0])
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    assert Relaxer(atoms, logfile=None).run(fmax=0.01, steps=50)
    assert float(atoms.get_charges().sum()) == pytest.approx(-1.0, abs=1e-6)


def test_universal_relaxes_what_metals_does_not_cover() -> None:
    """Crystals with CHGNet, fixed and free cells; also of elements that were never trained on."""
    calls = dict.fromkeys(("auto", "core", "BFGS"), 0)
    gallium = bulk("GaAs", "zincblende", a=5.7, cubic=True)
    gallium.rattle(0.08, seed=3)
    for free_cell in (False, True):
        for atoms in (*crystals()[:2], gallium):
            for name in calls:
                copied = atoms.copy()
                copied.calc = Chgnet().as_calculator()
                target = FrechetCellFilter(copied) if free_cell else copied
                if name == "BFGS":
                    optimizer = BFGS(target, logfile=None)
                else:
                    optimizer = Relaxer(target, logfile=None, policy=None if name == "core" else name)
                    assert optimizer.policy_used == {"auto": "universal", "core": "classical"}[name]
                assert optimizer.run(fmax=0.05, steps=200)
                calls[name] += optimizer.nsteps + 1
    assert calls["auto"] < calls["core"] < calls["BFGS"]
    assert calls["auto"] < 0.5 * calls["BFGS"]


def test_universal_leaves_molecules_to_the_core() -> None:
    water = molecule("H2O", calculator=EMT())
    assert Relaxer(water, logfile=None).policy_used == "classical"
    water.pbc, water.cell = True, [6, 6, 6]
    assert Relaxer(water, logfile=None).policy_used == "classical"  # bonds decide, not the box


def test_shipped_policies_are_small() -> None:
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert [file.stem for file in files] == ["metals", "universal"]
    assert all(file.stat().st_size < 5e6 and file.with_suffix(".md").exists() for file in files)
