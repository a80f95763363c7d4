"""Learning on the job: over many similar structures the metric goes on learning from what their relaxations showed.

No force call is made for it. Every point of a relaxation, with its end, is a secant: B·(x_end - x) ≈ F - F_end. After
each relaxation a copy of the policy's metric takes a few steps of Adam on the secants seen so far; the bundle never
changes, and the guard watches the adapted metric as it watches any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from pydantic import Field

from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.teacher import Lessons, Teacher, TeachingSettings
from relaxion.optimize.learned import states_at
from relaxion.optimize.point import Point
from relaxion.settings import Settings

logger = logging.getLogger(__name__)


class AdaptationSettings(Settings):
    """How fast, and from how much."""

    n_updates: int = Field(default=12, ge=1)
    """After each relaxation; a few tenths of a second for small cells."""

    n_lessons: int = Field(default=24, ge=1)
    """Secants per update, half of them from the newest relaxation."""

    n_kept: int = Field(default=400, ge=1)
    """Secants remembered; the newest replace the oldest."""

    learning_rate: float = Field(default=5e-4, gt=0)
    """Of Adam: a sixth of the training's, for the weights are good already."""

    largest_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened."""

    farthest_angstrom: float = Field(default=1.0, gt=0)
    """Points with an atom farther from the end teach nothing."""

    shortest_angstrom: float = Field(default=5e-3, gt=0)
    """Nor do points at the end."""

    largest_n_atoms: int = Field(default=400, ge=1)
    """Larger structures are not learned from: an update would cost seconds."""


class Adaptation:
    """`network` for the next relaxation, `learn` after it. Relaxers of similar structures share one object."""

    def __init__(self, network: MetricNetwork, settings: AdaptationSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or AdaptationSettings()
        self.network = deepcopy(network).requires_grad_(True)
        self.n_relaxations = 0
        self._secants: list[Lessons] = []  # one each
        self._generator = torch.Generator().manual_seed(seed)
        rate = self.settings.learning_rate
        self._teacher = Teacher(
            self.network,
            TeachingSettings(
                lesson_learning_rate=rate,
                lesson_learning_rate_final=rate,
                lesson_largest_gradient_norm=self.settings.largest_gradient_norm,
            ),
        )

    @property
    def n_secants(self) -> int:
        return len(self._secants)

    def learn(self, points: Sequence[Point]) -> int:
        """From the points of one relaxation, its end last; how many of them taught something."""
        new = self._taken_from(points)
        if not new:
            return 0
        self._secants = [*self._secants, *new][-self.settings.n_kept :]
        self.n_relaxations += 1
        before = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        for _ in range(self.settings.n_updates):
            self._update(len(new))
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.network.parameters()):
            logger.warning("adaptation gave weights that are no numbers; what it learned last is forgotten")
            self.network.load_state_dict(before)
        return len(new)

    def _taken_from(self, points: Sequence[Point]) -> list[Lessons]:
        usable = [point for point in points if point.geometry is not None and point.finite]
        if len(usable) < 2 or usable[-1].geometry.n_atoms > self.settings.largest_n_atoms:  # pyright: ignore[reportOptionalMemberAccess]
            return []
        *visited, end = [states_at([point]) for point in usable]
        secants = []
        for state in visited:
            if not np.array_equal(state.structures.atomic_numbers.numpy(), end.structures.atomic_numbers.numpy()):
                continue  # somebody exchanged the atoms under way
            secant = Lessons.between(state, end, self.settings.farthest_angstrom)
            if secant is not None and self._length(secant) > self.settings.shortest_angstrom:
                secants.append(secant)
        return secants

    @staticmethod
    def _length(secant: Lessons) -> float:
        return float(secant.goal.largest_displacements(secant.state.structures).max())

    def _update(self, n_new: int) -> None:
        half, number = self.settings.n_lessons // 2, len(self._secants)
        newest = torch.randint(number - n_new, number, (half,), generator=self._generator) if n_new else []
        anyone = torch.randint(number, (self.settings.n_lessons - half,), generator=self._generator)
        chosen = [self._secants[place] for place in [*map(int, newest), *map(int, anyone)]]
        self._teacher.update(Lessons.concatenate(chosen))
