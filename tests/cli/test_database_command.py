"""`relaxion memory` and `relaxion learn` as a user meets them, and what they say to bad input."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.io import read, write
from ase.io.trajectory import Trajectory as AseTrajectory
from ase.optimize import BFGS

from relaxion import Relaxer, relax_batch
from relaxion.apps.report.live import Board
from relaxion.apps.report.many import ManyFolder
from relaxion.errors import PolicyError
from relaxion.files import Format
from relaxion.model.policy_file import KIND, PolicyFile
from relaxion.optimizer.choice import Chooser
from relaxion.policies import SHIPPED


@pytest.fixture(autouse=True)
def own_policies(monkeypatch):
    monkeypatch.setenv("RELAXION_POLICIES", str(Path("policies").absolute()))


def alloy(seed: int):
    random = np.random.default_rng([8900, seed])
    atoms = bulk("Cu", a=3.8, cubic=True)
    atoms.symbols[random.random(4) < 0.4] = "Au"
    atoms.positions += random.normal(0, 0.15, (4, 3))
    return atoms


def remembered(number: int = 16, folder: str = "memory") -> None:
    relax_batch([alloy(seed) for seed in range(number)], "emt", database=folder, fmax=0.02)


QUICK = ["--set", "fit_updates=3", "--set", "examples_per_update=4", "-q"]


def test_relaxations_are_kept_shown_and_exported(relaxion):
    write("alloys.extxyz", [alloy(seed) for seed in range(2)])
    assert relaxion("relax", "alloys.extxyz", "--database", "memory", "-q").code == 0
    assert (
        relaxion("relax-many", "alloys.extxyz", "--out", "many", "--workers", "local:1", "--database", "memory").code
        == 0
    )
    (told,) = relaxion("database", "memory", "--json").objects
    assert (told["relaxations"], told["converged"]) == (4, 4)
    assert [one["name"] for one in told["calculators"]] == ["EMT"]
    assert told["elements"] == ["Cu", "Au"]
    assert 24 < told["bytes_per_atom_and_point"] < 120
    assert relaxion("database", "memory", "--export", "all.extxyz").code == 0
    images = read("all.extxyz", ":")
    assert len(images) == told["force_calls"]
    assert np.isfinite(images[0].get_forces()).all()
    assert relaxion("report", "many", "--out", "many.html", "--against", "many").code == 0
    assert "Force calls, mean of 20 structures" in Path("many.html").read_text()
    assert relaxion("bench", "alloys.extxyz", "--with", "BFGS", "--json", "bench.json", "-q").code == 0
    assert relaxion("watch", "many", "bench.json", "--save", "watched.html").code == 0
    for line in ('"this run"', '"metals"', '"BFGS"', '"core"', '"Against BFGS"'):
        assert line in Path("watched.html").read_text()
    board = Board(ManyFolder(Path("many"), [Path("bench.json")]))
    assert (board.refresh(), board.refresh()) == (True, False)
    assert json.loads(board.news(0))["order"] == [
        "outcomes", "tiles", "slowest", "plot", "energies", "structures", "facts",
    ]  # fmt: skip
    Path("other.json").write_text("{}")
    answer = relaxion("report", "many", "--out", "other.html", "--against", "other.json")
    assert (answer.code, "neither a folder of 'relax-many' nor a JSON file" in answer.err) == (1, True)
    refused = relaxion("report", "relaxed/alloys-0", "--against", "many")
    assert (refused.code, "--against compares folders of 'relax-many'" in refused.err) == (2, True)
    again = relaxion("database", "memory", "--export", "all.extxyz")
    assert again.code == 1
    assert "--force" in again.err


def test_files_of_others_are_taken_in_once(relaxion):
    for seed in range(2):
        atoms = alloy(seed)
        atoms.calc = EMT()
        with AseTrajectory(f"{seed}.traj", "w", atoms) as file:
            optimizer = BFGS(atoms, logfile=None)
            optimizer.attach(file)
            optimizer.run(fmax=0.05)
    first = relaxion("database", "memory", "--add", "0.traj", "1.traj", "--calculator", "PBE", "--json")
    assert first.code == 0
    assert (first.objects[0]["relaxations"], first.objects[0]["converged"]) == (2, 2)
    assert first.objects[0]["calculators"][0]["name"] == "PBE"
    second = relaxion("database", "memory", "--add", "0.traj", "--calculator", "PBE")
    assert "1 were there already" in second.err
    write("bare.xyz", alloy(0))
    bare = relaxion("database", "memory", "--add", "bare.xyz")
    assert bare.code == 1
    assert "there is nothing to keep" in bare.err


def test_a_policy_learns_and_is_chosen_where_it_fits(relaxion):
    remembered()
    answer = relaxion("learn", "memory", "--from", "metals", "--out", "mine", "--json", *QUICK)
    (told,) = answer.objects
    assert told["n_training"] + told["acceptance"]["n_validation"] == 16
    assert answer.code == (0 if told["kept"] else 3)
    assert told["kept"] == (told["acceptance"]["high"] < 1) == Path("policies/mine.safetensors").exists()


def learned(error_ratio: float = 0.5, elements: tuple[str, ...] = ("Cu", "Au")) -> None:
    """A policy as `learn` would have left it."""
    from relaxion.model.card import LearnedFrom
    from relaxion.potentials import potential
    from relaxion.potentials.counting import details_of, fingerprint

    metals = PolicyFile.read(SHIPPED / "metals.safetensors")
    source = LearnedFrom(
        origin="metals",
        origin_sha256=metals.weights_sha256,
        calculators=(fingerprint(details_of(potential("emt"))),),
        elements=elements,
        relaxations=20,
        relaxations_apart=5,
        error_ratio=error_ratio,
        error_ratio_low=0.4,
        error_ratio_high=0.8,
    )
    card = metals.card.model_copy(update={"learned_from": source, "results": ()})
    Path("policies").mkdir(exist_ok=True)
    PolicyFile("mine", metals.networks, card).write(Path("policies/mine.safetensors"))


def test_auto_takes_it_for_its_calculator_and_elements_only(relaxion):
    learned()
    atoms = alloy(0)
    atoms.calc = EMT()
    assert Relaxer(atoms, logfile=None).policy_used == "metals"  # ASE's EMT is another calculator
    (relaxed,) = relax_batch([atoms], "emt")
    assert relaxed.policy_used == "mine"
    atoms.symbols[0] = "Ni"
    assert relax_batch([atoms], "emt")[0].policy_used == "metals"
    assert Chooser("auto").decide([29], periodic=True).name == "metals"
    assert "error 0.50" in relaxion("policies").out.replace("\n", "")
    assert "From 20 relaxations" in relaxion("policies", "mine").out


def displaced_molecules(number: int = 6) -> list[Atoms]:
    images = [molecule(name) for name in ("CH3CH2OH", "CH4", "C2H6", "CH3OH", "C2H4", "H2CO")[:number]]
    for seed, atoms in enumerate(images):
        atoms.rattle(0.05, seed=seed)
    return images


def test_auto_leaves_molecules_to_the_classical_optimizer_whatever_was_learned():
    learned(elements=("H", "C", "O", "Cu"))
    (ethanol,) = displaced_molecules(1)
    slab = fcc111("Cu", (2, 2, 2), vacuum=6, periodic=True)
    alone, on_metal = slab.copy(), slab.copy()
    add_adsorbate(on_metal, molecule("CO"), 1.8, "ontop")
    used = [each.policy_used for each in relax_batch([ethanol, on_metal, alone], "emt", max_force_calls=2)]
    assert used == ["classical", "mine", "mine"]
    (named,) = relax_batch([on_metal], "emt", policy="mine", max_force_calls=2)
    assert named.policy_used == "mine"  # who names it gets it


def test_nothing_is_learned_from_molecules_that_no_policy_relaxes(relaxion):
    relax_batch(displaced_molecules(), "emt", database="memory", fmax=0.1)
    learning = ("learn", "memory", "--from", "metals", "--out", "mine", *QUICK)
    answer = relaxion(*learning)
    assert (answer.code, Path("policies/mine.safetensors").exists()) == (1, False)
    assert "only molecules" in answer.err
    remembered()
    mixed = relaxion(*learning, "--json")
    assert "6 relaxations of molecules are left out" in mixed.err
    (told,) = mixed.objects
    assert told["n_training"] + told["acceptance"]["n_validation"] == 16
    relax_batch(displaced_molecules(), "emt", database="named", policy="metals", allow_unseen=True, fmax=0.1)
    assert "molecules" not in relaxion("learn", "named", *learning[2:], "--force").err  # somebody wants them relaxed so


def test_own_policies_can_be_removed_and_shipped_ones_not(relaxion):
    learned()
    assert relaxion("policies", "remove", "mine").code == 0
    assert not Path("policies/mine.safetensors").exists()
    for name, words in (("metals", "cannot be removed"), ("mine", "no policy named 'mine'")):
        answer = relaxion("policies", "remove", name)
        assert answer.code == 2
        assert words in answer.err


def test_a_damaged_own_policy_does_not_disturb_auto():
    Path("policies").mkdir()
    Path("policies/broken.safetensors").write_bytes(b"nothing")
    assert relax_batch([alloy(0)], "emt")[0].policy_used == "metals"


def test_empty_mixed_and_foreign_memories_get_a_sentence(relaxion):
    relax_batch([], "emt", database="empty")
    assert "empty" in relaxion("database", "empty").out
    answer = relaxion("learn", "empty", "--from", "metals", "--out", "mine")
    assert (answer.code, "is empty; relax with --database" in answer.err) == (1, True)
    remembered(2, "mixed")
    atoms = alloy(0)
    atoms.calc = LennardJones(sigma=2.3, epsilon=0.4)
    Relaxer(atoms, database="mixed", logfile=None, policy=None).run(fmax=0.05, steps=3)
    answer = relaxion("learn", "mixed", "--from", "metals", "--out", "mine")
    assert answer.code == 1
    assert "mixes 2 calculators" in answer.err
    assert "--calculator EMT" in answer.err
    answer = relaxion("learn", "mixed", "--from", "metals", "--out", "mine", "--calculator", "VASP")
    assert "no calculator 'VASP'; it has EMT, LennardJones" in answer.err
    answer = relaxion("learn", "mixed", "--from", "metals", "--out", "mine", "--calculator", "EMT")
    assert "to validate" in answer.err
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").touch()
    for command in (["database", "thesis"], ["learn", "thesis", "--out", "mine"]):
        answer = relaxion(*command)
        assert answer.code == 1
        assert "holds no relaxation database" in answer.err
        answer = relaxion(*[word.replace("thesis", "nosuch") for word in command])
        assert "nosuch does not exist; relaxing with --database nosuch makes one" in answer.err
    write("one.extxyz", alloy(0))
    answer = relaxion("relax", "one.extxyz", "--database", "thesis")
    assert answer.code == 1
    assert "choose another folder" in answer.err


def test_two_learners_at_once_and_wrong_beginnings(relaxion):
    remembered()
    with Path("memory/.learning").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = relaxion("learn", "memory", "--from", "metals", "--out", "mine", *QUICK)
    assert answer.code == 1
    assert "another 'relaxion learn' is busy" in answer.err
    Format(version=99, error=PolicyError).write(Path("new.safetensors"), KIND, {}, {})
    answer = relaxion("learn", "memory", "--from", "new.safetensors", "--out", "mine")
    assert answer.code == 2
    assert "has format version 99" in answer.err
    answer = relaxion("learn", "memory", "--from", "metalls", "--out", "mine")
    assert (answer.code, "metals" in answer.err) == (2, True)
    for word in ("none", "auto", "classical"):
        answer = relaxion("learn", "memory", "--from", word, "--out", "mine")
        assert (answer.code, word in answer.err and "give --from universal" in answer.err) == (2, True)
    answer = relaxion("learn", "memory", "--from", "metals", "--out", "metals")
    assert (answer.code, "ships with relaxion" in answer.err) == (2, True)


def test_a_damaged_file_is_named_and_the_rest_is_used(relaxion):
    remembered(3)
    Path("memory/relaxations-other.sqlite").write_bytes(b"half a file" * 1000)
    answer = relaxion("database", "memory", "--json")
    assert answer.code == 0
    assert "relaxations-other.sqlite" in answer.err
    assert answer.objects[0]["relaxations"] == 3


def test_an_interrupted_fit_goes_on():
    from relaxion.optimizer.choice import load
    from relaxion.train.supervised.fine_tune import StoreFineTune, gathered
    from relaxion.train.supervised.fit import FitSettings

    remembered()
    settings = FitSettings(fit_updates=4, examples_per_update=4, fit_learning_rate=8e-4)

    def tuned() -> StoreFineTune:
        return StoreFineTune(Path("memory"), load("metals"), gathered(Path("memory"), None, print), settings)

    straight, first, second = tuned(), tuned(), tuned()
    assert straight.run()
    asked = iter([False, False, True])
    assert not first.run(stop=lambda: next(asked))
    assert second.run()
    assert second.tested(1.0).acceptance == straight.tested(1.0).acceptance
    assert json.loads(json.dumps(second.tested(1.0).plain()))["n_updates"] == 4


def test_elements_that_the_policy_never_saw_are_learned_from_too(relaxion):
    images = []
    for seed in range(20):
        atoms = bulk("Ar", "fcc", a=5.2, cubic=True)
        atoms.positions += np.random.default_rng(seed).normal(0, 0.2, (4, 3))
        images.append(atoms)
    relax_batch(images, LennardJones(sigma=3.4, epsilon=0.3), policy=None, database="argon", max_force_calls=60)
    answer = relaxion("learn", "argon", "--from", "metals", "--out", "argon", "--json", *QUICK)
    assert answer.code in (0, 3), answer.err
    assert answer.objects[0]["n_training"] > 0
    assert np.isfinite(answer.objects[0]["acceptance"]["ratio"])
