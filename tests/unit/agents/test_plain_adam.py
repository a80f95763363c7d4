"""Every agent on every network learns as a plain loop of `loss.backward()` and `torch.optim.Adam.step()` does.

Networks that permute their weights give gradients with strides of their own, and torch's fused kernel pairs parameters
and gradients by their place in memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relaxion.train.agents import AGENT_SETTINGS, d4pg, ddpg, sac, td3, vector_agent
from relaxion.train.agents.shared import parameters_of
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch
from relaxion.train.tasks.relax import RelaxTrainer
from relaxion.train.tasks.relax_settings import RelaxRunSettings
from relaxion.train.tasks.relax_task import make_agent, relax_task

N_UPDATES = 10
AGENTS = sorted(AGENT_SETTINGS)
SUPPORT = {"lowest_value": -3.0, "highest_value": 3.0, "n_bins": 11}  # of D4PG
NETWORKS: dict[str, dict[str, Any]] = {
    "light": {},
    "light-gate": {"environment_information": ["log_largest_force"]},
    "tensor_field": {"backbone": "tensor_field"},
    "stiffness": {"policy": "stiffness"},
}


class PlainLoop:
    """Steps every optimizer's parameters by torch's slowest Adam, in place of `descend`."""

    def __init__(self) -> None:
        self.optimizers: dict[int, torch.optim.Adam] = {}

    def __call__(self, loss: Tensor, optimizer: torch.optim.Adam, *, moves: bool = True) -> Tensor:
        assert moves
        if id(optimizer) not in self.optimizers:
            rate = optimizer.param_groups[0]["lr"]
            plain = torch.optim.Adam(parameters_of(optimizer), lr=rate, foreach=False, fused=False)
            self.optimizers[id(optimizer)] = plain
        plain = self.optimizers[id(optimizer)]
        plain.zero_grad()
        loss.backward()
        plain.step()
        return torch.zeros(())


def updated(agent: Any, batches: list[Batch], descend: PlainLoop | None = None) -> dict[str, Tensor]:
    """Weights after the batches, by name."""
    with pytest.MonkeyPatch.context() as patch:
        if descend is not None:
            for module in (ddpg, td3, sac, d4pg):
                patch.setattr(module, "descend", descend)
        for batch in batches:
            agent.update(batch)
    parts = {name: getattr(agent, name) for name in agent.PARTS}
    networks = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    return {f"{name}.{key}": t.clone() for name, part in networks.items() for key, t in part.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], plain: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    wrong = {name: float((ours[name] - plain[name]).abs().max()) for name in ours}
    # 1e-6 but for numbers whose gradients are mere rounding: Adam divides by their size, so processors differ there
    assert {name: most for name, most in wrong.items() if most > 3e-6} == {}
    assert sum(most > 1e-6 for most in wrong.values()) <= 2
    moved = [name for name in ours if "target" not in name and not torch.equal(ours[name], before[name])]
    assert any(name.startswith("policy") for name in moved)
    assert any(name.startswith("critic") for name in moved)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", AGENTS)
def test_ten_updates_on_structures(name: str, network: str) -> None:
    if network == "tensor_field":
        pytest.importorskip("e3nn")
    trainer = _trainer(name, network)
    batches = [trainer._sampled() for _ in range(N_UPDATES)]

    def agent() -> Any:
        return make_agent(trainer.settings, torch.Generator().manual_seed(5), trainer.penalties)

    assert_equal(updated(agent(), batches), updated(agent(), batches, PlainLoop()), updated(agent(), []))


def _trainer(name: str, network: str) -> RelaxTrainer:
    """Its replay holds a few steps of small alloys."""
    settings = RelaxRunSettings.read(
        {
            "task": "relax", "agent": name, "structures": "alloys:Al-Cu-Ni:2-4", "n_pooled": 40, "n_structures": 8,
            "channels": 8, "cutoff_angstrom": 3.5, "batch_size": 8, "warmup_steps": 24, "replay_capacity": 200,
            "updates_per_round": 0, "policy_learning_rate": 1e-3, "critic_learning_rate": 1e-3,
            **(SUPPORT if name == "d4pg" else {}), **NETWORKS[network],
        }
    )  # fmt: skip
    trainer = RelaxTrainer(settings, relax_task(settings))
    for _ in range(4):
        trainer.advance()
    return trainer


@pytest.mark.parametrize("name", AGENTS)
def test_ten_updates_on_vectors(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(16, 3, generator=generator) for _ in range(2 * N_UPDATES)]
    batches = [
        Batch(seen, after[:, :2].tanh(), after[:, 2], torch.full((16,), 0.9), after)
        for seen, after in zip(draw[::2], draw[1::2], strict=True)
    ]
    values = AGENT_SETTINGS[name].read({"policy_learning_rate": 1e-3, **(SUPPORT if name == "d4pg" else {})})

    def agent() -> Any:
        domain = BoxActions([-1.0, -1.0], [1.0, 1.0])
        return vector_agent(3, domain, torch.Generator().manual_seed(5), values, VectorNetworkSettings(widths=(16, 16)))

    assert_equal(updated(agent(), batches), updated(agent(), batches, PlainLoop()), updated(agent(), []))
