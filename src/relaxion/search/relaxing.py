"""Trials of one search, or of many at once, on one batched relaxer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ase.calculators.calculator import BaseCalculator

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.potentials.base import Potential
from relaxion.search.choices import Hop
from relaxion.search.critic_choice import CriticChoice, choose_together
from relaxion.search.settings import SearchSettings
from relaxion.search.walk import ToRelax, Walk


class TrialRelaxer:
    """Keeps the policy loaded between rounds."""

    def __init__(self, potential: str | BaseCalculator | Potential, settings: SearchSettings) -> None:
        self.settings = BatchSettings(
            policy=settings.policy, fmax=settings.fmax, cell=settings.cell, pressure_gpa=settings.pressure_gpa
        )
        self._relaxer = BatchRelaxer(potential, self.settings)

    def __call__(self, trials: Sequence[ToRelax]) -> list[Relaxed]:
        """In the order given."""
        results: dict[int, Relaxed] = {}
        for number, trial in enumerate(trials):
            own = replace(self.settings, max_force_calls=max(trial.calls, 1))
            self._relaxer.add(trial.atoms, number, settings=own)
        while len(results) < len(trials):
            for relaxed in self._relaxer.advance():
                results[relaxed.tag] = relaxed
        return [results[number] for number in range(len(trials))]


def one_round(walks: Sequence[Walk], relax: TrialRelaxer) -> list[list[Hop]]:
    """All searches that still run hop once, in one batch; the hops of each."""
    learned = [walk for walk in walks if isinstance(walk.chooser, CriticChoice) and walk.hopping]
    chosen = choose_together([(walk.chooser, walk.hopping, walk.draw) for walk in learned])  # pyright: ignore[reportArgumentType]
    by_critic = {id(walk): own for walk, own in zip(learned, chosen, strict=True)}
    asked = [walk.ask(by_critic.get(id(walk))) for walk in walks]
    results = relax([trial for trials in asked for trial in trials])
    hops: list[list[Hop]] = []
    start = 0
    for walk, trials in zip(walks, asked, strict=True):
        part = results[start : start + len(trials)]
        hops.append(walk.tell(part) if trials else [])
        start += len(trials)
    return hops
