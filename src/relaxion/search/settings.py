"""What a search may be told. Defaults were chosen on training pairs of metals (benchmarks/search/README.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from relaxion.errors import SettingsError

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

    softmax_temperature_ev: float = 0.03
    """How strictly the critic takes the best of them."""

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

    calls_per_hop: int = 150
    """A relaxation that needs more is given up."""

    patience_calls: int | None = None
    """Stop when the best energy has not improved for so many calls."""

    seconds: float | None = None
    """Stop after this wall time."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("calls", "walkers", "candidates", "calls_per_hop"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is 1 or more, got {getattr(self, name)}")
        for name in ("temperature_ev", "softmax_temperature_ev", "fmax"):
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
