"""Every agent updates on states and moves from a small environment, with either backbone."""

from __future__ import annotations

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms

import relaxion
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
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

ACTIONS = MoveActions(0.5, 0.1)


@pytest.fixture(scope="module")
def environment() -> Environment:
    slab = bulk("Cu", cubic=True)
    slab.set_constraint(FixAtoms([0]))
    pool = Structures.from_ase(
        [bulk("Al", cubic=True), slab, Atoms("Cu2", [[0, 0, 0], [2.4, 0, 0]])], cell_free=[True, False, False]
    )
    starts = PerturbedStarts(pool, [perturbation("rattle:0.1")])
    return Environment(relaxion.potential("emt"), starts, EnvironmentSettings(n_structures=6))


@pytest.fixture(scope="module")
def batch(environment: Environment) -> Batch:
    generator = torch.Generator().manual_seed(0)
    state = environment.reset(generator)
    state = environment.step(state, ACTIONS.random(state, generator)).next_state
    transition = environment.step(state, ACTIONS.random(state, generator))
    return Batch(
        transition.state,
        transition.executed,
        transition.reward.float(),
        transition.discount.float(),
        transition.next_state,
    )


def make_agent(name: str, settings: AtomNetworkSettings, dtype: torch.dtype) -> Agent:
    generator = torch.Generator().manual_seed(1)
    if name == "sac":
        networks = AtomGaussianPolicy(ACTIONS, settings, generator), AtomCritics(settings, 2, generator)
        return SAC(*[n.to(dtype) for n in networks], ACTIONS, generator)  # pyright: ignore
    policy = AtomPolicy(ACTIONS, settings, generator).to(dtype)
    if name == "d4pg":
        critic = AtomCategoricalCritic(settings, 11, generator).to(dtype)
        return D4PG(policy, critic, ACTIONS, D4PGSettings(n_bins=11, lowest_value=-5, highest_value=5))
    critics = AtomCritics(settings, 2, generator).to(dtype)
    return TD3(policy, critics, ACTIONS, generator) if name == "td3" else DDPG(policy, critics, ACTIONS)


@pytest.mark.parametrize("informed", [False, True])
@pytest.mark.parametrize("backbone", ["light", "tensor_field"])
@pytest.mark.parametrize("name", ["td3", "sac", "ddpg", "d4pg"])
def test_an_update_on_structures(
    name: str, backbone: str, informed: bool, batch: Batch, environment: Environment
) -> None:
    names = ("log_largest_force", "log_calls") if informed else ()
    settings = AtomNetworkSettings.read({"backbone": backbone, "channels": 4, "environment_information": names})
    agent = make_agent(name, settings, torch.float32)
    before = agent.snapshot()
    for _ in range(2):  # TD3 moves its policy every second time
        metrics = agent.update(batch)
        assert all(bool(torch.isfinite(value)) for value in metrics.values()), metrics
    assert float(metrics["train/policy_gradient_norm"]) > 0
    assert float(metrics["train/critic_gradient_norm"]) > 0
    after = agent.snapshot()
    for part in ("policy", "critic"):
        assert any(key.startswith(part) and not torch.equal(before[key], after[key]) for key in before)
    generator = torch.Generator().manual_seed(2)
    for move in (agent.act(batch.observations), agent.explore(batch.observations, generator)):
        outcome = environment.step(batch.observations, move)
        assert bool(torch.isfinite(outcome.reward).all())


def test_an_update_repeats_bit_for_bit_from_a_snapshot(batch: Batch) -> None:
    settings = AtomNetworkSettings(channels=4)
    one, two = make_agent("td3", settings, torch.float32), make_agent("td3", settings, torch.float32)
    one.update(batch)
    two.restore(one.snapshot())
    for agent in (one, two):
        agent.update(batch)
    first, second = one.snapshot(), two.snapshot()
    assert all(torch.equal(first[key], second[key]) for key in first)
