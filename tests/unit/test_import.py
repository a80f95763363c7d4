"""Importing relaxion is quick and changes nothing global; relaxing loads no training code."""

import subprocess
import sys

import pytest


def run_fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_no_heavy_package():
    loaded = run_fresh("import sys, relaxion; print(sorted({n.split('.')[0] for n in sys.modules}))")
    for heavy in ("torch", "ase", "numpy", "scipy", "gymnasium", "e3nn"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize("policy", ["auto", "file"])
def test_relaxing_loads_no_training_code(policy, stiffness_file):
    code = f"""
import sys
from ase.build import bulk
from ase.calculators.emt import EMT
import relaxion
atoms = bulk("Cu") * (2, 1, 1)
atoms.rattle(0.1)
atoms.calc = EMT()
opt = relaxion.Relaxer(atoms, logfile=None, policy={str(stiffness_file) if policy == "file" else policy!r})
opt.run()
assert {policy!r} != "file" or opt.policy_used == "untrained"
print([n for n in sys.modules if n.startswith(("relaxion.train.agents", "relaxion.train.experience", "relaxion.train",
                                               "gymnasium", "e3nn", "tensorboard"))])
"""
    assert run_fresh(code) == "[]"


def test_learning_pendulum_loads_few_modules():
    """A student can read all of it: no networks for atoms, no potentials, no relaxer."""
    code = """
import sys
from relaxion.train import TD3
agent = TD3("Pendulum-v1", widths=(8, 8), warmup_steps=20, batch_size=8).learn(40)
assert agent.metrics()["train/n_updates"] > 0
print(" ".join(n for n in sys.modules if n.split(".")[0] == "relaxion"))
"""
    loaded = run_fresh(code).split()
    assert "relaxion.train.agents.td3" in loaded
    assert len(loaded) < 33, sorted(loaded)


def test_import_changes_nothing_global():
    code = """
import random, numpy, torch
def look():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().sum().item(),
            torch.is_grad_enabled(), numpy.geterr(), numpy.random.get_state()[1].sum(), random.getstate()[1][:9])
before = look()
import relaxion, relaxion.structures, relaxion.potentials, relaxion.optimizer
import relaxion.train.experience, relaxion.apps.cli.app
assert look() == before, (before, look())
print("same")
"""
    assert run_fresh(code) == "same"


def test_an_unknown_name_is_an_attribute_error():
    import relaxion

    with pytest.raises(AttributeError, match="Relaxxer"):
        relaxion.Relaxxer  # noqa: B018
    assert "Relaxer" in dir(relaxion)
