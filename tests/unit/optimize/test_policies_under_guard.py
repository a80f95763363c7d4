"""Which policy relaxes, by word, name or file; and that no policy, however bad, makes a relaxation fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.cluster import Octahedron
from ase.constraints import FixAtoms, FixCom, FixedLine
from ase.filters import FrechetCellFilter, UnitCellFilter
from ase.mep import NEB

from relaxion import Outcome, Relaxer
from relaxion.errors import PolicyError, RestartError, SettingsError, StructureError
from relaxion.model.policy_file import Network
from relaxion.optimizer.choice import CORE, Chooser, load
from relaxion.optimizer.safeguard import StepRule, constant_network


class Counted(EMT):
    """EMT that counts how often it really calculates."""

    def __init__(self) -> None:
        super().__init__()
        self.calculations = 0

    def calculate(self, *args, **kwargs):
        self.calculations += 1
        super().calculate(*args, **kwargs)


def alloy(seed: int = 0, size: float = 0.15, elements: str = "CuAuPd") -> Atoms:
    generator = np.random.default_rng(seed)
    atoms = bulk("Cu", a=3.75) * (2, 2, 2)
    symbols = [elements[k : k + 2] for k in range(0, len(elements), 2)]
    atoms.symbols[:] = generator.choice(symbols, len(atoms))
    atoms.positions += generator.normal(0, size, atoms.positions.shape)
    atoms.calc = Counted()
    return atoms


# --- which policy ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("shipped")
def test_auto_without_any_shipped_policy_is_the_core() -> None:
    decision = Chooser("auto").decide([29], periodic=True)
    assert (decision.loaded, decision.name, decision.note) == (None, CORE, "")


def test_auto_takes_the_shipped_policy_that_covers_all_elements(
    shipped: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    make_bundle(shipped / "a-noble.safetensors", make_stiffness_policy(), ("Cu", "Ag", "Au"))
    make_bundle(shipped / "b-wide.safetensors", make_stiffness_policy(), ("Cu", "Ag", "Au", "Pd", "Pt"))
    assert Chooser("auto").decide([29, 79], periodic=True).name == "a-noble"
    assert Chooser("auto").decide([29, 46], periodic=True).name == "b-wide"
    left = Chooser("auto").decide([29, 46, 26, 8], periodic=True)
    assert left.name == CORE
    assert "b-wide lacks O, Fe" in left.note
    assert Chooser("auto", allow_unseen=True).decide([29, 46, 26, 8], periodic=True).name == "b-wide"
    assert Chooser(None).decide([29], periodic=True).name == Chooser("none").decide([29], periodic=True).name == CORE
    assert Relaxer(alloy(elements="CuAu"), logfile=None).policy_used == "a-noble"
    assert Relaxer(alloy(elements="CuAu"), logfile=None, policy=None).policy_used == CORE


def test_auto_keeps_crystals_and_molecules_apart(
    shipped: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    for name, periodic in (("a-crystals", True), ("b-molecules", False)):
        make_bundle(shipped / f"{name}.safetensors", make_stiffness_policy(), ("Cu",), periodic=periodic)
    assert Chooser("auto").decide([29], periodic=True).name == "a-crystals"
    assert Chooser("auto").decide([29], periodic=False).name == "b-molecules"
    left = Chooser("a-crystals").decide([29], periodic=False)
    assert left.name == CORE
    assert "a-crystals is for structures that are periodic in some direction" in left.note
    assert "unseen" not in left.note  # following that advice doubles the force calls of molecules
    assert Chooser("a-crystals", allow_unseen=True).decide([29], periodic=False).name == "a-crystals"
    assert Relaxer(Atoms("Cu2", [[0, 0, 0], [2.5, 0, 0]], calculator=EMT()), logfile=None).policy_used == "b-molecules"


def test_a_damaged_shipped_policy_is_no_reason_to_stop(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shipped / "metals.safetensors").write_bytes(b"nonsense")
    opt = Relaxer(alloy(), logfile=None)
    assert opt.policy_used == CORE
    (record,) = caplog.records
    assert "metals" in record.message
    with pytest.raises(PolicyError, match="metals"):
        Relaxer(alloy(), logfile=None, policy="metals")


@pytest.mark.usefixtures("shipped")
def test_what_policy_may_be(stiffness_file: Path) -> None:
    for given in (stiffness_file, str(stiffness_file)):
        assert Relaxer(alloy(), logfile=None, policy=given).policy_used == "untrained"
    with pytest.raises(PolicyError, match=r"no policy named 'atuo': did you mean 'auto'\?"):
        Chooser("atuo").decide([], periodic=True)
    with pytest.raises(PolicyError, match="does not exist"):
        Chooser("no/such.safetensors").decide([], periodic=True)
    with pytest.raises(SettingsError, match="a name, a path, 'auto' or None"):
        Chooser(3).decide([], periodic=True)  # pyright: ignore[reportArgumentType]


def test_networks_are_made_once_and_again_when_the_file_changes(
    tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    file = make_bundle(tmp_path / "mine.safetensors", make_stiffness_policy(0))
    first = load(file)
    assert load(file) is first
    make_bundle(file, make_stiffness_policy(1), ("Cu",))
    assert load(file).bundle.card.elements == ("Cu",)


def test_an_uncovered_element_is_the_cores_and_said_once(
    stiffness_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    atoms = Atoms("ArCu2", [[0, 0, 0], [3.4, 0, 0], [6, 0, 0]], calculator=LennardJones(sigma=2.5, epsilon=0.1))
    opt = Relaxer(atoms, logfile=None, policy=stiffness_file)
    assert opt.run(fmax=0.01, steps=200)
    assert opt.policy_used == CORE
    assert {entry.method for entry in opt.history} <= {"start", "springs", "plain", "fire"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not trained on Ar" in record.message
    assert "`allow_unseen=True`" in record.message

    caplog.clear()
    atoms.rattle(0.1, seed=1)
    insisting = Relaxer(atoms, logfile=None, policy=stiffness_file, allow_unseen=True)
    insisting.run(fmax=0.01, steps=200)
    assert insisting.policy_used == "untrained"
    assert "policy" in {entry.method for entry in insisting.history}
    assert not caplog.records


# --- it never fails -------------------------------------------------------------------------------------------------


def dozen() -> list[Atoms]:
    """Bulk, surfaces with adsorbates, clusters; some with free cells."""
    slabs = []
    for metal, adsorbate in (("Pt", "O"), ("Cu", "N"), ("Ni", "H")):
        atoms = fcc111(metal, (2, 2, 2), vacuum=6)
        add_adsorbate(atoms, adsorbate, 1.4, "bridge")
        atoms.set_constraint(FixAtoms([atom.index for atom in atoms if atom.tag == 2]))
        slabs.append(atoms)
    clusters = [Octahedron("Au", 2), Octahedron("Ag", 3)]
    for seed, atoms in enumerate([*slabs, *clusters]):
        atoms.rattle(0.15, seed=seed)
    made = [*(alloy(seed, size) for seed, size in ((0, 0.1), (1, 0.15), (2, 0.3), (3, 0.05))), *slabs, *clusters]
    free = [alloy(seed, 0.1) for seed in (4, 5, 6)]
    for atoms in free:
        atoms.set_cell(atoms.cell * [1.02, 0.98, 1.01], scale_atoms=True)
        atoms.info["free"] = True
    return [*made, *free]


def calls(atoms: Atoms, policy: Path | None) -> int:
    atoms = atoms.copy()
    atoms.calc = Counted()
    target = FrechetCellFilter(atoms) if atoms.info.get("free") else atoms
    opt = Relaxer(target, logfile=None, policy=policy)
    assert opt.run(fmax=0.05, steps=300), opt.outcome
    assert opt.force_calls == atoms.calc.calculations, "checking costs no force call"
    return opt.force_calls


@pytest.fixture(scope="module")
def calls_of_the_core() -> int:
    return sum(calls(atoms, None) for atoms in dozen())


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_noise_in_place_of_weights_fails_nowhere_and_costs_little(
    size: float, tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable, calls_of_the_core: int
) -> None:
    policy, generator = make_stiffness_policy(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    file = make_bundle(tmp_path / "noise.safetensors", policy, ("H", "N", "O", "Ni", "Cu", "Pd", "Ag", "Pt", "Au"))
    assert sum(calls(atoms, file) for atoms in dozen()) <= 1.5 * calls_of_the_core


def test_weights_that_are_no_numbers_are_refused_and_would_do_no_harm(
    tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    policy = make_stiffness_policy()
    file = make_bundle(tmp_path / "mine.safetensors", policy)
    for network in (policy.network, load(file).policy.network):  # the second as if it had slipped through
        with torch.no_grad():
            network.to_arms.weight[0, 0, 0] = torch.nan
    with pytest.raises(PolicyError, match="not finite"):
        make_bundle(tmp_path / "nan.safetensors", policy)

    opt = Relaxer(alloy(), logfile=None, policy=file)
    assert opt.run(fmax=0.05, steps=100)
    core = Relaxer(alloy(), logfile=None, policy=None)
    core.run(fmax=0.05, steps=100)
    assert opt.force_calls == core.force_calls
    assert opt.fallback_used == opt.nsteps
    assert "not finite" in opt.history[1].reason


def test_the_rule_of_the_bundle_decides(tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable) -> None:
    policy, described = make_stiffness_policy(), constant_network(StepRule(log_trust=-1.0))
    file = make_bundle(tmp_path / "ruled.safetensors", policy, gate=described)
    plain = make_bundle(tmp_path / "plain.safetensors", policy)
    ruled, unruled = (Relaxer(alloy(), logfile=None, policy=one) for one in (file, plain))
    assert ruled.run(fmax=0.02, steps=100)
    unruled.run(fmax=0.02, steps=100)
    assert [e.energy_ev for e in ruled.history] != [e.energy_ev for e in unruled.history]


def test_a_learned_gate_of_an_early_release_is_refused(
    tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    settings = {"observation": ["log10_largest_force"], "knobs": ["scale"], "widths": [8]}
    learned = Network("gate", settings, {"weight": torch.zeros(1)}, {})
    with pytest.raises(PolicyError, match="has a learned gate, which early releases could train"):
        load(make_bundle(tmp_path / "gated.safetensors", make_stiffness_policy(), gate=learned))


# --- bad input ------------------------------------------------------------------------------------------------------


class Exploding(Calculator):
    """Forces of 1e6 eV/Å at the start: a steep wall, smooth behind it."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        place = self.atoms.positions - np.array([[2.6 * k, 0, 0] for k in range(len(self.atoms))])
        self.results = {"energy": 5e6 * float((place**2).sum()), "forces": -1e7 * place}


