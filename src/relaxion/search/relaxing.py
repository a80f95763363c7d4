"""Trials of one search, or of many at once, on one batched relaxer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ase.calculators.calculator import BaseCalculator

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.potentials.base import Potential
from relaxion.search.choices import Draw, Hop, Mixture, PossibleHop, Walker, softmax_pick
from relaxion.search.critic_choice import CriticChoice, choose_together
from relaxion.search.geometry import Distances, alike
from relaxion.search.settings import SearchSettings
from relaxion.search.walk import ToRelax, Walk, energy_of


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


class ModelChoice(Mixture):
    """Candidates are relaxed in a cheaper potential; one is taken by softmax over their energies there.

    The hop begins at the minimum of the cheaper potential: few expensive calls are left. Candidates that fall back to
    where the walker stands, or to what was tried from there, are dropped.
    """

    def __init__(self, model: str | BaseCalculator | Potential, settings: SearchSettings) -> None:
        """model: the cheaper potential. settings: of the search."""
        self.settings = settings
        self.calls = 0  # of the cheaper potential
        self._relax = TrialRelaxer(model, settings)

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        drawn = [draw.several(walker, self.settings.candidates) for walker in walkers]
        limit = self.settings.calls_per_hop
        starts = [walker.atoms for walker in walkers] + [hop.trial for candidates in drawn for hop in candidates]
        relaxed = self._relax([ToRelax(atoms, limit) for atoms in starts])
        self.calls += sum(result.force_calls for result in relaxed)
        ends = iter(relaxed[len(walkers) :])
        chosen: list[PossibleHop | None] = []
        for walker, candidates, here in zip(walkers, drawn, relaxed, strict=False):
            hops: list[tuple[PossibleHop, float]] = []
            for candidate, end in zip(candidates, ends, strict=False):
                look = Distances.of(end.atoms, draw.bond_scale).look(end.atoms.numbers)
                hop = PossibleHop(candidate.kind, end.atoms, look)
                back = alike(look, Distances.of(here.atoms, draw.bond_scale).look(here.atoms.numbers))
                if end.converged and not back and draw.is_new(hop, walker):
                    hops.append((hop, energy_of(end)))
            energies = np.array([energy for _, energy in hops])
            pick = softmax_pick(energies, self.settings.softmax_temperature_ev, walker.random) if hops else None
            # where the cheaper potential brings nothing, the mixture goes on
            chosen.append(hops[pick][0] if pick is not None else draw.one(walker))
        return chosen


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
