"""Molecules through `Relaxer` and `relax_batch`: restart, batches, constraints, free cells, and bad input."""

from dataclasses import replace

import numpy as np
import pytest
from ase import Atoms
from ase.build import fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.morse import MorsePotential
from ase.constraints import FixAtoms, FixBondLengths, FixCartesian, FixInternals
from ase.filters import FrechetCellFilter

from relaxion import Relaxer, relax_batch
from relaxion.apps.comparison import find_set
from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer import trust_region
from relaxion.optimizer.choice import CORE, Chooser, load, new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.internal import JoinedHessian
from relaxion.optimizer.hessian.internal_topology import molecular_share
from relaxion.optimizer.point import read_point
from relaxion.optimizer.step import propose
from relaxion.structures.state import Outcome


def relaxed(atoms: Atoms, steps: int = 300, **options) -> Relaxer:
    atoms.calc = atoms.calc or EMT()
    optimizer = Relaxer(atoms, logfile=None, policy=None, **options)
    optimizer.run(fmax=0.05, steps=steps)
    return optimizer


def ethanol(seed: int = 0) -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=seed)
    return atoms


def test_the_history_says_who_made_the_steps():
    optimizer = relaxed(ethanol())
    assert optimizer.outcome is Outcome.CONVERGED
    assert {entry.method for entry in optimizer.history} == {"start", "internal"}


@pytest.mark.parametrize("stop", [1, 4])
def test_a_restart_equals_never_stopping(tmp_path, stop):
    straight, stopped = ethanol(), ethanol()
    whole = relaxed(straight)
    relaxed(stopped, steps=stop, restart=tmp_path / "relax.json")
    again = relaxed(stopped, restart=tmp_path / "relax.json")
    assert again.force_calls == whole.force_calls
    assert np.array_equal(stopped.positions, straight.positions)


def test_a_batch_equals_one_by_one():
    starts = [ethanol(), molecule("CO2"), molecule("H2O2")]
    for start in starts:
        start.rattle(0.04, seed=7)
    together = relax_batch(starts, "emt", policy=None, fmax=0.05)
    for start, found in zip(starts, together, strict=True):
        alone = relax_batch([start], "emt", policy=None, fmax=0.05)[0]
        assert found.force_calls == alone.force_calls
        assert np.allclose(found.atoms.positions, alone.atoms.positions, atol=1e-8)


@pytest.mark.parametrize(
    "constraint",
    [
        FixAtoms([0, 3]),
        FixCartesian(1, (True, False, True)),
        FixBondLengths([[0, 1], [1, 2]]),
        FixInternals(bonds=[[1.6, [0, 1]]], epsilon=1e-9),
    ],
    ids=["atoms", "Cartesian", "bond lengths", "internals"],
)
def test_constraints_hold(constraint):
    atoms = ethanol()
    before = atoms.positions.copy()
    atoms.set_constraint(constraint)
    assert relaxed(atoms).outcome in (Outcome.CONVERGED, Outcome.STALLED)
    if isinstance(constraint, FixAtoms):
        assert np.array_equal(atoms.positions[[0, 3]], before[[0, 3]])
    elif isinstance(constraint, FixCartesian):
        assert np.array_equal(atoms.positions[1, [0, 2]], before[1, [0, 2]])
    elif isinstance(constraint, FixBondLengths):
        assert atoms.get_distance(0, 1) == pytest.approx(np.linalg.norm(before[0] - before[1]), abs=1e-5)
    else:
        assert atoms.get_distance(0, 1) == pytest.approx(1.6, abs=1e-5)


def test_a_molecular_crystal_relaxes_with_its_cell():
    atoms = molecule("H2O", cell=[4.2, 4.0, 3.9], pbc=True)
    atoms.rattle(0.03, seed=0)
    atoms.calc = EMT()
    optimizer = Relaxer(FrechetCellFilter(atoms), logfile=None, policy=None)
    optimizer.run(fmax=0.05, steps=200)
    assert optimizer.outcome is Outcome.CONVERGED
    assert optimizer.history[1].method == "internal"


