"""Every agent updates with a stiffness policy as its actor."""

from __future__ import annotations

import pytest
import torch
from ase import Atoms
from ase.build import bulk

import relaxion
from relaxion.model.atom_policies import StiffnessActions, StiffnessGaussianPolicy, StiffnessPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.structures import Structures
from relaxion.train.agents.atom_critics import AtomCategoricalCritic, AtomCritics
from relaxion.train.agents.d4pg import D4PG, D4PGSettings
from relaxion.train.agents.ddpg import DDPG
from relaxion.train.agents.sac import SAC
from relaxion.train.agents.shared import Agent
from relaxion.train.agents.td3 import TD3
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings
from relaxion.train.experience.vectors import Batch

ACTIONS = StiffnessActions(0.5, 0.1)
CRITIC = AtomNetworkSettings(channels=4)


@pytest.fixture(scope="module")
def environment() -> Environment:
    pool = Structures.from_ase(
        [bulk("Al", cubic=True), bulk("Cu", cubic=True), Atoms("Cu2", [[0, 0, 0], [2.4, 0, 0]])],
        cell_free=[True, False, False],
    )
    starts = PerturbedStarts(pool, [perturbation("rattle:0.1")])
    return Environment(relaxion.potential("emt"), starts, EnvironmentSettings(n_structures=6))


@pytest.fixture(scope="module")
def batch(environment: Environment) -> Batch:
    generator = torch.Generator().manual_seed(0)
    state = environment.reset(generator)
    step = environment.step(state, ACTIONS.random(state, generator))
    return Batch(step.state, step.executed, step.reward.float(), step.discount.float(), step.next_state)


def make_agent(name: str, names: tuple[str, ...]) -> Agent:
    generator = torch.Generator().manual_seed(1)
    settings = StiffnessSettings(channels=4, n_hidden=4, n_layers=1, cutoff_angstrom=4.0, environment_information=names)
    if name == "sac":
        return SAC(
            StiffnessGaussianPolicy(ACTIONS, settings, generator), AtomCritics(CRITIC, 2, generator), ACTIONS, generator
        )
    policy = StiffnessPolicy(ACTIONS, settings, generator)
    if name == "d4pg":
        critic = AtomCategoricalCritic(CRITIC, 11, generator)
        return D4PG(policy, critic, ACTIONS, D4PGSettings(n_bins=11, lowest_value=-5, highest_value=5))
    critics = AtomCritics(CRITIC, 2, generator)
    return TD3(policy, critics, ACTIONS, generator) if name == "td3" else DDPG(policy, critics, ACTIONS)


@pytest.mark.parametrize("names", [(), ("log_largest_force", "log_calls")], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ["td3", "sac", "ddpg", "d4pg"])
def test_an_update(name: str, names: tuple[str, ...], batch: Batch, environment: Environment) -> None:
    agent = make_agent(name, names)
    before = agent.snapshot()
    for _ in range(2):  # TD3 moves its policy every second time
        metrics = agent.update(batch)
        assert all(bool(torch.isfinite(value)) for value in metrics.values()), metrics
    assert float(metrics["train/policy_gradient_norm"]) > 0
    after = agent.snapshot()
    # the whole of the policy learns: springs, and where there is one, the gate
    for part in ["network.to_springs", *(["gate"] if names else [])]:
        assert any(f".{part}" in key and not torch.equal(before[key], after[key]) for key in before), part
    generator = torch.Generator().manual_seed(2)
    for move in (agent.act(batch.observations), agent.explore(batch.observations, generator)):
        outcome = environment.step(batch.observations, move)
        assert bool(torch.isfinite(outcome.reward).all())
