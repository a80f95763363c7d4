"""One policy and critic update from a fixed batch gives the stored numbers.

After a change that is meant to move them: `RELAXION_STORE=1 pytest tests/regression/test_updates.py`, and say why.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from relaxion.train.agents import AGENT_SETTINGS, vector_agent
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch

STORED = Path(__file__).with_name("updates.json")


def fixed_batch() -> Batch:
    """From sines, not from a generator: the same on every version of torch."""
    wave = torch.sin(torch.arange(8 * 10, dtype=torch.float64)).reshape(8, 10).float()
    discounts = torch.tensor([0.99, 0.99, 0.0, 0.99, 0.970299, 0.99, 0.0, 0.99])
    return Batch(wave[:, :3], torch.addcmul(*_scale(), wave[:, 3:5]), wave[:, 5], discounts, wave[:, 6:9])


def _scale() -> tuple[torch.Tensor, torch.Tensor]:
    box = actions()
    return box.centre, box.half_range


def actions() -> BoxActions:
    return BoxActions([-1.0, 0.5], [2.0, 0.75])


def two_updates(name: str) -> dict[str, float]:
    """Metrics of two updates (TD3's policy moves in the second) and the sum of every tensor of weights."""
    values = {"lowest_value": -3.0, "highest_value": 3.0} if name == "d4pg" else {}
    generator = torch.Generator().manual_seed(0)
    networks = VectorNetworkSettings(widths=(8, 4))
    agent = vector_agent(3, actions(), generator, AGENT_SETTINGS[name].read(values), networks)
    numbers: dict[str, float] = {}
    for number in (1, 2):
        for key, tensor in agent.update(fixed_batch()).items():
            numbers[f"{key} {number}"] = float(tensor)
    for key, tensor in agent.snapshot().items():
        if ".layers." in key or key == "log_entropy_weight":
            numbers[key] = float(tensor.double().sum())
    return numbers


@pytest.mark.parametrize("name", AGENT_SETTINGS)
def test_updates_give_the_stored_numbers(name: str) -> None:
    numbers = two_updates(name)
    if os.environ.get("RELAXION_STORE"):
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        STORED.write_text(json.dumps(stored | {name: numbers}, indent=1, sort_keys=True) + "\n")
    stored = json.loads(STORED.read_text())[name]
    assert stored.keys() == numbers.keys()
    wrong = {key: (stored[key], numbers[key]) for key in stored if numbers[key] != pytest.approx(stored[key], abs=1e-5)}
    assert wrong == {}
