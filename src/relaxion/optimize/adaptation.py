"""Learning on the job: over many similar structures the metric goes on learning from what their relaxations showed.

No force call is made for it, the bundle never changes, and the guard watches the adapted metric as it watches any
other. The teacher and the check are those of `relaxion learn` (`study.py`): relaxations held out decide whether what
was learned is used, so that it does not harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from relaxion.memory.trajectory import Trajectory
from relaxion.networks.metric.network import MetricNetwork
from relaxion.optimize.examples import Examples, examples_of
from relaxion.optimize.point import Point
from relaxion.optimize.study import Study, StudySettings
from relaxion.structures import Outcome


class AdaptationSettings(StudySettings):
    """How often, and from how much."""

    relaxations_per_study: int = Field(default=5, ge=1)
    """A study follows so many finished relaxations."""

    n_updates: int = Field(default=20, ge=1)
    """Of one study: about a third of a second for each relaxation with small cells."""

    least_apart: int = Field(default=2, ge=2)
    """Rows may be short."""


class Adaptation:
    """`network` for the next relaxation, `learn` after it. Relaxers of similar structures share one object."""

    def __init__(self, network: MetricNetwork, settings: AdaptationSettings | None = None, seed: int = 0) -> None:
        self.settings = settings or AdaptationSettings()
        self.study = Study(network, self.settings, seed)
        self.n_relaxations = 0

    @property
    def network(self) -> MetricNetwork:
        """In use: the one it began with, until a better one was found."""
        return self.study.network

    @property
    def n_secants(self) -> int:
        """Examples remembered, those held out included."""
        return sum(one.number for one in (*self.study.taught, *self.study.apart))

    def learn(self, points: Sequence[Point]) -> int:
        """From the points of one finished relaxation, its end last; how many of them taught something."""
        found = _examples(points, self.settings)
        if found is None:
            return 0
        self.study.add(found)
        self.n_relaxations += 1
        if self.n_relaxations % self.settings.relaxations_per_study == 0:
            self.study.learn()
        return found.number


def _examples(points: Sequence[Point], settings: AdaptationSettings) -> Examples | None:
    usable = [point for point in points if point.geometry is not None and point.finite]
    if not usable:
        return None
    numbers = usable[-1].geometry.numbers  # pyright: ignore[reportOptionalMemberAccess]
    same = [point for point in usable if np.array_equal(point.geometry.numbers, numbers)]  # pyright: ignore[reportOptionalMemberAccess]
    return examples_of(_trajectory(same), settings)


def _trajectory(points: Sequence[Point]) -> Trajectory:
    """The same as a memory would have it; stresses are those that the filter's forces on the cell amount to."""
    geometries = [point.geometry for point in points if point.geometry is not None]
    end, n_atoms = geometries[-1], geometries[-1].n_atoms
    stresses = np.zeros((len(points), 3, 3))
    for number, (point, geometry) in enumerate(zip(points, geometries, strict=True)):
        if factor := geometry.cell_factor:
            stresses[number] = -point.forces[n_atoms:] * factor / max(geometry.volume, 1e-12)
    return Trajectory(
        key=hashlib.sha256(geometries[0].positions.tobytes() + geometries[0].cell.tobytes()).hexdigest()[:24],
        kind="adaptation",
        engine="",
        outcome=int(Outcome.CONVERGED),
        cell_free=end.cell_factor > 0,
        numbers=torch.from_numpy(end.numbers),
        pbc=torch.from_numpy(end.periodic),
        movable=torch.from_numpy(end.free[:n_atoms].any(axis=1)),
        cells=torch.from_numpy(np.stack([geometry.cell for geometry in geometries])),
        positions=torch.from_numpy(np.stack([geometry.positions for geometry in geometries])),
        energies=torch.tensor([point.energy for point in points], dtype=torch.float64),
        forces=torch.from_numpy(np.stack([point.forces[:n_atoms] for point in points])),
        stresses=torch.from_numpy(stresses),
    )
