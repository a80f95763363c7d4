"""What hosts hand to an optimizer class, and what they expect back."""

from __future__ import annotations

import json
import pickle
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.filters import ExpCellFilter, FrechetCellFilter
from ase.io import Trajectory, read

from relaxion import Relaxer
from relaxion.errors import SettingsError

FMAX = 0.05


def alloy() -> Atoms:
    generator = np.random.default_rng(5)
    atoms = bulk("Cu", a=3.75) * (2, 2, 2)
    atoms.symbols[:] = generator.choice(["Cu", "Au"], len(atoms))
    atoms.positions += generator.normal(0, 0.1, atoms.positions.shape)
    atoms.calc = EMT()
    return atoms


def largest(forces: np.ndarray) -> float:
    return float(np.linalg.norm(forces, axis=1).max())


def test_options_of_other_optimizers_are_named_and_left_out(caplog):
    atoms = alloy()
    opt = Relaxer(atoms, logfile=None, alpha=70.0, dt=0.1, maxstep=0.2)
    assert opt.maxstep == 0.2
    assert opt.run(fmax=FMAX)
    assert "alpha, dt: options of other optimizers" in caplog.text
    with pytest.raises(TypeError, match="max_step"):
        Relaxer(atoms, logfile=None, max_step=0.2)
    for removed in ("adapt", "fallback"):
        with pytest.raises(SettingsError, match=f"the option {removed} of Relaxer was removed"):
            Relaxer(atoms, logfile=None, **{removed: True})


def test_every_option_of_the_common_optimizers_is_known():
    """What stands in a call of BFGS, FIRE and the like does not stop the swap."""
    import inspect

    from ase import optimize

    from relaxion.optimizer.point import OPTIONS

    ours = {*inspect.signature(Relaxer).parameters, "self", "args"}
    for name in ("BFGS", "LBFGS", "LBFGSLineSearch", "FIRE", "FIRE2", "MDMin", "BFGSLineSearch", "CellAwareBFGS"):
        theirs = set(inspect.signature(getattr(optimize, name).__init__).parameters)
        assert theirs <= OPTIONS | ours, name


@pytest.mark.parametrize("cell", [False, True])
def test_as_quacc_calls_it(cell: bool, tmp_path: Path):
    """A trajectory opened around the bare atoms, a context manager, `irun`, then `converged` of the gradient."""
    atoms = alloy()
    log, restart = tmp_path / "opt.log", str(tmp_path / "opt.json")
    trajectory = Trajectory(tmp_path / "opt.traj", "w", atoms=atoms)
    target = FrechetCellFilter(atoms) if cell else atoms
    with trajectory, Relaxer(target, logfile=log, restart=restart, trajectory=trajectory) as opt:
        n_points = sum(1 for _ in opt.irun(steps=1000, fmax=FMAX))
    assert opt.converged(opt.optimizable.get_gradient())
    frames = read(tmp_path / "opt.traj", ":")
    assert len(frames) == opt.force_calls == n_points
    assert frames[-1].calc.results["energy"] == pytest.approx(atoms.get_potential_energy())
    assert opt.todict()["optimizer"] == "Relaxer"
    json.dumps(opt.todict())


def test_exp_cell_filter_of_older_hosts():
    atoms = alloy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = ExpCellFilter(atoms)
    assert Relaxer(target, logfile=None).run(fmax=FMAX, steps=100)
    assert largest(target.get_forces()) < FMAX


def test_the_class_travels_through_queues():
    """jobflow sends JSON of monty, dask and parsl send pickles."""
    json_of_monty = pytest.importorskip("monty.json", reason="pip install pymatgen brings monty")
    cloudpickle = pytest.importorskip("cloudpickle", reason="pip install cloudpickle")
    sent = json.dumps({"optimizer": Relaxer}, cls=json_of_monty.MontyEncoder)
    assert json.loads(sent, cls=json_of_monty.MontyDecoder)["optimizer"] is Relaxer
    assert pickle.loads(cloudpickle.dumps(Relaxer)) is Relaxer
    opt = pickle.loads(cloudpickle.dumps(partial(Relaxer, policy=None, logfile=None)))(alloy())
    assert opt.run(fmax=FMAX)
    assert opt.policy_used == "classical"


class CoreOnly(Relaxer):
    """As docs/hosts.md shows it for hosts that hand over nothing but the atoms."""

    def __init__(self, atoms, **options):
        super().__init__(atoms, policy=None, **options)


def test_settings_in_a_class_of_ones_own(capsys: pytest.CaptureFixture):
    opt = CoreOnly(FrechetCellFilter(alloy()))
    assert opt.run(fmax=FMAX)
    assert opt.policy_used == "classical"
    assert "CoreOnly:" in capsys.readouterr().out


def test_pymatgen_with_trajectory_options_and_molecules(tmp_path: Path):
    pytest.importorskip("pymatgen.core", reason="pip install pymatgen")
    from pymatgen.io.ase import AseAtomsAdaptor

    options = {"trajectory": str(tmp_path / "opt.traj"), "logfile": str(tmp_path / "opt.log"), "policy": None}
    structure = AseAtomsAdaptor.get_structure(alloy())
    relaxed, frames = structure.relax(EMT(), optimizer=Relaxer, fmax=FMAX, opt_kwargs=options, return_trajectory=True)
    assert relaxed.dynamics["optimizer"] == "Relaxer"
    assert relaxed.dynamics["policy"] == "classical"
    assert len(frames) > 1
    assert np.allclose(relaxed.lattice.matrix, frames[-1].cell)
    water = molecule("H2O")
    water.rattle(0.1, seed=0)
    bent = AseAtomsAdaptor.get_molecule(water)
    straight = bent.relax(EMT(), optimizer=Relaxer, fmax=FMAX, opt_kwargs={"logfile": None})
    assert largest(straight.calc.results["forces"]) < FMAX


def test_chgnet_finds_it_by_name_in_its_dictionary(monkeypatch: pytest.MonkeyPatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamics = pytest.importorskip("chgnet.model.dynamics", reason="pip install chgnet")
        monkeypatch.setitem(dynamics.OPTIMIZERS, "Relaxer", Relaxer)
        host = dynamics.StructOptimizer(optimizer_class="Relaxer", use_device="cpu")
        salt = bulk("NaCl", "rocksalt", a=5.8)
        salt.rattle(0.05, seed=0)
        answer = host.relax(salt, fmax=FMAX, verbose=False, ase_filter="UnitCellFilter", policy=None)
    forces = answer["trajectory"].forces[-1]
    assert largest(forces) < FMAX
    assert answer["final_structure"].volume != pytest.approx(5.8**3 / 4, rel=1e-3)