def test_a_molecule_on_a_metal():
    slab = fcc111("Cu", (2, 2, 2), vacuum=6, periodic=True)
    guest = molecule("CO")
    guest.positions += slab.positions[-1] + [0, 0, 2.0] - guest.positions[1]
    both = slab + guest
    both.set_constraint(FixAtoms(list(range(4))))
    optimizer = relaxed(both)
    assert optimizer.outcome is Outcome.CONVERGED
    assert optimizer.history[1].method == "internal"


def carbon_monoxide_on_copper() -> Atoms:
    slab = fcc111("Cu", (2, 2, 2), vacuum=6, periodic=True)
    x, y, z = slab.positions[-1]
    both = slab + Atoms("CO", [(x, y, z + 1.8), (x, y, z + 2.95)])
    both.set_constraint(FixAtoms(range(4)))
    return both


def test_auto_on_surfaces_asks_who_taught_a_policy_its_adsorbates():
    molecular = carbon_monoxide_on_copper()
    atomic = molecular[:-1]
    assert molecular_share(molecular) == 0.2
    assert molecular_share(atomic) == 0
    taught = Chooser("auto", calculator=EMT())
    assert [taught.decide_for(atoms).name for atoms in (molecular, atomic, atomic[:-1])] == ["metals"] * 3
    assert not taught.decide_for(molecular).sees_molecules  # EMT's molecules are no others'
    others = Chooser("auto", calculator=MorsePotential())
    assert [others.decide_for(atoms).name for atoms in (molecular, atomic, atomic[:-1])] == [
        "universal",
        *["metals"] * 2,
    ]
    assert [others.decide_for(atoms).sees_molecules for atoms in (molecular, atomic)] == [True, False]
    crystal = Atoms("CsCN", [[0, 0, 0], [2.7, 2.7, 2.7], [2.7, 2.7, 3.85]], cell=[5.4, 5.4, 5.4], pbc=True)
    assert 0 < molecular_share(crystal) < 1
    assert not others.decide_for(crystal).sees_molecules
    molecular.pbc = False
    assert others.decide_for(molecular).name == CORE  # no policy of clusters knows them
    assert others.decide_for(molecule("CO", cell=[8, 8, 8], pbc=True)).name == CORE
    assert Chooser("metals", calculator=MorsePotential()).decide_for(molecular).name == "metals"  # who names it gets it


@pytest.mark.parametrize("sees_molecules", [False, True])
def test_a_policy_relaxes_molecules_on_metals(sees_molecules):
    """By `metals`, which EMT taught, and by `universal` joined with internal coordinates."""
    loaded = load("universal" if sees_molecules else "metals")
    start = carbon_monoxide_on_copper()
    start.rattle(0.05, seed=1)
    stepper = new_stepper(policy_model=loaded.insisted, rule=loaded.rule, sees_molecules=sees_molecules)
    batch = BatchRelaxer("emt", BatchSettings(), lambda _: ("named", stepper))
    batch.add(start)
    found = list(batch.advance())
    while batch.n_running:
        assert isinstance(stepper.known[1].learned, JoinedHessian) == sees_molecules
        found += batch.advance()
    assert found[0].converged
    assert found[0].policy_steps > 0.5 * found[0].force_calls
    assert sees_molecules or found[0].force_calls < 0.7 * relaxed(start.copy()).force_calls


