"""One bundle of every format version, written when that version was new: it must mean the same for ever.

Anew: `python -m tests.regression.test_bundles`, for a new format version only, beside the old files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ase.build import bulk

from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.card import ModelCard
from relaxion.model.policy_file import FORMAT, PolicyFile, described, policy_of
from relaxion.structures import Evaluation, Move, State, Structures

HERE = Path(__file__).parent / "bundles"


def make_state() -> State:
    alloy = bulk("Al", cubic=True)
    alloy.numbers[0] = 29
    structures = Structures.from_ase([alloy])
    forces = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).sin()
    return State(
        structures=structures,
        evaluation=Evaluation(torch.zeros(1, dtype=torch.float64), forces, None),
        graph=None,
        last_move=Move(0.05 * forces.flip(0), torch.zeros(1, 3, 3, dtype=torch.float64)),
        last_forces=2 * forces,
        trust_radii=torch.full((1,), 0.2, dtype=torch.float64),
        calls=torch.tensor([2]),
    )


@pytest.mark.parametrize("file", sorted(HERE.glob("*.safetensors")), ids=lambda file: file.stem)
def test_old_bundles_mean_the_same(file: Path) -> None:
    bundle = PolicyFile.read(file)
    expected = json.loads(file.with_suffix(".json").read_text())
    assert bundle.weights_sha256 == expected["weights_sha256"]
    card = bundle.card.model_dump(mode="json")
    assert {name: card[name] for name in expected["card"]} == expected["card"]
    with torch.no_grad():
        move = policy_of(bundle)(make_state())
    assert move.displacements.flatten().tolist() == pytest.approx(expected["displacements"], rel=1e-5, abs=1e-7)


def test_every_version_is_there() -> None:
    found = {file.stem for file in HERE.glob("*.safetensors")}
    assert found == {f"version_{number}" for number in range(1, FORMAT.version + 1)}


def write() -> None:
    """The file of the present version."""
    settings = AtomNetworkSettings(channels=2, environment_information=("log_largest_force",))
    policy = AtomPolicy(MoveActions(0.3, 0.07), settings, torch.Generator().manual_seed(5))
    card = ModelCard(
        elements=("Al", "Cu"),
        smallest_n_atoms=2,
        largest_n_atoms=4,
        potential="emt",
        force_tolerance_ev_per_angstrom=0.05,
        agent="td3",
        training_command="none: weights drawn at random",
        seed=5,
        environment_steps=0,
        relaxion_version="0.1.0",
        date="2026-11-16",
    )
    bundle = PolicyFile("old", {"policy": described(policy)}, card)
    file = HERE / f"version_{FORMAT.version}.safetensors"
    HERE.mkdir(exist_ok=True)
    bundle.write(file)
    with torch.no_grad():
        move = policy(make_state())
    values = {
        "weights_sha256": bundle.weights_sha256,
        "card": card.model_dump(mode="json"),
        "displacements": move.displacements.flatten().tolist(),
    }
    file.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    write()
