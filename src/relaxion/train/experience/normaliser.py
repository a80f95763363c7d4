"""Running mean and variance of observations. Observations are stored raw and normalised when they are used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8
LARGEST = 10.0


class Normaliser:
    """(x - mean) / √max(variance, 1e-8), cut to ±10, with the statistics of all observations so far (R3.1).

    Switched off, it counts on but leaves observations as they are. It belongs to the policy: save both or neither.
    """

    def __init__(self, size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.count = torch.zeros((), dtype=torch.int64)
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.variance = torch.ones(size, dtype=torch.float64)  # population variance; 1 until something was seen

    def update(self, observations: Tensor) -> None:
        """Take in raw observations (n, size), by Chan's rule for joining two sets."""
        new = observations.to(torch.float64)
        n_old, n_new = int(self.count), len(new)
        total = n_old + n_new
        away = new.mean(dim=0) - self.mean
        squares = self.variance * n_old + new.var(dim=0, correction=0) * n_new + away**2 * (n_old * n_new / total)
        self.mean = self.mean + away * (n_new / total)
        self.variance = squares / total
        self.count = self.count + n_new

    def __call__(self, observations: Tensor) -> Tensor:
        if not self.enabled:
            return observations
        kind = observations.dtype
        deviation = self.variance.clamp(min=VARIANCE_FLOOR).sqrt().to(kind)
        return (observations - self.mean.to(kind)).div_(deviation).clamp_(-LARGEST, LARGEST)

    def snapshot(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `snapshot`; a KeyError or ValueError when the tensors are not those of this size."""
        if tensors["mean"].shape != self.mean.shape:
            raise ValueError(f"normaliser of {len(tensors['mean'])} numbers, expected {len(self.mean)}")
        self.count, self.mean, self.variance = (tensors[name].clone() for name in ("count", "mean", "variance"))
