"""Learning on the job: over many similar structures the metric goes on learning from what their relaxations showed.

No force call is made for it. Every point of a relaxation, with its end, is a secant: B·(x_end - x) ≈ F - F_end. After
each relaxation a copy of the policy's metric takes a few steps of Adam on the secants seen so far; the bundle never
changes, and the guard watches the adapted metric as it watches any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from relaxion.networks.metric.lessons import Lessons, relative_errors, way_to
from relaxion.networks.metric.network import MetricNetwork, pulls_of
from relaxion.networks.metric.stiffness import Unknowns
from relaxion.optimize.learned import states_at
from relaxion.optimize.point import Point
from relaxion.settings import Settings
from relaxion.structures import Move, State

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


@dataclass(frozen=True, eq=False)
class Secant:
    """One point, the way to the end of its relaxation, and what still pulled there."""

    state: State
    goal: Move
    left_over: Unknowns


class Adaptation:
    """`network` for the next relaxation, `learn` after it. Relaxers of similar structures share one object."""

    def __init__(self, network: MetricNetwork, settings: AdaptationSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or AdaptationSettings()
        self.network = deepcopy(network).requires_grad_(True)
        self.n_relaxations = 0
        self._secants: list[Secant] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=self.settings.learning_rate)

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

    def _taken_from(self, points: Sequence[Point]) -> list[Secant]:
        usable = [point for point in points if point.geometry is not None and point.finite]
        if len(usable) < 2 or usable[-1].geometry.n_atoms > self.settings.largest_n_atoms:  # pyright: ignore[reportOptionalMemberAccess]
            return []
        *visited, end = [states_at([point]) for point in usable]
        left_over = pulls_of(end)
        secants = []
        for state in visited:
            if not np.array_equal(state.structures.atomic_numbers.numpy(), end.structures.atomic_numbers.numpy()):
                continue  # somebody exchanged the atoms under way
            goal = way_to(end.structures, state.structures)
            length = float(goal.largest_displacements(state.structures).max())
            if self.settings.shortest_angstrom < length < self.settings.farthest_angstrom:
                secants.append(Secant(state, goal, left_over))
        return secants

    def _update(self, n_new: int) -> None:
        half, number = self.settings.n_lessons // 2, len(self._secants)
        newest = torch.randint(number - n_new, number, (half,), generator=self._generator) if n_new else []
        anyone = torch.randint(number, (self.settings.n_lessons - half,), generator=self._generator)
        chosen = [self._secants[place] for place in [*map(int, newest), *map(int, anyone)]]
        lessons = Lessons(State.concatenate([s.state for s in chosen]), Move.concatenate([s.goal for s in chosen]))
        left_over = Unknowns(
            torch.cat([s.left_over.atoms for s in chosen]), torch.cat([s.left_over.cells for s in chosen])
        )
        self._optimizer.zero_grad()
        with torch.enable_grad():
            relative_errors(self.network, lessons, left_over).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.largest_gradient_norm)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
