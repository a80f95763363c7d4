"""Settings of a search, and who chooses the next hop of a walker: a fixed mixture of kinds, or a bandit over kinds.

The critic has a file of its own (`critic_choice.py`). A chooser has `choose(walkers, draw)`, one candidate for each
walker; `learn(hop)`, called after each hop; `state()` and `restore(state)`, plain values for the state file. Defaults
were chosen on training pairs of metals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from ase import Atoms

from relaxion.errors import SettingsError
from relaxion.search.moves import Distances, Move, alike

CHOICES = ("auto", "mixture", "bandit", "critic")


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """One search."""

    calls: int = 2000
    """Force calls in all; never exceeded."""

    walkers: int = 1
    """Chains of hops side by side, relaxed in one batch. One finds most per force call, several save wall time."""

    choice: str = "auto"
    """mixture, bandit, critic, or the file of a critic. auto: the critic that ships where it knows all elements, else
    the bandit."""

    moves: Mapping[str, float] = field(default_factory=dict)
    """Kinds with their shares; none: those that fit the structure."""

    temperature_ev: float = 0.1
    """Metropolis: a hop uphill by this is accepted once in e times."""

    candidates: int = 16
    """Trial structures between which the critic chooses."""

    learn: bool = True
    """The critic goes on learning from the hops of this search."""

    fmax: float = 0.05
    """eV/Å; largest force at a minimum."""

    cell: bool = False
    """Relax the cell too."""

    pressure_gpa: float = 0.0
    """On a free cell."""

    policy: str | None = "auto"
    """Of the relaxations, as in `Relaxer`."""

    patience_calls: int | None = None
    """Stop when the best energy has not improved for so many calls."""

    seconds: float | None = None
    """Stop after this wall time."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("calls", "walkers", "candidates"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is 1 or more, got {getattr(self, name)}")
        for name in ("temperature_ev", "fmax"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{name} is above 0, got {value}")
        if self.patience_calls is not None and self.patience_calls < 1:
            raise SettingsError(f"patience_calls is 1 or more, got {self.patience_calls}; leave it out for no limit")
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"seconds is above 0, got {self.seconds}; leave it out for no limit")
        if any(not (math.isfinite(share) and share >= 0) for share in self.moves.values()):
            raise SettingsError(f"shares of moves are 0 or more, got {dict(self.moves)}")
        if self.moves and not sum(self.moves.values()) > 0:
            raise SettingsError("all shares of moves are 0; give one kind a share above 0")
        if self.seed < 0:
            raise SettingsError(f"a seed is 0 or more, got {self.seed}")


SOFTMAX_EV = 0.03  # how strictly the best of several hops is taken
TRIES = 30  # draws before a walker is said to have no move


@dataclass(frozen=True, eq=False)
class PossibleHop:
    """A trial structure, not relaxed, and the kind of move that made it."""

    kind: str
    trial: Atoms
    look: np.ndarray  # of the trial, as `Distances.look` has it


@dataclass(eq=False)
class Walker:
    """One chain of minima."""

    atoms: Atoms  # the minimum where it stands
    energy_ev: float
    minimum: int  # its number
    best_ev: float  # since it began anew
    random: np.random.Generator
    idle_hops: int = 0  # that were relaxed since its best energy fell


@dataclass(frozen=True, eq=False)
class Hop:
    """One hop that was tried."""

    walker: int
    kind: str
    before: Atoms
    energy_before_ev: float
    trial: Atoms
    energy_after_ev: float | None  # None: it failed, or did not end in a minimum
    calls: int
    outcome: str  # one of the words of `search.OUTCOMES`
    accepted: bool


