"""The ring, n-step windows against a table by hand and a slow obvious version, and draws without replacement (R1.3)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.train.experience.vectors import Normaliser, VectorReplay, draw_without_replacement

GO, END, LIMIT = "go", "termination", "time limit"


def make_replay(capacity: int = 5, **options: Any) -> VectorReplay:
    return VectorReplay(capacity, 1, 1, generator=torch.Generator().manual_seed(0), discount_factor=0.5, **options)


def add(replay: VectorReplay, numbers: list[int], kinds: list[str]) -> None:
    """Transition number k: observation k, action -k, reward 2ᵏ, next observation k + ½."""
    column = torch.tensor(numbers, dtype=torch.float32)[:, None]
    replay.add(
        column,
        -column,
        2.0 ** column[:, 0],
        column + 0.5,
        torch.tensor([kind == END for kind in kinds]),
        torch.tensor([kind == LIMIT for kind in kinds]),
    )


def filled(kinds: list[str], capacity: int = 5, n_steps: int = 3) -> VectorReplay:
    replay = make_replay(capacity, n_steps=n_steps)
    for number, kind in enumerate(kinds):
        add(replay, [number], [kind])
    return replay


def slow(kinds: list[str], first: int, n_steps: int) -> tuple[float, float, float]:
    """Reward, discount and next observation of the window from transition `first`, word by word."""
    reward, discount, number = 0.0, 1.0, first
    while True:
        reward += discount * 2.0**number
        discount *= 0.5
        if kinds[number] == END:
            return reward, 0.0, number + 0.5
        last = kinds[number] == LIMIT or number == len(kinds) - 1 or number - first == n_steps - 1
        if last:
            return reward, discount, number + 0.5
        number += 1


def row(batch: Any, number: int) -> tuple[float, float, float]:
    return float(batch.rewards[number]), float(batch.discounts[number]), float(batch.next_observations[number, 0])


# γ = 0.5, n = 3, rewards 1, 2, 4, 8, …: window from transition 0 -> (Σ γᵏ r, γ^(steps used) or 0, next observation)
BY_HAND = [
    ([GO, GO, GO, GO], (3.0, 0.125, 2.5)),  # 1 + 1 + 1, three steps
    ([END, GO, GO, GO], (1.0, 0.0, 0.5)),
    ([LIMIT, GO, GO, GO], (1.0, 0.5, 0.5)),  # a time limit bootstraps, with the one step really used
    ([GO, END, GO, GO], (2.0, 0.0, 1.5)),
    ([GO, LIMIT, GO, GO], (2.0, 0.25, 1.5)),
    ([GO, GO, END, GO], (3.0, 0.0, 2.5)),
    ([GO, GO, LIMIT, GO], (3.0, 0.125, 2.5)),
    ([GO], (1.0, 0.5, 0.5)),  # the write head comes first
    ([GO, GO], (2.0, 0.25, 1.5)),
    ([GO, END], (2.0, 0.0, 1.5)),
    ([GO, LIMIT], (2.0, 0.25, 1.5)),
]


@pytest.mark.parametrize(("kinds", "expected"), BY_HAND)
def test_windows_by_hand(kinds: list[str], expected: tuple[float, float, float]) -> None:
    assert row(filled(kinds).assemble(torch.tensor([0])), 0) == expected


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 6])
def test_windows_equal_the_slow_version_for_every_history(length: int, n_steps: int) -> None:
    """Every combination of going on, termination and time limit, before and after the ring of 4 is full."""
    capacity = 4
    for kinds in product((GO, END, LIMIT), repeat=length):
        replay = filled(list(kinds), capacity, n_steps)
        stored = range(max(0, length - capacity), length)
        batch = replay.assemble(torch.tensor([number % capacity for number in stored]))
        for place, number in enumerate(stored):
            assert float(batch.observations[place, 0]) == number
            assert float(batch.actions[place, 0]) == -number
            assert row(batch, place) == slow(list(kinds), number, n_steps), (kinds, number)


def test_two_environments_never_share_a_window() -> None:
    replay = make_replay(6, n_steps=2, n_environments=2)
    for step in range(4):  # environment a has numbers 0, 2, 4, 6, environment b 1, 3, 5, 7; 0 and 1 are overwritten
        add(replay, [2 * step, 2 * step + 1], [GO, END if step == 2 else GO])
    batch = replay.assemble(torch.tensor([2, 3, 4, 5, 0, 1]))
    assert batch.observations[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.next_observations[:, 0].tolist() == [4.5, 5.5, 6.5, 5.5, 6.5, 7.5]
    assert batch.rewards.tolist() == [4 + 8, 8 + 16, 16 + 32, 32, 64, 128]
    assert batch.discounts.tolist() == [0.25, 0.0, 0.25, 0.0, 0.5, 0.5]


def test_newest_replaces_oldest() -> None:
    replay = filled([GO] * 7, capacity=5)
    assert len(replay) == 5
    assert replay.observations[:, 0].tolist() == [5, 6, 2, 3, 4]


def test_batches_hold_different_transitions() -> None:
    replay = filled([GO] * 5, capacity=5, n_steps=1)
    for _ in range(20):
        assert sorted(replay.sample(5).observations[:, 0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "count"), [(10, 10), (12, 3), (13, 3), (1000, 200), (100_000, 256)])
def test_draws_are_different_and_in_range(size: int, count: int, generator: torch.Generator) -> None:
    for _ in range(50):
        drawn = draw_without_replacement(size, count, generator)
        assert len(drawn.unique()) == count == len(drawn)
        assert 0 <= int(drawn.min()) <= int(drawn.max()) < size


@pytest.mark.parametrize("size", [4, 16])  # by permutation, and by crossing out repeats
def test_every_pair_is_equally_likely(size: int, generator: torch.Generator) -> None:
    counts = torch.zeros(size, size)
    n_draws = 100 * size * size
    for _ in range(n_draws):
        first, second = draw_without_replacement(size, 2, generator).tolist()
        counts[first, second] += 1
    expected = n_draws / (size * (size - 1))
    away = counts[~torch.eye(size, dtype=torch.bool)] - expected
    chi_squared = float((away**2 / expected).sum())
    degrees = size * (size - 1) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5
    assert counts.diagonal().sum() == 0


def test_more_than_stored_is_refused() -> None:
    with pytest.raises(SettingsError, match="4 different transitions were asked for, the replay holds 3"):
        filled([GO] * 3).sample(4)


def test_uneven_share_is_refused() -> None:
    with pytest.raises(SettingsError, match="5 rows cannot be shared by 2"):
        make_replay(5, n_environments=2)


def test_observations_are_raw_inside_and_normalised_outside() -> None:
    replay = filled([GO] * 4, n_steps=1)
    normaliser = Normaliser(1)
    normaliser.update(torch.tensor([[0.0], [4.0]]))  # mean 2, variance 4
    batch = replay.assemble(torch.arange(4), normaliser)
    assert batch.observations[:, 0].tolist() == [-1.0, -0.5, 0.0, 0.5]
    assert batch.next_observations[:, 0].tolist() == [-0.75, -0.25, 0.25, 0.75]
    assert replay.observations[:4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("length", [3, 7])
def test_restored_replay_goes_on_alike(length: int) -> None:
    kinds = [GO, END, GO, LIMIT, GO, GO, END]
    replay, copy = filled(kinds[:length]), make_replay(n_steps=3)
    copy.restore(replay.snapshot())
    copy.generator.set_state(replay.generator.get_state())
    for one in (replay, copy):
        add(one, [length], [GO])
    first, second = replay.sample(3), copy.sample(3)
    for name in vars(first):
        assert name == "sources" or torch.equal(getattr(first, name), getattr(second, name)), name


def test_foreign_snapshot_is_refused() -> None:
    tensors: dict[str, Tensor] = filled([GO] * 3).snapshot()
    with pytest.raises(ValueError, match="observations"):
        make_replay(2).restore(tensors)
