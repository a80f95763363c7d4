"""Learning to search: families of systems, hops to learn from, and hopping as a Gymnasium environment.

A family has a potential, moves, starts to train critics on, and systems that stay unseen: bimetallic clusters with EMT
(the pairs of UNSEEN; AlAu and AlPt collapse with EMT and are left out), Al–Fe crystals with Mendelev's potential (the
compositions of UNSEEN_CRYSTALS). Hops come from many searches of random training systems, in files of which each is
made whole or not at all.

In the environment an agent chooses the next hop among candidates. State: the minimum where the walker stands as a graph
(elements, positions, cell), its energy above the best one so far, the share of the calls that is left, and the
candidates, trial structures that are not relaxed. Action: the number of a candidate. Reward: by how much the best
energy fell (eV), minus `call_cost_ev` for every force call. An episode ends when the calls are spent; since the calls
left are part of the state this is a true end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator

from relaxion.errors import SettingsError
from relaxion.potentials.base import Potential
from relaxion.search.choices import Draw, Hop, HopChooser, Mixture, PossibleHop, SearchSettings, Walker
from relaxion.search.critic import Hops
from relaxion.search.run import TrialRelaxer, one_round
from relaxion.search.walk import Walk
from relaxion.train.data.alloys import ball, packed, repacked, summed_volume

MakeStart: TypeAlias = Callable[[np.random.Generator], Atoms]
METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
UNSEEN = (("Cu", "Au"), ("Ag", "Pd"), ("Ni", "Pt"), ("Al", "Cu"))
COLLAPSING = (("Al", "Au"), ("Al", "Pt"))
TRAINED = tuple(
    pair for pair in combinations(METALS, 2) if not any(set(pair) == set(other) for other in (*UNSEEN, *COLLAPSING))
)
LATTICES = ("fcc", "hcp", "bcc")
CRYSTALS = tuple((n_al, size - n_al) for size in range(6, 13) for n_al in range(1, size))  # atoms of Al, of Fe
UNSEEN_CRYSTALS = tuple(CRYSTALS[n] for n in sorted(np.random.default_rng(32).choice(len(CRYSTALS), 16, replace=False)))
APART = 1.8  # Å; no two atoms of a crystal's start are nearer


@dataclass(frozen=True)
class SearchFamily:
    """What is searched, and how."""

    potential: str
    training_start: MakeStart
    tuned: Mapping[str, float]  # shares of the best fixed mixture that was found
    hops: Mapping[str, float]  # shares of the candidates from which critics choose
    cell: bool = False  # relaxed too


def training_cluster(random: np.random.Generator, fewest: int = 10, most: int = 26) -> Atoms:
    """A pair, a size, a composition and a lattice by chance; at least two atoms of each metal."""
    pair = TRAINED[int(random.integers(len(TRAINED)))]
    size = int(random.integers(fewest, most + 1))
    if random.random() < 0.1:
        size = int(random.integers(most + 1, 2 * most - 10))
    first = int(random.integers(2, size - 1))
    return alloy_cluster(pair, size, first, random)


def alloy_cluster(pair: tuple[str, str], size: int, first: int, random: np.random.Generator) -> Atoms:
    """A ball cut from a lattice, `first` atoms of the pair's first metal, places by chance."""
    symbols = random.permutation([pair[0]] * first + [pair[1]] * (size - first)).tolist()
    return ball(random, symbols, LATTICES[int(random.integers(len(LATTICES)))])


def training_crystal(random: np.random.Generator) -> Atoms:
    """One of the compositions that are not kept unseen, in a cell of its own."""
    known = [composition for composition in CRYSTALS if composition not in UNSEEN_CRYSTALS]
    return crystal(*known[int(random.integers(len(known)))], random)


def crystal(n_al: int, n_fe: int, random: np.random.Generator) -> Atoms:
    """Atoms strewn into a random cell of their volume."""
    symbols = ["Al"] * n_al + ["Fe"] * n_fe
    volume = summed_volume(symbols) / len(symbols)
    return packed(random, symbols, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=APART)


AL_FE = "eam:../shared/data/AlFe.fs.gz"
FAMILIES = {
    "metals": SearchFamily(
        "emt",
        training_cluster,
        tuned={"swap": 0.6, "relocate": 0.25, "twist": 0.15},
        hops={"swap": 0.5, "relocate": 0.35, "twist": 0.15},
    ),
    "al-fe": SearchFamily(
        AL_FE,
        training_crystal,
        tuned={"swap": 0.4, "slip": 0.2, "relocate": 0.2, "rattle": 0.2},
        hops={"swap": 0.4, "slip": 0.25, "relocate": 0.25, "rattle": 0.1},
    ),
    "al-fe-cell": SearchFamily(
        AL_FE,
        training_crystal,
        tuned={"swap": 0.4, "slip": 0.2, "relocate": 0.1, "rattle": 0.15, "strain": 0.15},
        hops={"swap": 0.4, "slip": 0.2, "relocate": 0.15, "rattle": 0.1, "strain": 0.15},
        cell=True,
    ),
}
SIZES = {"tuning": (15, 19, 24), "unseen": (14, 16, 18, 20, 23, 25), "large": (30, 38, 50)}


