"""One search as ask and tell: which structures to relax next, and what came of them. The caller relaxes them.

All walkers hop in rounds. A round is the unit of the state file, so that a search that is resumed goes on exactly as
one that was never stopped.

Two ends are one minimum where energy and distances agree. Distances are compared as smeared histograms, one per pair of
elements: they do not change with rotations, mirror images, the order of atoms or the choice of the cell. Histograms of
two orders of the elements on one skeleton differ as little as those of two rough relaxations, so that clusters must
have the same bond graph too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms

from relaxion.errors import PotentialError, SettingsError, StructureError
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.search.choices import Draw, Hop, HopChooser, PossibleHop, SearchSettings, Walker
from relaxion.search.moves import Distances, free_atoms, move_named, usual_moves
from relaxion.structures import Structures
from relaxion.structures.state import Pairs
from relaxion.structures.structures import check_atoms

ENERGY_TOLERANCE = 0.001  # eV per atom; relaxations to 0.05 eV/Å end within about half of it
FINGERPRINT_TOLERANCE = 0.05  # of the histograms' norm; measured in tests/unit/search/test_minima.py
SURELY_ONE = 0.012  # below it also where one pair of atoms counts as bonded only once; other orders differ by 0.018 on
REACH = 2.6  # usual bonds
SMEARING = 0.06  # usual bonds
N_BINS = 80


@dataclass(frozen=True, eq=False)
class Minimum:
    """One of them, as it was found first."""

    atoms: Atoms
    energy_ev: float  # enthalpy where there is a pressure
    found_at_call: int  # for the first time
    times_found: int = 1


class Minima:
    """Grows by `add`; numbers of minima are in the order of their first finding and never change."""

    def __init__(self) -> None:
        self.found: list[Minimum] = []
        self._fingerprints: dict[int, np.ndarray] = {}
        self._graphs: dict[bytes, int] = {}  # number of the lowest minimum with such a bond graph
        self._graphs_of: list[bytes] = []

    def __len__(self) -> int:
        return len(self.found)

    def by_energy(self) -> list[Minimum]:
        return sorted(self.found, key=lambda minimum: minimum.energy_ev)

    def add(self, atoms: Atoms, energy_ev: float, call: int) -> tuple[int, bool]:
        """The number of the minimum that these relaxed atoms are, and whether it is new."""
        tolerance = ENERGY_TOLERANCE * len(atoms)
        rivals = [n for n, other in enumerate(self.found) if abs(other.energy_ev - energy_ev) < tolerance]
        own = fingerprint(atoms) if rivals else None
        graph = bond_graph(atoms)
        for number in sorted(rivals, key=lambda n: abs(self.found[n].energy_ev - energy_ev)):
            if own is not None and self._is_one(own, graph, number):
                # the representative and its fingerprint stay: they must not drift from find to find
                known = self.found[number]
                self.found[number] = replace(known, times_found=known.times_found + 1)
                return number, False
        self.found.append(Minimum(atoms, energy_ev, call))
        if own is not None:
            self._fingerprints[len(self.found) - 1] = own
        return len(self.found) - 1, True

    def _is_one(self, own: np.ndarray, graph: bytes, number: int) -> bool:
        unlike = difference(own, self._fingerprint(number))
        return unlike < SURELY_ONE or (unlike < FINGERPRINT_TOLERANCE and graph == self._all_graphs()[number])

    def with_graph(self, graph: bytes) -> int | None:
        """The number of a minimum with this bond graph."""
        self._all_graphs()
        return self._graphs.get(graph)

    def _all_graphs(self) -> list[bytes]:
        for number in range(len(self._graphs_of), len(self.found)):
            graph = bond_graph(self.found[number].atoms)
            self._graphs_of.append(graph)
            known = self._graphs.get(graph)
            if known is None or self.found[number].energy_ev < self.found[known].energy_ev:
                self._graphs[graph] = number
        return self._graphs_of

    def _fingerprint(self, number: int) -> np.ndarray:
        if number not in self._fingerprints:
            self._fingerprints[number] = fingerprint(self.found[number].atoms)
        return self._fingerprints[number]


def bond_graph(atoms: Atoms) -> bytes:
    """As `Distances.bond_graph`; empty, thus equal for all, where the structure is periodic."""
    return b"" if atoms.pbc.any() else Distances.of(atoms).bond_graph(atoms.numbers)


def fingerprint(atoms: Atoms) -> np.ndarray:
    """(n_pairs_of_elements · N_BINS,) smeared numbers of neighbours by distance."""
    bond = float(np.median(Distances.of(atoms).bonds))
    plain = atoms.copy()
    plain.set_constraint()
    pairs = Pairs.of(Structures.from_ase([plain]), REACH * bond)
    lengths = pairs.vectors.norm(dim=1).numpy() / bond
    elements, kinds = np.unique(atoms.numbers, return_inverse=True)
    ends = np.sort(kinds[pairs.ends.numpy()], axis=0)
    pair_kinds = ends[0] * len(elements) + ends[1]
    centres = np.linspace(0.4, REACH, N_BINS)
    # pairs fade out towards the reach, so that none appears or vanishes at once
    fading = 0.5 * (1 + np.cos(np.pi * np.minimum(lengths / REACH, 1.0)))
    smeared = np.exp(-0.5 * ((lengths[:, None] - centres) / SMEARING) ** 2) * fading[:, None]
    histograms = np.zeros((len(elements) ** 2, N_BINS))
    np.add.at(histograms, pair_kinds, smeared)
    return histograms.ravel()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """0: equal; relative to the norm of the two."""
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)), 1e-12)
    return float(np.linalg.norm(one - other)) / size


CALLS_PER_HOP = 150  # a relaxation that needs more is given up
FEWEST_CALLS = 30  # left for each relaxation of a round; fewer walkers hop near the end
RESTART_HOPS = 30  # of a walker without a lower minimum; then it begins anew
RESTART_MOVES = 10  # of the first minimum
RESTART = "restart"
LOWER_EV = 1e-3  # a fall that counts as one
MOST_KNOWN = 30  # known minima that a walker passes in a row; the next hop is relaxed in any case
MOST_FAILURES = 20  # of the calculator in a row
NEW = "new"
KNOWN = "known"
SAME = "same"
EVAPORATED = "evaporated"
UNFINISHED = "unfinished"
FAILED = "failed"
OUTCOMES = (NEW, KNOWN, SAME, EVAPORATED, UNFINISHED, FAILED)


@dataclass(frozen=True)
class Step:
    """One line of the history; the first one is the relaxation of the start."""

    calls: int  # force calls of the search when this hop had ended
    hop_calls: int
    walker: int
    kind: str
    outcome: str
    accepted: bool
    energy_ev: float | None
    best_ev: float
    minimum: int | None  # its number, in the order of finding


@dataclass(frozen=True, eq=False)
class ToRelax:
    """A structure to relax, with at most so many force calls."""

    atoms: Atoms
    calls: int


class Walk:
    """`ask` for trials until `stopped` has a reason; each answer goes to `tell`."""

    def __init__(self, start: Atoms, settings: SearchSettings, chooser: HopChooser) -> None:
        check_atoms(start)
        self.settings = settings
        self.chooser = chooser
        self.start = start.copy()
        self.free = free_atoms(start)
        shares = dict(settings.moves) or _usual(start, self.free, settings)
        self.shares = {kind: share / sum(shares.values()) for kind, share in shares.items() if share}
        self.moves = {kind: move_named(kind) for kind in self.shares}
        _check_start(start, self.free)
        self.minima = Minima()
        self.tried: dict[int, list[np.ndarray]] = {}  # looks of the trials that were relaxed, by minimum
        self.walkers: list[Walker] = []
        self.history: list[Step] = []
        self.calls = 0
        self.best_ev = math.inf
        self.improved_at = 0  # calls when the best energy was reached
        self.failures = 0  # in a row
        self.stopped = ""  # why, in words
        self.unfinished: Atoms | None = None  # the start as far as it was relaxed, where that did not end
        self.allowed_fragments = 1
        self.bond_scale = 1.0
        self.is_whole = True  # False between a question and its answer: such a state must not be written
        self.is_plain = False  # True: hops to known minima are relaxed again, and no walker begins anew
        self._asked: list[tuple[int, PossibleHop]] = []

    @property
    def draw(self) -> Draw:
        return Draw(self.moves, self.shares, self.free, self.bond_scale, self.tried)

    @property
    def hopping(self) -> list[Walker]:
        """The walkers that hop in the next round: fewer near the end, and none before the start is relaxed."""
        if self.stopped or not self.walkers:
            return []
        left = self.settings.calls - self.calls
        return self.walkers[: max(1, left // FEWEST_CALLS)]

    def ask(self, chosen: Sequence[PossibleHop | None] | None = None) -> list[ToRelax]:
        """Trials of the next round; none where the search has ended. `chosen`: for `hopping`, if not by the chooser."""
        if self.stopped:
            return []
        self.is_whole = False
        if not self.walkers:
            return [ToRelax(self.start, self.settings.calls)]
        hopping = self.hopping
        limit = min(CALLS_PER_HOP, (self.settings.calls - self.calls) // len(hopping))
        if chosen is None:
            chosen = self.chooser.choose(hopping, self.draw)
        chosen = [
            (self._anew(walker) or hop) if walker.idle_hops >= RESTART_HOPS and not self.is_plain else hop
            for walker, hop in zip(hopping, chosen, strict=True)
        ]
        chosen = [self._through_known(walker, hop) for walker, hop in zip(hopping, chosen, strict=True)]
        self._asked = [(n, candidate) for n, candidate in enumerate(chosen) if candidate is not None]
        if not self._asked:
            self.stopped = f"no hop was found: {', '.join(self.moves)} brought nothing"
            self.is_whole = True
        return [ToRelax(candidate.trial, limit) for _, candidate in self._asked]

    def _anew(self, walker: Walker) -> PossibleHop | None:
        """The first minimum after many moves: where a search is stuck, another beginning finds more than patience."""
        atoms = self.minima.found[0].atoms
        hop: PossibleHop | None = None
        for _ in range(RESTART_MOVES):
            hop = self.draw.one(replace(walker, atoms=atoms)) or hop
            atoms = atoms if hop is None else hop.trial
        return None if hop is None else replace(hop, kind=RESTART)

    def _through_known(self, walker: Walker, candidate: PossibleHop | None) -> PossibleHop | None:
        """A hop to a minimum that is known by its bond graph costs no force call: the walker goes there, or does not,
        and chooses again."""
        for _ in range(0 if self.is_plain or self.start.pbc.any() else MOST_KNOWN):
            if candidate is None or candidate.kind == RESTART:
                return candidate
            known = self.minima.with_graph(bond_graph(candidate.trial))
            if known is None:
                return candidate
            self.tried.setdefault(walker.minimum, []).append(candidate.look)
            energy = self.minima.found[known].energy_ev
            if known != walker.minimum and self._accepts(walker, energy):
                walker.atoms = self.minima.found[known].atoms
                walker.energy_ev = energy
                walker.minimum = known
                walker.best_ev = min(walker.best_ev, energy)
            candidate = self.chooser.choose([walker], self.draw)[0]
        return candidate

    def tell(self, relaxed: list[Relaxed]) -> list[Hop]:
        """The hops of this round, in the order asked for."""
        if not self.walkers:
            self._begin(relaxed[0])
            self.is_whole = True
            return []
        hops = [
            self._hopped(number, candidate, result)
            for (number, candidate), result in zip(self._asked, relaxed, strict=True)
        ]
        for hop in hops:
            if hop.kind != RESTART:
                self.chooser.learn(hop)
        self.stop_by_calls()
        self.is_whole = True
        return hops

    def _begin(self, result: Relaxed) -> None:
        self.calls += spent(result)
        if result.error is not None:
            raise PotentialError(f"the start could not be relaxed: {result.error}")
        if not result.converged:
            self.unfinished = result.atoms
            limit = f"{self.settings.calls} force calls did not relax the start to {self.settings.fmax:g} eV/Å"
            self.stopped = f"{limit} ({result.outcome.label}); give more calls, or check the structure"
            return
        atoms = result.atoms
        energy = energy_of(result)
        geometry = Distances.of(atoms)
        self.bond_scale = geometry.scale
        self.allowed_fragments = geometry.n_fragments
        number, _ = self.minima.add(atoms, energy, self.calls)
        seeds = np.random.SeedSequence(self.settings.seed).spawn(self.settings.walkers)
        self.walkers = [Walker(atoms, energy, number, energy, np.random.default_rng(seed)) for seed in seeds]
        self.record(Step(self.calls, self.calls, 0, "start", NEW, True, energy, energy, number))
        self.stop_by_calls()

    def _hopped(self, number: int, candidate: PossibleHop, result: Relaxed) -> Hop:
        walker = self.walkers[number]
        self.tried.setdefault(walker.minimum, []).append(candidate.look)
        self.calls += spent(result)
        outcome, energy, minimum = self._judged(walker, result)
        before = walker.atoms
        energy_before = walker.energy_ev
        anew = candidate.kind == RESTART
        accepted = energy is not None and outcome != SAME and (anew or self._accepts(walker, energy))
        walker.idle_hops += 1
        if energy is not None and (anew or energy < walker.best_ev - LOWER_EV):
            walker.idle_hops = 0
            walker.best_ev = energy
        if accepted and energy is not None and minimum is not None:
            walker.atoms = result.atoms
            walker.energy_ev = energy
            walker.minimum = minimum
            walker.best_ev = min(walker.best_ev, energy)
        own = spent(result)
        best = self.best_ev if energy is None else min(self.best_ev, energy)
        self.record(Step(self.calls, own, number, candidate.kind, outcome, accepted, energy, best, minimum))
        return Hop(number, candidate.kind, before, energy_before, candidate.trial, energy, own, outcome, accepted)

    def _judged(self, walker: Walker, result: Relaxed) -> tuple[str, float | None, int | None]:
        """Outcome, energy in eV and number of the minimum."""
        if result.error is not None:
            self.failures += 1
            if self.failures >= MOST_FAILURES:
                self.stopped = f"the calculator failed {self.failures} times in a row: {result.error}"
            return FAILED, None, None
        self.failures = 0
        if not result.converged:
            return UNFINISHED, None, None
        if not result.atoms.pbc.any() and self._has_evaporated(result.atoms):
            return EVAPORATED, None, None
        energy = energy_of(result)
        minimum, new = self.minima.add(result.atoms, energy, self.calls)
        if minimum == walker.minimum:
            return SAME, energy, minimum
        return (NEW if new else KNOWN), energy, minimum

    def _has_evaporated(self, atoms: Atoms) -> bool:
        return Distances.of(atoms, self.bond_scale).n_fragments > self.allowed_fragments

    def _accepts(self, walker: Walker, energy_ev: float) -> bool:
        rise = energy_ev - walker.energy_ev
        return rise <= 0 or walker.random.random() < math.exp(-rise / self.settings.temperature_ev)

    def record(self, step: Step) -> None:
        self.history.append(step)
        if step.best_ev < self.best_ev:
            self.best_ev = step.best_ev
            self.improved_at = step.calls

    def stop_by_calls(self) -> None:
        """Between rounds, and when limits are others than before."""
        patience = self.settings.patience_calls
        idle = self.calls - self.improved_at
        if self.calls >= self.settings.calls:
            self.stopped = self.stopped or f"all {self.settings.calls} force calls are spent"
        elif patience is not None and idle >= patience:
            self.stopped = self.stopped or f"no lower minimum in the last {idle} force calls"


def spent(result: Relaxed) -> int:
    """Force calls of a relaxation; a call that failed was made too."""
    refused = not result.policy_used  # before the first call
    failed = result.error is not None and not refused
    return result.force_calls + failed


def energy_of(result: Relaxed) -> float:
    """Enthalpy: what was minimised, equal to the energy without pressure."""
    energy = result.enthalpy_ev if result.enthalpy_ev is not None else result.energy_ev
    assert energy is not None  # of a converged relaxation
    return energy


def _usual(start: Atoms, free: np.ndarray, settings: SearchSettings) -> dict[str, float]:
    if len(start) == 0 or not len(free):
        return {"rattle": 1.0}  # refused by `_check_start` with a sentence
    return usual_moves(start, free, cell=settings.cell)


def _check_start(start: Atoms, free: np.ndarray) -> None:
    if len(start) == 1:
        raise StructureError("one atom has one minimum, so there is nothing to search; give two atoms or more")
    if not len(free):
        raise StructureError(f"constraints hold all {len(start)} atoms; free the atoms that hops may move")


def check_moves(walk: Walk) -> None:
    """Refuse swaps of one element before a force call is spent."""
    elements = set(walk.start.numbers[walk.free].tolist())
    if set(walk.moves) <= {"swap", "permute"} and len(elements) < 2:
        raise SettingsError(
            f"all free atoms are {walk.start.symbols[walk.free[0]]}, so a swap changes nothing; "
            "add another kind of move, such as relocate"
        )