def exploding() -> Atoms:
    atoms = Atoms("Cu4", [[2.6 * k, 0.1, 0] for k in range(4)], calculator=Exploding())
    assert np.abs(atoms.get_forces()).max() == pytest.approx(1e6)
    return atoms


def crushed() -> Atoms:
    """EMT itself, two atoms 0.3 Å apart."""
    atoms = alloy(size=0.0)
    atoms.positions[1] = atoms.positions[0] + [0.3, 0, 0]
    return atoms


def fixed() -> Atoms:
    atoms = alloy()
    atoms.set_constraint(FixAtoms(range(len(atoms))))
    return atoms


class Stubborn(FixCom):
    """Undoes every move, whatever the forces say."""

    def adjust_positions(self, atoms, new):
        new[:] = atoms.positions

    def adjust_forces(self, atoms, forces):
        pass


def blocked() -> Atoms:
    atoms = alloy()
    atoms.set_constraint(Stubborn())
    return atoms


def on_a_line() -> Atoms:
    atoms = alloy()
    atoms.set_constraint([FixedLine(k, (0, 0, 1)) for k in range(len(atoms))])
    return atoms


def thin() -> Atoms:
    """Two atoms in a cell of 2.5 Å: an atom meets several images of itself within the cutoff."""
    atoms = bulk("Cu", a=3.6)
    atoms.rattle(0.05, seed=1)
    pair = atoms * (1, 1, 2)
    pair.positions[1] += [0.2, -0.1, 0.1]
    pair.calc = Counted()
    return pair


