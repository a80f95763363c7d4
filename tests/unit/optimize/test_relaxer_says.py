"""What a Relaxer refuses, and what it says of itself."""

from __future__ import annotations

import logging

import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter, StrainFilter, UnitCellFilter
from ase.mep import NEB

from relaxion import Outcome, Relaxer
from relaxion.errors import SettingsError, StructureError


@pytest.fixture
def atoms() -> Atoms:
    made = bulk("Cu", cubic=True)
    made.rattle(0.1, seed=1)
    made.calc = EMT()
    return made


@pytest.mark.parametrize("fmax", [-1, float("nan"), float("inf")])
def test_an_fmax_that_makes_no_sense_costs_no_call(atoms: Atoms, fmax: float) -> None:
    opt = Relaxer(atoms, logfile=None)
    with pytest.raises(SettingsError, match=r"fmax is a force in eV/Å above 0, got .*; try fmax=0.05"):
        opt.run(fmax=fmax)
    with pytest.raises(SettingsError):
        next(opt.irun(fmax=fmax))
    assert opt.force_calls == 0


def test_outcomes_can_be_read(atoms: Atoms) -> None:
    opt = Relaxer(atoms, logfile=None)
    opt.run()
    assert str(opt.outcome) == f"{opt.outcome}" == "converged"
    assert opt.outcome == 1
    assert f"{Outcome.STEP_LIMIT:>12}" == "  step limit"


@pytest.mark.parametrize(
    "make",
    [
        lambda atoms: FrechetCellFilter(atoms, hydrostatic_strain=True),
        lambda atoms: UnitCellFilter(atoms, constant_volume=True),
        StrainFilter,
    ],
)
def test_under_filters_that_policies_do_not_know_the_core_is_named(atoms: Atoms, make, caplog) -> None:
    opt = Relaxer(make(atoms), logfile=None, policy="metals")
    opt.run(steps=4)
    assert opt.policy_used == "classical"
    assert {entry.method for entry in opt.history} <= {"start", "plain", "fire"}
    assert "plain L-BFGS makes every step" in caplog.text
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        assert Relaxer(make(atoms), logfile=None).policy_used == "classical"
    assert caplog.text == "", "auto promised none"


def test_the_others_name_their_policy(atoms: Atoms) -> None:
    assert Relaxer(FrechetCellFilter(atoms), logfile=None).policy_used == "metals"


def test_a_band_is_refused_with_an_optimizer_that_takes_it(atoms: Atoms) -> None:
    with pytest.raises(StructureError, match=r"ase\.optimize\.FIRE or ase\.mep\.neb\.NEBOptimizer"):
        Relaxer(NEB([atoms, atoms.copy(), atoms.copy()], method="improvedtangent"), logfile=None)
