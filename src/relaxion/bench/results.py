"""A whole contest: who took part, under which conditions, what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from relaxion.bench.contest import Score
from relaxion.bench.optimizers import CORE, OURS
from relaxion.bench.statistics import Comparison, Summary, best_classical


@dataclass(frozen=True)
class Circumstances:
    """Everything that is needed to do it again."""

    set_name: str
    title: str
    calculator: str
    policy: str
    fmax: float  # eV/Å
    cap: int
    free_cell: bool
    seed: int
    perturb: str | None
    command: str
    interrupted: bool = False
    policies_used: Mapping[str, int] = field(default_factory=dict)  # by ours: name or "classical" -> structures


@dataclass(frozen=True)
class ContestResult:
    """Scores by contestant, in the order of the starts."""

    circumstances: Circumstances
    scores: Mapping[str, Sequence[Score]]
    classical: Sequence[str]  # who is neither ours nor our core

    @property
    def ours(self) -> str:
        """Whom the ratios are about: our relaxer with its policy, or the core where no policy was asked for."""
        return OURS if OURS in self.scores else CORE

    @property
    def n_structures(self) -> int:
        return len(self.scores[self.ours])

    @property
    def best(self) -> str | None:
        return best_classical(self.scores, self.classical)

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        return {name: Summary.of(scores) for name, scores in self.scores.items()}

    @cached_property
    def to_best(self) -> Comparison | None:
        return None if self.best is None else self.compared(self.ours, self.best)

    @cached_property
    def to_core(self) -> Comparison:
        return self.compared(self.ours, CORE)

    def compared(self, name: str, other: str) -> Comparison:
        return Comparison.of(self.scores[name], self.scores[other], other)

    def by_calls(self) -> list[str]:
        """Names, fewest force calls first."""
        return sorted(self.scores, key=lambda name: self.summaries[name].mean.value)

    def errors(self) -> dict[str, list[str]]:
        """What optimizers complained about, by name."""
        return {
            name: [score.error for score in scores if score.error]
            for name, scores in self.scores.items()
            if any(score.error for score in scores)
        }
