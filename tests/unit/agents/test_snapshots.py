"""Snapshots: exact to the bit, complete, and refused in words when they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relaxion.errors import RestartError
from relaxion.train.agents import AGENT_SETTINGS, TD3Settings, vector_agent
from relaxion.train.agents.vector_networks import BoxActions, VectorNetworkSettings
from relaxion.train.experience.vectors import Batch


def make_agent(name: str, seed: int = 0, widths: tuple[int, ...] = (8, 8)) -> Any:
    box = BoxActions([-1.0, 0.0], [1.0, 5.0])
    generator = torch.Generator().manual_seed(seed)
    return vector_agent(3, box, generator, AGENT_SETTINGS[name](), VectorNetworkSettings(widths=widths))


@pytest.fixture
def make_batch(generator: torch.Generator) -> Callable[[], Batch]:
    def make() -> Batch:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        return Batch(draw(16, 3), draw(16, 2), draw(16), torch.full((16,), 0.9), draw(16, 3))

    return make


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("name", AGENT_SETTINGS)
@pytest.mark.parametrize("updates_before", [0, 1, 4])
def test_restored_agent_goes_on_bit_for_bit(name: str, updates_before: int, make_batch: Callable[[], Batch]) -> None:
    """An odd number of updates before: TD3's counter matters. None: Adam has no memory yet."""
    straight, resumed = make_agent(name), make_agent(name, seed=99)
    for _ in range(3):
        resumed.update(make_batch())  # whatever it learned before must not shine through
    for _ in range(updates_before):
        straight.update(make_batch())
    resumed.restore(straight.snapshot())
    for batch in [make_batch() for _ in range(5)]:
        ours, theirs = straight.update(batch), resumed.update(batch)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert_equal(straight.snapshot(), resumed.snapshot())


@pytest.mark.parametrize("name", AGENT_SETTINGS)
def test_a_snapshot_is_a_copy_without_gradient(name: str, make_batch: Callable[[], Batch]) -> None:
    agent = make_agent(name)
    snapshot = agent.snapshot()
    kept = {key: tensor.clone() for key, tensor in snapshot.items()}
    agent.update(make_batch())
    agent.update(make_batch())
    assert_equal(snapshot, kept)
    agent.restore(snapshot)
    agent.update(make_batch())
    assert_equal(snapshot, kept)
    assert not any(tensor.requires_grad for tensor in snapshot.values())


def test_a_snapshot_names_all_that_changes(make_batch: Callable[[], Batch]) -> None:
    names = {key.split(".")[0] for key in make_agent("sac").snapshot()}
    assert names == {
        "policy", "critics", "target_critics", "log_entropy_weight", "policy_optimizer", "critic_optimizer",
        "entropy_optimizer", "n_updates", "generator",
    }  # fmt: skip
    agent = make_agent("td3")
    before = agent.snapshot()
    agent.update(make_batch())
    agent.update(make_batch())
    after = agent.snapshot()
    constant = {key for key in before if torch.equal(before[key], after[key])}
    assert {key.split(".")[-1] for key in constant} == {"centre", "half_range"}


def test_adams_memory_has_the_names_of_older_checkpoints(make_batch: Callable[[], Batch]) -> None:
    """torch counts steps for each parameter; checkpoints have one count, running means and squares by number."""
    agent, other = make_agent("td3"), make_agent("td3", seed=5)
    agent.update(make_batch())
    snapshot = agent.snapshot()
    memory = {name.removeprefix("critic_optimizer."): t for name, t in snapshot.items() if "critic_optimizer" in name}
    numbers = range(len(list(agent.critics.parameters())))
    assert list(memory) == ["n_steps", *(f"{kind}.{n}" for n in numbers for kind in ("means", "squares"))]
    assert memory["n_steps"] == 1
    assert memory["n_steps"].shape == ()
    assert memory["n_steps"].dtype == torch.float32
    other.restore(snapshot)
    assert {float(state["step"]) for state in other.critic_optimizer.state.values()} == {1.0}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop("critics.layers.weight_0"), "'critics.layers.weight_0' is missing"),
        (lambda s: s.pop("policy_optimizer.means.1"), "'policy_optimizer.means.1' is missing"),
        (lambda s: s.update(stranger=torch.zeros(1)), "'stranger' belongs to no part"),
        (lambda s: s.update(n_updates=torch.zeros(2, dtype=torch.int64)), r"'n_updates' is \(2,\)"),
        (lambda s: s.update(n_updates=torch.zeros(())), "float32 instead of .* torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(spoil: Callable[[dict], None], words: str) -> None:
    agent, other = make_agent("td3"), make_agent("td3", seed=5)
    before, foreign = agent.snapshot(), other.snapshot()
    spoil(foreign)
    with pytest.raises(RestartError, match=words):
        agent.restore(foreign)
    assert_equal(agent.snapshot(), before)


def test_snapshots_of_other_sizes_and_algorithms_are_refused() -> None:
    with pytest.raises(RestartError, match=r"\(1, 3, 4\).* instead of \(1, 3, 8\)"):
        make_agent("td3").restore(make_agent("td3", widths=(4, 8)).snapshot())
    with pytest.raises(RestartError, match=r"and \d+ more. Was it made by another algorithm"):
        make_agent("td3").restore(make_agent("sac").snapshot())


def test_the_schedules_value_is_not_the_agents_to_keep() -> None:
    agent = make_agent("td3")
    assert "exploration_scale" not in agent.snapshot()
    assert TD3Settings().exploration_noise == 0.1