@pytest.mark.parametrize(
    "atoms",
    [
        Atoms("C"),
        Atoms("CO", [[0, 0, 0], [0, 0, 0.5]]),
        Atoms("C5", [[0, 0, 1.3 * k] for k in range(5)]),
        Atoms("OCO", [[0, 0, -3.0], [0, 0, 0], [0, 0, 3.0]]),
        molecule("C6H6"),
        Atoms("C6", np.random.default_rng(0).uniform(0, 1.5, (6, 3))),
        Atoms("OHO", [[0, 0, 0], [0, 0, 1.2], [0, 0, 2.4]]),
        Atoms("C2", [[0, 0, 0], [0, 0, 0]]),
        Atoms("N2O2", [[0, 0, 0], [0, 0, 1.1], [0, 1.65, 0], [0, 1.65, 1.2]]),
    ],
    ids=["atom", "half a bond", "line", "apart", "plane", "crowded", "bridge", "same place", "joining"],
)
@pytest.mark.parametrize("engine", [EMT, lambda: MorsePotential(epsilon=2.0, r0=1.3)], ids=["emt", "morse"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ASE's calculators divide by the distance
def test_bad_input_has_an_outcome(atoms, engine):
    atoms = atoms.copy()
    atoms.calc = engine()
    optimizer = relaxed(atoms, steps=20)
    assert optimizer.outcome in (Outcome.CONVERGED, Outcome.STEP_LIMIT, Outcome.STALLED, Outcome.NON_FINITE)
    assert optimizer.force_calls <= 21


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_molecule_that_falls_apart_on_the_way_relaxes():
    """Bonds of 1.3 Å between atoms that want to be 2.6 Å apart: all of them break."""
    atoms = Atoms("NON", [[0, 0, 0], [1.3, 0.1, 0], [2.6, 0, 0.1]])
    atoms.calc = MorsePotential(epsilon=1.0, r0=2.6, rho0=4.0)
    optimizer = relaxed(atoms)
    assert optimizer.outcome is Outcome.CONVERGED
    assert {"start", "internal"} < {entry.method for entry in optimizer.history}  # and others after it
    assert atoms.get_all_distances()[np.triu_indices(3, 1)].min() > 2.3


@pytest.mark.parametrize("name", ["emt-bulk", "emt-bulk-cell", "emt-slabs", "emt-clusters", "alfe", "lj38"])
def test_what_is_not_molecular_steps_as_before(name):
    """The first proposals of a set's starts, bit for bit."""
    chosen = find_set(name)
    for start in chosen.starts(2, 7000):
        start.calc = chosen.make_potential().as_calculator()
        target = FrechetCellFilter(start) if chosen.free_cell else start
        with_terms, without = new_stepper(), new_stepper(ClassicalSettings(internal=False))
        for _ in range(4):
            point = read_point(target)
            (one,), (other,) = propose([with_terms], [point]), propose([without], [point])
            assert np.array_equal(one.step, other.step)
            assert one.method == other.method
            target.set_positions(one.base.coordinates + one.step)


def test_a_model_that_cannot_be_made_leaves_the_step_to_springs(monkeypatch):
    def fails(*_: object) -> None:
        raise np.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr("relaxion.optimizer.hessian.internal.InternalHessian.prepare", fails)
    optimizer = relaxed(ethanol())
    assert optimizer.outcome is Outcome.CONVERGED
    assert {entry.method for entry in optimizer.history} <= {"start", "springs", "plain", "fire"}


def test_where_the_screen_stops_steps_of_molecules_springs_step(monkeypatch):
    """Oxygens that chance has crowded are no molecules: along their bonds a random oxide crept for ever."""
    atoms = ethanol()
    atoms.calc = MorsePotential()
    whole = trust_region.screened

    def nothing_left(proposal, bonds):
        return replace(proposal, step=0.01 * proposal.step) if proposal.method == "internal" else whole(proposal, bonds)

    (free,) = propose([new_stepper()], [read_point(atoms)])
    monkeypatch.setattr(trust_region, "screened", nothing_left)
    (stopped,) = propose([new_stepper()], [read_point(atoms)])
    assert (free.method, stopped.method) == ("internal", "springs")


def test_complexes_of_a_metal_are_molecules():
    """Cr(CO)₆; without its bonds and bends the carbonyls turn freely, and it takes 34 calls."""
    pytest.importorskip("tblite")
    ways = np.vstack([np.eye(3), -np.eye(3)])
    places = [[0, 0, 0], *(length * way for way in ways for length in (1.95, 3.11))]
    complex_of_chromium = Atoms("Cr" + 6 * "CO", places)
    complex_of_chromium.rattle(0.08, seed=0)
    assert molecular_share(complex_of_chromium) == 1
    (result,) = relax_batch([complex_of_chromium], "gfn2")
    assert result.converged
    assert result.force_calls <= 16


def test_a_cation_between_anions_is_no_centre_of_a_complex():
    """Sulphate stays a molecule though lithium holds it on every side, and repeats for ever."""
    oxygens = 1.48 / np.sqrt(3) * np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    edge = 2 * (oxygens[0, 0] + 1.9 / np.sqrt(3))  # lithium at the corners, 1.9 Å from an oxygen of each tetrahedron
    crystal = Atoms("SO4Li", [[0, 0, 0], *oxygens, [edge / 2] * 3], cell=[edge] * 3, pbc=True)
    assert molecular_share(crystal) == pytest.approx(5 / 6)