def systems(family: str, which: str) -> dict[str, MakeStart]:
    """Starts of each system by its name. which: `tuning`, `unseen`, or `large` (clusters, of unseen pairs)."""
    if family == "metals":
        return _clusters(TRAINED[::2] if which == "tuning" else UNSEEN, which)
    known = [composition for composition in CRYSTALS if composition not in UNSEEN_CRYSTALS]
    compositions = known[2::5] if which == "tuning" else UNSEEN_CRYSTALS
    found: dict[str, MakeStart] = {}
    for n_al, n_fe in compositions:
        first = crystal(n_al, n_fe, np.random.default_rng([n_al, n_fe]))
        # a fixed cell belongs to the system: all starts share it
        make = partial(crystal, n_al, n_fe) if FAMILIES[family].cell else partial(repacked, first, APART)
        found[f"Al{n_al}Fe{n_fe}"] = make
    return found


def _clusters(pairs: tuple[tuple[str, str], ...], which: str) -> dict[str, MakeStart]:
    """Compositions drawn once for each set."""
    random = np.random.default_rng({"tuning": 1, "unseen": 2, "large": 3}[which])
    found: dict[str, MakeStart] = {}
    for pair in pairs:
        for size in SIZES[which]:
            first = int(random.integers(size // 4, size - size // 4 + 1))
            found[f"{pair[0]}{first}{pair[1]}{size - first}"] = partial(alloy_cluster, pair, size, first)
    return found


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


Observation = dict[str, np.ndarray]


class _Agent(Mixture):
    """Takes the candidate that the agent named."""

    next: PossibleHop | None = None

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:  # noqa: ARG002
        return [self.next for _ in walkers]


class HopEnvironment(gymnasium.Env[Observation, int]):
    """One walker; all episodes have the same number of atoms."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium wants it

    def __init__(
        self,
        make_start: Callable[[np.random.Generator], Atoms],
        potential: str | BaseCalculator | Potential = "emt",
        *,
        n_atoms: int,
        candidates: int = 16,
        call_cost_ev: float = 0.001,
        settings: SearchSettings | None = None,
    ) -> None:
        """make_start: a start from a generator. candidates: hops to choose from. call_cost_ev: per force call."""
        self.settings = settings or SearchSettings(calls=200)
        self.make_start = make_start
        self.n_candidates = candidates
        self.call_cost_ev = call_cost_ev
        self.n_atoms = n_atoms
        self._relax = TrialRelaxer(potential, self.settings)
        self.action_space = gymnasium.spaces.Discrete(candidates)  # pyright: ignore[reportAttributeAccessIssue]
        spaces: Any = gymnasium.spaces.Dict(
            {
                "numbers": gymnasium.spaces.Box(0, 118, (n_atoms,), np.int64),
                "positions": _unbounded(n_atoms, 3),
                "cell": _unbounded(3, 3),
                "candidates": _unbounded(candidates, n_atoms, 3),
                "above_best_ev": gymnasium.spaces.Box(0, np.inf, (1,), np.float64),
                "calls_left": gymnasium.spaces.Box(0, 1, (1,), np.float64),
            }
        )
        self.observation_space = spaces
        self.walk: Walk | None = None
        self.last_hop: Hop | None = None
        self._drawn: list[PossibleHop] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        start = self.make_start(self.np_random)
        if len(start) != self.n_atoms:
            raise SettingsError(f"a start has {len(start)} atoms, the environment was made for {self.n_atoms}")
        self._agent = _Agent()
        self.walk = Walk(start, self.settings, self._agent)
        self.walk.skips_known = False  # the agent decides about every hop
        one_round([self.walk], self._relax)
        if not self.walk.walkers:
            raise SettingsError(f"no episode can begin: {self.walk.stopped}")
        self._draw()
        return self._observation(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        walk = self.walk
        if walk is None or walk.stopped:
            raise SettingsError("the episode is over; call reset first")
        best = walk.best_ev
        calls = walk.calls
        self._agent.next = self._drawn[int(action) % len(self._drawn)]
        hops = one_round([walk], self._relax)[0]
        self.last_hop = hops[0] if hops else None
        reward = (best - walk.best_ev) - self.call_cost_ev * (walk.calls - calls)
        if not walk.stopped:
            self._draw()
        told = {"best_ev": walk.best_ev, "force_calls": walk.calls, "stopped": walk.stopped}
        return self._observation(), float(reward), bool(walk.stopped), False, told

    def _draw(self) -> None:
        assert self.walk is not None
        draws = (self.walk.draw.one(self.walk.walkers[0]) for _ in range(self.n_candidates))
        self._drawn = [candidate for candidate in draws if candidate is not None]
        if not self._drawn:
            self.walk.stopped = "no hop was found"

    def _observation(self) -> Observation:
        """Where fewer candidates were found than there are actions, they come again in turn."""
        assert self.walk is not None
        walker = self.walk.walkers[0]
        trials = [candidate.trial.positions for candidate in self._drawn] or [walker.atoms.positions]
        left = 1 - self.walk.calls / self.settings.calls
        return {
            "numbers": walker.atoms.numbers.astype(np.int64),
            "positions": walker.atoms.positions.copy(),
            "cell": walker.atoms.cell.array.copy(),
            "candidates": np.array([trials[number % len(trials)] for number in range(self.n_candidates)]),
            "above_best_ev": np.array([max(walker.energy_ev - self.walk.best_ev, 0.0)]),
            "calls_left": np.array([max(left, 0.0)]),
        }


def _unbounded(*shape: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float64)