@dataclass(frozen=True, eq=False)
class Draw:
    """Makes candidates: kinds with their functions, the atoms that may move, the usual bond length.

    A trial that was relaxed before from the same minimum is drawn only where nothing else is found.
    """

    moves: Mapping[str, Move]
    shares: Mapping[str, float]  # of the fixed mixture, sum 1
    free: np.ndarray
    bond_scale: float
    tried: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)  # looks of trials, by minimum

    def of_kind(self, kind: str, walker: Walker) -> PossibleHop | None:
        """None where this kind finds nothing, or brings atoms too near to each other."""
        try:
            trial = self.moves[kind](walker.atoms, self.free, walker.random)
        except Exception as error:
            raise SettingsError(f"the move '{kind}' failed: {type(error).__name__}: {error}") from error
        if trial is None:
            return None
        geometry = Distances.of(trial, self.bond_scale)
        return None if geometry.too_close else PossibleHop(kind, trial, geometry.look(trial.numbers))

    def look(self, atoms: Atoms) -> np.ndarray:
        """As `Distances.look`."""
        return Distances.of(atoms, self.bond_scale).look(atoms.numbers)

    def is_new(self, hop: PossibleHop, walker: Walker) -> bool:
        """Whether no such trial was relaxed from the minimum of the walker."""
        return not alike(hop.look, self.tried.get(walker.minimum, ()))

    def one(self, walker: Walker, shares: Mapping[str, float] | None = None) -> PossibleHop | None:
        """By the shares, a new one where `TRIES` draws bring one; None where they bring nothing."""
        shares = shares or self.shares
        kinds = list(shares)
        weights = np.array([shares[kind] for kind in kinds])
        known: PossibleHop | None = None
        for _ in range(TRIES):
            kind = kinds[int(walker.random.choice(len(kinds), p=weights / weights.sum()))]
            candidate = self.of_kind(kind, walker)
            if candidate is not None and self.is_new(candidate, walker):
                return candidate
            known = known or candidate
        return known

    def several(self, walker: Walker, number: int) -> list[PossibleHop]:
        """So many draws; of those that look alike the first."""
        found: list[PossibleHop] = []
        for _ in range(number):
            candidate = self.one(walker)
            if candidate is not None and not alike(candidate.look, [other.look for other in found]):
                found.append(candidate)
        return found


def softmax_pick(energies_ev: np.ndarray, temperature_ev: float, random: np.random.Generator) -> int:
    """Low energies are taken more often; small temperatures take the lowest."""
    weights = np.exp(-(energies_ev - energies_ev.min()) / temperature_ev)
    return int(random.choice(len(energies_ev), p=weights / weights.sum()))


class HopChooser(Protocol):
    """See the module."""

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]: ...

    def learn(self, hop: Hop) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Mixture:
    """Kinds by fixed shares."""

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        return [draw.one(walker) for walker in walkers]

    def learn(self, hop: Hop) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class MoveTally:
    """What one kind has brought so far."""

    hops: int = 0
    lower: int = 0  # hops that ended below where they began
    calls: int = 0


@dataclass
class Bandit:
    """Thompson sampling over kinds: how often a hop ends lower, over the calls that it takes."""

    prior_hops: float = 4.0  # hops that the prior is worth
    tallies: dict[str, MoveTally] = field(default_factory=dict)

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        return [self._one(walker, draw) for walker in walkers]

    def _one(self, walker: Walker, draw: Draw) -> PossibleHop | None:
        hops = sum(tally.hops for tally in self.tallies.values())
        calls = sum(tally.calls for tally in self.tallies.values())
        lower = sum(tally.lower for tally in self.tallies.values())
        usual_calls = (calls + 10) / (hops + 1)
        usual_chance = (lower + 0.2) / (hops + 2)
        rates = {}
        for kind in draw.shares:
            tally = self.tallies.get(kind, MoveTally())
            hits = self.prior_hops * usual_chance + tally.lower
            misses = self.prior_hops * (1 - usual_chance) + tally.hops - tally.lower
            cost = (self.prior_hops * usual_calls + tally.calls) / (self.prior_hops + tally.hops)
            rates[kind] = walker.random.beta(hits, misses) / cost
        for kind in sorted(rates, key=lambda kind: -rates[kind]):
            for _ in range(3):
                candidate = draw.of_kind(kind, walker)
                if candidate is not None and draw.is_new(candidate, walker):
                    return candidate
        return draw.one(walker)

    def learn(self, hop: Hop) -> None:
        tally = self.tallies.setdefault(hop.kind, MoveTally())
        tally.hops += 1
        tally.calls += hop.calls
        tally.lower += hop.energy_after_ev is not None and hop.energy_after_ev < hop.energy_before_ev - 1e-3

    def state(self) -> dict[str, Any]:
        return {kind: [tally.hops, tally.lower, tally.calls] for kind, tally in self.tallies.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tallies = {kind: MoveTally(*numbers) for kind, numbers in state.items()}
