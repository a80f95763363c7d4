"""Learning to search: families of systems, the trainer of critics, and hopping as a Gymnasium environment.

A family has a potential, starts to train critics on, and systems that stay unseen: bimetallic clusters with EMT (the
pairs of UNSEEN; AlAu and AlPt collapse with EMT and are left out), Al–Fe crystals with Mendelev's potential (the
compositions of UNSEEN_CRYSTALS).

The trainer collects hops by the critic as it is (the first ones by the fixed mixture), keeps all of them, and updates
the critic on random ones, whoever chose them.

In the environment an agent chooses the next hop among candidates. State: the minimum where the walker stands as a graph
(elements, positions, cell), its energy above the best one so far, the share of the calls that is left, and the
candidates, trial structures that are not relaxed. Action: the number of a candidate. Reward: by how much the best
energy fell (eV), minus `call_cost_ev` for every force call. An episode ends when the calls are spent; since the calls
left are part of the state this is a true end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from pydantic import Field
from torch import Tensor

from relaxion.errors import AssessmentStopped, RunError, SettingsError
from relaxion.files import Stored, digest, joined
from relaxion.potentials.base import Potential
from relaxion.search.choices import Draw, Hop, HopChooser, Mixture, PossibleHop, SearchSettings, Walker
from relaxion.search.critic import Critic, CriticSettings, Hops, batch_of_hops, save_critic
from relaxion.search.critic_choice import CriticChoice, loss_of, quality, targets
from relaxion.search.run import OF_RUN, TrialRelaxer, one_round
from relaxion.search.walk import Walk
from relaxion.settings import Settings
from relaxion.train.agents.shared import Snapshots, adam, descend, soft_update
from relaxion.train.data.alloys import ball, packed, repacked, summed_volume
from relaxion.train.data.dataset import read
from relaxion.train.data.starts import first_at_hand, potential_at_hand
from relaxion.train.tasks.control import STARTS_SEED, AssessedReturns
from relaxion.train.tasks.progress import Result, ScalarMeans, checked_finite, named_generator, taken_back
from relaxion.train.tasks.settings import LoopSettings, RunSettings

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
    """What is searched."""

    potential: str  # alternatives `first | second`: the first that can be had
    training_start: MakeStart


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


FAMILIES = {
    "metals": SearchFamily("emt", training_cluster),
    "al-fe": SearchFamily("eam:../shared/data/AlFe.fs.gz | eam", training_crystal),
}
SIZES = {"tuning": (15, 19, 24), "unseen": (14, 16, 18, 20, 23, 25), "large": (30, 38, 50)}


def systems(family: str, which: str, *, cell: bool = False) -> dict[str, MakeStart]:
    """Starts of each system by its name. which: `tuning`, `unseen`, or `large` (clusters, of unseen pairs).

    All starts of a crystal share a cell, unless it is free.
    """
    if family == "metals":
        return _clusters(TRAINED[::2] if which == "tuning" else UNSEEN, which)
    known = [composition for composition in CRYSTALS if composition not in UNSEEN_CRYSTALS]
    compositions = known[2::5] if which == "tuning" else UNSEEN_CRYSTALS
    found: dict[str, MakeStart] = {}
    for n_al, n_fe in compositions:
        first = crystal(n_al, n_fe, np.random.default_rng([n_al, n_fe]))
        make = partial(crystal, n_al, n_fe) if cell else partial(repacked, first, APART)
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


TEMPERATURES_EV = (0.05, 0.3)  # of Metropolis, between these for each walk
DEPTHS = (1, 2, 4)  # moves of a hop at most, walks in turn
EXPLORING_EV = 0.08  # softmax over what the critic expects, while hops are collected
WALK_CALLS = 400
BATCH_HOPS = 64
SEGMENT = 8  # hops of a batch that follow each other in a walk, and share minima
LEARNING_RATE = 2e-3
FINAL_SHARE = 0.01  # of the learning rate, which falls as a cosine
COLLECTIONS = 12  # of hops
COLLECTING_SHARE = 0.8  # of the updates, until the last one
AVERAGING_RATE = 0.002  # per update: the critic that is used follows the one that learns; faster at the beginning
ASSESSED_CALLS = 100


class SearchTaskSettings(Settings):
    """What hops are made of, and how many."""

    structures: str = "metals"
    """metals (clusters of two metals), al-fe (crystals), or a file of your own structures, each a start."""

    calculator: str | None = None
    """Of the relaxations; None: that of the family."""

    cell: bool = False
    """Relax the cell too."""

    walks: int = Field(default=48, ge=1)
    """Searches of 400 force calls in each of the twelve collections."""


@dataclass(frozen=True)
class SearchRunSettings(RunSettings):
    """No agent of the package acts here: the critic is the policy."""

    search: SearchTaskSettings

    COUNTS_FORCE_CALLS = False

    @classmethod
    def parts(cls, values: Mapping[str, Any]) -> dict[str, type[Settings]]:  # noqa: ARG003
        return {"training": LoopSettings, "search": SearchTaskSettings}

    def trainer(self) -> SearchTrainer:
        return SearchTrainer(self)


class SearchTrainer(Snapshots):
    """`advance` is one update of the critic, after a collection of hops where one is due; resumable to the bit."""

    PARTS = ("critic", "used", "optimizer", "generator")

    def __init__(self, settings: SearchRunSettings) -> None:
        self.settings = settings
        own = settings.search
        family = FAMILIES.get(own.structures)
        self.make_start = family.training_start if family is not None else _drawn_from(Path(own.structures))
        potential = own.calculator or (family.potential if family is not None else None)
        if potential is None:
            raise SettingsError(f"no calculator for {own.structures}; name one, such as emt")
        self.potential = first_at_hand(potential, potential_at_hand)
        self.searches = SearchSettings(calls=WALK_CALLS, cell=own.cell)
        self.relax = TrialRelaxer(self.potential, self.searches)
        seed = settings.training.seed
        self.critic = Critic(CriticSettings(), named_generator(seed, "agent"))
        self.used = copy.deepcopy(self.critic)
        self.optimizer = adam(self.critic.parameters(), LEARNING_RATE)
        self.generator = named_generator(seed, "replay")
        self.hops: Hops | None = None
        self.n_updates = 0
        self.force_calls = 0
        self.newest: dict[str, float] = {}  # quality on the last collection, before it was learned from
        self.means = ScalarMeans()
        self.folder: Path | None = None

    @property
    def step(self) -> int:
        return self.n_updates

    @property
    def steps_per_round(self) -> int:
        return 1

    def prepare(self, folder: Path) -> None:
        self.folder = folder

    def advance(self) -> None:
        steps = self.settings.training.steps
        interval = max(1, int(COLLECTING_SHARE * steps / COLLECTIONS))
        number, left = divmod(self.n_updates, interval)
        if left == 0 and number < COLLECTIONS:
            self._collect(number)
        share = 0.5 * (1 + math.cos(math.pi * min(self.n_updates / steps, 1.0)))
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * share)
        assert self.hops is not None
        length = min(SEGMENT, len(self.hops))
        starts = torch.randint(len(self.hops) - length + 1, (BATCH_HOPS // length, 1), generator=self.generator)
        chosen = (starts + torch.arange(length)).flatten().numpy()
        loss = loss_of(self.critic(batch_of_hops(self.hops, chosen)), targets(self.hops)[chosen])
        norm = descend(loss, self.optimizer)
        soft_update(self.used, self.critic, max(AVERAGING_RATE, 5 / (self.n_updates + 5)))
        self.n_updates += 1
        self.means.add({"train/critic_loss": loss.detach(), "train/critic_gradient_norm": norm})

    def _collect(self, number: int) -> None:
        """Hops of new walks, by a generator of this collection."""
        random = np.random.default_rng([self.settings.training.seed, 32, number])
        depths = cycle(DEPTHS)
        walks = []
        for _ in range(self.settings.search.walks):
            temperature = float(np.exp(random.uniform(*np.log(TEMPERATURES_EV))))
            options = {"temperature_ev": temperature, "seed": int(random.integers(2**31))}
            walks.append(Walk(self.make_start(random), replace(self.searches, **options), self._chooser(next(depths))))
            walks[-1].is_plain = True  # each hop begins where the one before led, or where it began
        made: list[list[Hop]] = [[] for _ in walks]
        while any(not walk.stopped for walk in walks):
            for kept, new in zip(made, one_round(walks, self.relax), strict=True):
                kept.extend(new)
        self.force_calls += sum(walk.calls for walk in walks)
        if not any(made):
            raise RunError(f"no search made a hop within {WALK_CALLS} force calls: {walks[0].stopped}")
        hops = Hops.of([kept for kept in made if kept])
        if self.hops is not None:
            self.newest = {f"hops/{name}": value for name, value in quality(self.used, hops).items()}
        self.hops = hops if self.hops is None else Hops.joined([self.hops, hops])

    def _chooser(self, depth: int) -> HopChooser:
        if self.hops is None:
            return Mixture()
        return CriticChoice(self.used, temperature_ev=EXPLORING_EV, learn=False, depth=depth)

    def scalars(self) -> dict[str, float]:
        n_hops = 0 if self.hops is None else len(self.hops)
        own = {"time/total_timesteps": self.step, "time/force_calls": self.force_calls, "replay/size": n_hops}
        return own | self.newest | self.means.take()

    def take_events(self) -> list[Any]:
        """Diagnoses are for agents."""
        return []

    def assess(self, stop: Callable[[], bool]) -> AssessedReturns:
        """Short searches. The return is by how much the best energy fell, in eV."""
        own = self.settings.search
        n_starts = self.settings.training.assessment_starts
        made = systems(own.structures, "tuning", cell=own.cell) if own.structures in FAMILIES else {}
        makers = list(islice(cycle(made.values() or [self.make_start]), n_starts))
        settings = replace(self.searches, calls=ASSESSED_CALLS)
        walks = []
        for number, make in enumerate(makers):
            start = make(np.random.default_rng([STARTS_SEED, number]))
            walks.append(Walk(start, replace(settings, seed=number), CriticChoice(self.used, learn=False)))
        while any(not walk.stopped for walk in walks):
            if stop():
                raise AssessmentStopped
            one_round(walks, self.relax)
        fallen = [walk.history[0].best_ev - walk.best_ev if walk.history else 0.0 for walk in walks]
        lengths = torch.tensor([walk.calls for walk in walks])
        return AssessedReturns(torch.tensor(fallen, dtype=torch.float64), lengths)

    def result(self, final: AssessedReturns, wall_time_seconds: float) -> Result:
        """The critic as a file besides, which chooses hops in `relaxion search`."""
        training = self.settings.training
        if self.folder is not None:
            save_critic(self.used, self.folder / OF_RUN, self.card(wall_time_seconds))
        return Result(
            agent="critic of hops",
            task=self.settings.search.structures,
            seed=training.seed,
            steps=self.step,
            final_return_mean=final.mean,
            final_return_worst=final.worst,
            episodes=len(final.returns),
            wall_time_seconds=wall_time_seconds,
            weights_sha256=digest(self.weights()),
        )

    def card(self, wall_time_seconds: float) -> dict[str, Any]:
        """What the file of the critic says of itself."""
        assert self.hops is not None
        return {
            "settings": self.settings.flat(),
            "elements": sorted(set(self.hops.numbers.tolist())),
            "periodic": bool(self.hops.periodic.any()),
            "cell": self.settings.search.cell,
            "potential": self.potential,
            "hops": len(self.hops),
            "force_calls": self.force_calls,
            "sizes": [int(self.hops.counts.min()), int(self.hops.counts.max())],
            "seconds": round(wall_time_seconds),
            "quality_on_new_hops": {name: round(value, 3) for name, value in self.newest.items()},
        }

    def weights(self) -> dict[str, Tensor]:
        return joined({"critic": self.used.state_dict()})

    def start_from(self, stored: Stored) -> None:
        """Take over an old critic."""
        with taken_back():
            self.critic.load_state_dict(stored.part("critic"))
            self.used.load_state_dict(stored.part("critic"))

    def snapshot(self) -> dict[str, Tensor]:
        """Everything a resume needs. A DivergedError when the critic is not worth keeping."""
        checked_finite(self.critic.state_dict(), self.step)
        counters = {"n_updates": self.n_updates, "force_calls": self.force_calls, **self.newest}
        return joined(
            {
                "agent": super().snapshot(),
                "replay": {} if self.hops is None else self.hops.tensors(),
                "counters": {name: torch.tensor(value, dtype=torch.float64) for name, value in counters.items()},
                "means": self.means.snapshot(),
            }
        )

    def restore(self, stored: Stored) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with taken_back():
            super().restore(stored.part("agent"))
            counters = {name: value.item() for name, value in stored.part("counters").items()}
            self.n_updates = int(counters.pop("n_updates"))
            self.force_calls = int(counters.pop("force_calls"))
            self.newest = counters
            self.hops = Hops.of_tensors(stored.part("replay")) if stored.part("replay") else None
            self.means.restore(stored.part("means"))

    def close(self) -> None:
        """Nothing is open."""


def _drawn_from(path: Path) -> MakeStart:
    """Starts are structures of the file, by chance."""
    if not path.exists():
        raise SettingsError(f"structures is {', '.join(FAMILIES)} or a file, and there is no file {path}")
    structures = read(path, ":")
    return lambda random: structures[int(random.integers(len(structures)))].copy()


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
        self.walk.is_plain = True  # the agent decides about every hop
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
