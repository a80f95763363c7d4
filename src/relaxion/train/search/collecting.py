"""Hops for training: many searches of random training systems, in files of which each is made whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from ase import Atoms

from relaxion.search.choices import Hop, HopChooser
from relaxion.search.hops import Hops
from relaxion.search.relaxing import TrialRelaxer, one_round
from relaxion.search.settings import SearchSettings
from relaxion.search.walk import Walk

logger = logging.getLogger(__name__)
TEMPERATURES_EV = (0.05, 0.3)  # of Metropolis, between these for each walk


def collect(
    folder: Path,
    files: range,
    make_start: Callable[[np.random.Generator], Atoms],
    make_chooser: Callable[[], HopChooser],
    moves: Mapping[str, float],
    potential: str = "emt",
    walks: int = 96,
    calls: int = 400,
    *,
    cell: bool = False,
) -> list[Path]:
    """Files `hops-NNNN.npz`, one for each number; those that exist are left as they are.

    folder: where they go. make_start: a start, from a generator seeded by the number of the file. make_chooser: who
    chooses the hops of a walk. moves: kinds with their shares. walks: searches in one file. calls: force calls of
    each. cell: relaxed too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = SearchSettings(calls=calls, moves=moves, cell=cell)
    relax = TrialRelaxer(potential, settings)
    paths = []
    for number in files:
        path = folder / f"hops-{number:04d}.npz"
        paths.append(path)
        if path.exists():
            continue
        began = time.monotonic()
        hops = _walked(np.random.default_rng([number, 32]), make_start, make_chooser, relax, walks, settings)
        hops.save(path)
        logger.info("%s: %d hops in %.0f s", path.name, len(hops), time.monotonic() - began)
    return paths


def _walked(
    random: np.random.Generator,
    make_start: Callable[[np.random.Generator], Atoms],
    make_chooser: Callable[[], HopChooser],
    relax: TrialRelaxer,
    walks: int,
    settings: SearchSettings,
) -> Hops:
    running = []
    for _ in range(walks):
        temperature = float(np.exp(random.uniform(*np.log(TEMPERATURES_EV))))
        own = replace(settings, temperature_ev=temperature, seed=int(random.integers(2**31)))
        running.append(Walk(make_start(random), own, make_chooser()))
        running[-1].skips_known = False  # each hop begins where the one before led, or where it began
    made: list[list[Hop]] = [[] for _ in running]
    while any(not walk.stopped for walk in running):
        for own, new in zip(made, one_round(running, relax), strict=True):
            own.extend(new)
    return Hops.of([own for own in made if own])
