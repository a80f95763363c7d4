"""Numbers between two lines of the log, also across a stop."""

from __future__ import annotations

import pytest
import torch

from relaxion.train.tasks.progress import Episodes, ScalarMeans, discounted_returns


def test_episodes_of_two_environments() -> None:
    episodes = Episodes(2)
    assert episodes.scalars() == {"time/episodes": 0}
    episodes.add(torch.tensor([1.0, 10.0]), torch.tensor([False, True]))
    copy = Episodes(2)
    copy.restore(episodes.snapshot())
    for one in (episodes, copy):
        finished = one.add(torch.tensor([2.0, 20.0]), torch.tensor([True, False]))
        assert finished == [[1.0, 2.0]]
        assert one.scalars() == {"time/episodes": 2, "rollout/ep_rew_mean": 6.5, "rollout/ep_len_mean": 1.5}


def test_only_recent_episodes_count() -> None:
    episodes = Episodes(1)
    for number in range(150):
        episodes.add(torch.tensor([float(number)]), torch.tensor([True]))
    assert episodes.scalars() == {"time/episodes": 150, "rollout/ep_rew_mean": 99.5, "rollout/ep_len_mean": 1.0}


def test_discounted_returns() -> None:
    assert discounted_returns((1.0, 2.0, 4.0), 0.5).tolist() == [3.0, 4.0, 4.0]


def test_means_are_exact_across_a_stop() -> None:
    straight, first, second = ScalarMeans(), ScalarMeans(), ScalarMeans()
    values = torch.rand(20, generator=torch.Generator().manual_seed(0))
    for number, value in enumerate(values):
        metrics = {"train/critic_loss": value, "train/n_updates": torch.tensor(number)}
        metrics |= {"train/actor_loss": value * 3} if number % 2 else {}
        straight.add(metrics)
        (first if number < 7 else second).add(metrics)
        if number == 6:
            second.restore(first.snapshot())
    means = straight.take()
    assert means == second.take()
    assert means["train/critic_loss"] == pytest.approx(float(values.double().mean()))
    assert means["train/actor_loss"] == pytest.approx(3 * float(values[1::2].double().mean()))
    assert "train/n_updates" not in means
    assert straight.take() == {}


def test_values_that_change_afterwards_are_not_followed() -> None:
    means, value = ScalarMeans(), torch.tensor(1.0, dtype=torch.float64)
    means.add({"x": value})
    value += 5
    assert means.take() == {"x": 1.0}
