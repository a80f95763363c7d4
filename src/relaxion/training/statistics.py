"""Numbers that build up between two lines of the log: episodes under way, and means of what updates report."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RECENT_EPISODES = 100  # as in Stable-Baselines3
COUNTERS = ("train/n_updates",)  # not averaged: the trainer writes its own count


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    rewards: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.rewards)

    def discounted_returns(self, discount_factor: float) -> Tensor:
        """The return from each of its steps to its end, (n_steps,)."""
        value, returns = 0.0, []
        for reward in reversed(self.rewards):
            value = reward + discount_factor * value
            returns.append(value)
        return torch.tensor(returns[::-1], dtype=torch.float64)


class Episodes:
    """Rewards of the episodes under way, and how the recent ones went."""

    def __init__(self, n_environments: int) -> None:
        self.finished = 0
        self.under_way: list[list[float]] = [[] for _ in range(n_environments)]
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)

    def add(self, rewards: Tensor, ended: Tensor) -> list[Episode]:
        """One step of every environment; the episodes that ended with it."""
        finished = []
        for number, (reward, over) in enumerate(zip(rewards.tolist(), ended.tolist(), strict=True)):
            self.under_way[number].append(reward)
            if over:
                finished.append(Episode(tuple(self.under_way[number])))
                self.under_way[number] = []
        self._recent.extend((episode.total, len(episode.rewards)) for episode in finished)
        self.finished += len(finished)
        return finished

    def metrics(self) -> dict[str, float]:
        """Under the names of Stable-Baselines3; no means before the first episode has ended."""
        counts = {"time/episodes": float(self.finished)}
        if not self._recent:
            return counts
        returns, lengths = zip(*self._recent, strict=True)
        means = {
            "rollout/ep_rew_mean": sum(returns) / len(returns),
            "rollout/ep_len_mean": sum(lengths) / len(lengths),
        }
        return counts | means

    def snapshot(self) -> dict[str, Tensor]:
        return {
            "finished": torch.tensor(self.finished),
            "recent": torch.tensor(list(self._recent), dtype=torch.float64).reshape(-1, 2),  # return, length
            "lengths": torch.tensor([len(rewards) for rewards in self.under_way]),
            "rewards": torch.tensor([r for rewards in self.under_way for r in rewards], dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.finished = int(tensors["finished"])
        self._recent = deque(((total, int(length)) for total, length in tensors["recent"].tolist()), RECENT_EPISODES)
        rewards = iter(tensors["rewards"].tolist())
        self.under_way = [[next(rewards) for _ in range(int(length))] for length in tensors["lengths"]]


class MetricMeans:
    """Means of the updates' metrics, summed as tensors so that no update waits for a number to be read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            if name in COUNTERS:
                continue
            if name in self._sums:
                self._sums[name] += value
                self._counts[name] += 1
            else:
                self._sums[name], self._counts[name] = value.to(torch.float64, copy=True), 1

    def add_numbers(self, metrics: Mapping[str, float]) -> None:
        """The same for plain numbers."""
        self.add({name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()})

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {name: float(total) / self._counts[name] for name, total in sorted(self._sums.items())}
        self._sums, self._counts = {}, {}
        return means

    def snapshot(self) -> dict[str, Tensor]:
        """Sum and count under each name."""
        return {
            name: torch.stack([total, torch.tensor(float(self._counts[name]), dtype=torch.float64)])
            for name, total in self._sums.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._sums = {name: pair[0].clone() for name, pair in tensors.items()}
        self._counts = {name: int(pair[1]) for name, pair in tensors.items()}