def linear() -> Atoms:
    atoms = molecule("CO2")
    atoms.positions[1, 2] += 0.1
    atoms.calc = Counted()
    return atoms


DONE, STUCK = {Outcome.CONVERGED}, {Outcome.STALLED}
HARD: dict[str, tuple[Callable[[], Atoms | FrechetCellFilter | UnitCellFilter], set[Outcome]]] = {
    "one atom": (lambda: Atoms("Cu", calculator=Counted()), DONE),
    "one atom in a cell": (lambda: FrechetCellFilter(thin()[:1]), DONE),
    "all fixed": (fixed, DONE),
    "blocked": (blocked, STUCK),
    "on lines": (on_a_line, DONE),
    "linear molecule": (linear, DONE),
    "thin cell": (thin, DONE),
    "thin cell set free": (lambda: UnitCellFilter(thin()), DONE),
    "exploding": (exploding, DONE),
    "crushed": (crushed, DONE),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_input_ends_with_an_outcome(name: str, stiffness_file: Path) -> None:
    make, allowed = HARD[name]
    target = make()
    if isinstance(target, FrechetCellFilter) and target.atoms.calc is None:
        target.atoms.calc = Counted()
    opt = Relaxer(target, logfile=None, policy=stiffness_file)
    opt.run(fmax=0.05, steps=400)
    assert opt.policy_used == "untrained"
    assert opt.outcome in allowed
    assert np.isfinite(target.get_positions()).all()
    assert max(entry.step_length_angstrom for entry in opt.history) <= 0.6 + 1e-9 or "cell" in name


def test_a_band_is_refused_whatever_the_policy(stiffness_file: Path) -> None:
    with pytest.raises(StructureError, match="NEB"):
        Relaxer(NEB([alloy(), alloy()], method="improvedtangent"), logfile=None, policy=stiffness_file)


def test_a_restart_file_of_another_policy_is_refused(
    tmp_path: Path, stiffness_file: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    other = make_bundle(tmp_path / "other.safetensors", make_stiffness_policy(7))
    file = tmp_path / "r.json"
    Relaxer(alloy(), logfile=None, restart=file, policy=stiffness_file).run(fmax=1e-6, steps=2)
    kept = file.read_text()
    with pytest.raises(RestartError, match="written with the policy untrained, now it is other; give policy='untr"):
        Relaxer(alloy(), logfile=None, restart=file, policy=other)
    with pytest.raises(RestartError, match="now it is classical"):
        Relaxer(alloy(), logfile=None, restart=file, policy=None)
    assert file.read_text() == kept
    file.unlink()
    Relaxer(alloy(), logfile=None, restart=file, policy=None).run(fmax=1e-6, steps=2)
    with pytest.raises(RestartError, match="give policy=None"):
        Relaxer(alloy(), logfile=None, restart=file, policy=stiffness_file)


def test_a_restart_file_of_the_same_name_but_other_weights_is_refused(
    tmp_path: Path, make_bundle: Callable, make_stiffness_policy: Callable
) -> None:
    bundle, file = make_bundle(tmp_path / "mine.safetensors", make_stiffness_policy(1)), tmp_path / "r.json"
    Relaxer(alloy(), logfile=None, restart=file, policy=bundle).run(fmax=1e-6, steps=2)
    Relaxer(alloy(), logfile=None, restart=file, policy=bundle)  # the same weights are welcome
    make_bundle(bundle, make_stiffness_policy(2))
    with pytest.raises(RestartError, match=r"other weights of the policy mine \(sha256 [0-9a-f]{12}, now [0-9a-f]{12}"):
        Relaxer(alloy(), logfile=None, restart=file, policy=bundle)


# --- what it tells --------------------------------------------------------------------------------------------------


def test_history_says_who_made_each_step_and_why(stiffness_file: Path) -> None:
    opt = Relaxer(alloy(seed=3, size=0.3), logfile=None, policy=stiffness_file)
    assert opt.run(fmax=0.01, steps=100)
    first, *steps = opt.history
    assert (first.method, first.reason) == ("start", "")
    assert "policy" in {entry.method for entry in steps}
    assert all(entry.reason for entry in steps if entry.method != "fire")
    assert opt.fallback_used == sum(entry.method != "policy" for entry in steps)
    for entry in steps:
        if entry.method == "policy":
            lengths = {"secant_length_angstrom", "floor_ev_per_angstrom2"}
            assert set(entry.control) == {"scale", "trust_factor", "secant_weight", *lengths}
        else:
            assert not entry.control
        assert 0 < entry.trust_angstrom <= opt.maxstep
        assert entry.step_length_angstrom <= entry.trust_angstrom + 1e-9


class Walled(Calculator):
    """A wall on every side of the start: every point is rejected, until FIRE is asked."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.start = None

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        if self.start is None:
            self.start = self.atoms.positions.copy()
        pull = np.tile([0.5, 0.0, 0.0], (len(self.atoms), 1))
        way = self.atoms.positions - self.start
        inside = not way.any()
        self.results = {"energy": 4.5 * float(np.vdot(pull, way)), "forces": pull if inside else -10 * pull}


def test_history_says_why_fire_took_over() -> None:
    atoms = alloy()
    atoms.calc = Walled()
    opt = Relaxer(atoms, logfile=None, policy=None)
    opt.run(fmax=0.01, steps=9)
    fire = [entry for entry in opt.history if entry.method == "fire"]
    assert fire
    assert all(entry.reason.startswith("the trust radius fell to") for entry in fire)


def test_two_relaxers_at_once_do_not_disturb_each_other(stiffness_file: Path) -> None:
    alone = []
    for seed in (1, 2):
        opt = Relaxer(alloy(seed), logfile=None, policy=stiffness_file)
        opt.run(fmax=0.02, steps=60)
        alone.append([entry.energy_ev for entry in opt.history])
    pair = [Relaxer(alloy(seed), logfile=None, policy=stiffness_file) for seed in (1, 2)]
    running = [opt.irun(fmax=0.02, steps=60) for opt in pair]
    while running:
        running = [points for points in running if next(points, None) is not None]
    assert [[entry.energy_ev for entry in opt.history] for opt in pair] == alone
