"""The race as a page: everybody's film in step, calls counting up, the winner by force calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ase import Atoms

from relaxion.bench.comparison import Compared, compared, in_words, minima_in_words, who_relaxed
from relaxion.bench.runs import Run
from relaxion.web.report_facts import versions
from relaxion.web.report_film import film_parts
from relaxion.web.report_page import Page, Part
from relaxion.web.report_relaxation import (
    OURS,
    OUTCOMES,
    citation,
    comparison_rows,
    energy_plot,
    film_part,
    fmax_plot,
    reel,
)


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
    comment: str = ""  # in the file

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


def verdict(race: Race) -> str:
    """`Relaxion wins with 6 force calls`."""
    if not race.winners:
        return "nobody converged"
    calls = race.runs[race.winners[0]].force_calls
    who = " and ".join(race.winners)
    return f"{who} {'wins' if len(race.winners) == 1 else 'tie'} with {calls} force call{'' if calls == 1 else 's'}"


def race_page(race: Race) -> Page:
    """The whole page."""
    everybody = list(race.runs.items())
    films, notes = film_parts([reel(name, race.start, run, winner=name in race.winners) for name, run in everybody])
    notes = [*notes, *race.hints, *filter(None, [minima_in_words(race.runs[OURS], race.others)])]
    parts: list[Part] = [
        {"kind": "tiles", "title": "Result", "tiles": [_tile(name, run, race) for name, run in everybody]},
        film_part(films, "Side by side"),
        {**fmax_plot(everybody, race.tolerance), "span": 6},
        {**energy_plot(everybody), "span": 6},
        comparison_rows(race.runs[OURS], race.others, "Everybody from the same start"),
        {"kind": "facts", "title": "How it was made", "facts": _facts(race)},
    ]
    parts += [{"kind": "notes", "title": "Worth knowing", "notes": notes}] if notes else []
    verdict_in_capitals = verdict(race)[0].upper() + verdict(race)[1:]
    return Page(
        title=verdict_in_capitals,
        eyebrow=f"Relaxion race · {race.label} · {race.formula}",
        lead=f"To fmax {race.tolerance:g} eV/Å: {OURS} {race.runs[OURS].force_calls}, "
        f"{in_words(race.runs[OURS], race.others)}. Calls are counted inside the calculator.",
        parts=[*parts, citation()],
        last_call=max((reading.call for run in race.runs.values() for reading in run.readings), default=1),
    )


def _tile(name: str, run: Run, race: Race) -> dict[str, Any]:
    tone = "good" if name in race.winners else "bad" if run.error else "" if run.converged else "warn"
    note = "winner" if name in race.winners else OUTCOMES.get(run.outcome, run.outcome)
    return {"label": name, "value": str(run.force_calls), "unit": "force calls", "note": note, "tone": tone}


def _facts(race: Race) -> list[dict[str, Any]]:
    what = f"{len(race.start)} atoms, {'free' if race.free_cell else 'fixed'} cell"
    said = [{"label": f"{name} failed", "value": run.error} for name, run in race.runs.items() if run.error]
    return [
        {
            "label": "Structure",
            "value": f"{race.formula}, {what if race.start.pbc.any() else f'{len(race.start)} atoms'}",
        },
        *([{"label": "Comment in the file", "value": race.comment}] if race.comment else []),
        {"label": "Calculator", "value": race.calculator},
        {"label": "Relaxed by", "value": who_relaxed(race.runs[OURS])},
        *said,
        {"label": "Command", "value": race.command, "code": True},
        {"label": "Versions", "value": versions()},
    ]
