"""The race as a page: everybody's film in step, calls counting up, the winner by force calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ase import Atoms
from ase.optimize.optimize import Optimizer

from relaxion.apps.compare.comparison import (
    Compared,
    compared,
    in_words,
    minima_in_words,
    run_ase_optimizer,
    run_relaxer,
    who_relaxed,
)
from relaxion.apps.report.film import film_parts
from relaxion.apps.report.page import Page, Part, facts, notes, tile
from relaxion.apps.report.relaxation import OURS, citation, comparison_table, energy_plot, film_part, fmax_plot, reel
from relaxion.apps.report.words import calls, outcome_words, versions
from relaxion.train.judge.optimizers import PolicyChoice
from relaxion.train.judge.runs import OnCall, RelaxationTask, Run


@dataclass(frozen=True)
class Race:
    """Who ran, from where, and how they fared; ours is the first."""

    label: str
    start: Atoms
    runs: Mapping[str, Run]
    tolerance: float  # eV/Å
    calculator: str
    free_cell: bool
    command: str
    hints: Sequence[str] = ()

    @property
    def winners(self) -> list[str]:
        """Converged with the fewest force calls; several if they tie, none if nobody converged."""
        arrived = {name: run.force_calls for name, run in self.runs.items() if run.converged}
        return [name for name, calls in arrived.items() if calls == min(arrived.values())]

    @property
    def others(self) -> list[Compared]:
        ours = self.runs[OURS]
        return [compared(name, run, ours, len(self.start)) for name, run in self.runs.items() if name != OURS]

    @property
    def formula(self) -> str:
        return self.start.symbols.formula.format("metal")


def raced(
    task: RelaxationTask, choice: PolicyChoice, others: Mapping[str, type[Optimizer]], reporter: Callable[[str], OnCall]
) -> dict[str, Run]:
    """All from the same start, ours first; `reporter` makes what is told of each force call of one of them."""
    runs = {OURS: run_relaxer(task, choice, None, None, reporter(OURS))}
    if runs[OURS].outcome == "interrupted":
        raise KeyboardInterrupt
    return runs | {name: run_ase_optimizer(kind, task, reporter(name)) for name, kind in others.items()}


def verdict(race: Race) -> str:
    """`Relaxion wins with 6 force calls`."""
    if not race.winners:
        return "nobody converged"
    verb = "wins" if len(race.winners) == 1 else "tie"
    return f"{' and '.join(race.winners)} {verb} with {calls(race.runs[race.winners[0]].force_calls)}"


def race_page(race: Race) -> Page:
    """The whole page."""
    everybody = list(race.runs.items())
    ours = race.runs[OURS]
    films, thinned = film_parts([reel(name, race.start, run, winner=name in race.winners) for name, run in everybody])
    parts: list[Part] = [
        {"kind": "tiles", "title": "Result", "tiles": [_tile(name, run, race) for name, run in everybody]},
        film_part(films, "Side by side"),
        {**fmax_plot(everybody, race.tolerance), "span": 6},
        {**energy_plot(everybody), "span": 6},
        comparison_table(ours, race.others, "All from the same start"),
        _facts(race),
        *notes([*thinned, *race.hints, *filter(None, [minima_in_words(ours, race.others)])]),
        citation(),
    ]
    title = verdict(race)
    return Page(
        title=title[0].upper() + title[1:],
        eyebrow=f"Relaxion race · {race.label} · {race.formula}",
        lead=f"To fmax {race.tolerance:g} eV/Å: {OURS} {ours.force_calls}, {in_words(ours, race.others)}. "
        "Calls are counted inside the calculator.",
        parts=parts,
        last_call=max((reading.call for run in race.runs.values() for reading in run.readings), default=1),
    )


def _tile(name: str, run: Run, race: Race) -> dict[str, str]:
    won = name in race.winners
    tone = "good" if won else "bad" if run.error else "" if run.converged else "warn"
    return tile(name, str(run.force_calls), "force calls", "winner" if won else outcome_words(run.outcome), tone)


def _facts(race: Race) -> Part:
    cell = f", {'free' if race.free_cell else 'fixed'} cell" if race.start.pbc.any() else ""
    found = [
        ("Structure", f"{race.formula}, {len(race.start)} atoms{cell}"),
        ("Calculator", race.calculator),
        ("Relaxed by", who_relaxed(race.runs[OURS])),
        *((f"{name} failed", run.error) for name, run in race.runs.items()),
        ("Command", race.command),
        ("Versions", versions()),
    ]
    return facts("How it was made", found)
