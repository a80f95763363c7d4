"""The report of one relaxation: film, curves, comparison, facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms
from ase.optimize.optimize import Optimizer

from relaxion.apps.comparison import Compared, compared, in_words, minima_in_words, run_ase_optimizer, run_relaxer
from relaxion.apps.report.page import (
    CITATION,
    FAINT,
    HOW,
    METHODS,
    Page,
    Part,
    Reel,
    atoms_words,
    calls,
    cell_words,
    closest_pair,
    facts,
    film_parts,
    fixed,
    formula,
    notes,
    outcome_words,
    plot,
    rounded,
    signed,
    space_group,
    table,
    tile,
    versions,
)
from relaxion.optimizer.choice import CORE
from relaxion.optimizer.point import Frame
from relaxion.train.judge.runs import OnCall, PolicyChoice, Reading, RelaxationTask, Run
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM

OURS = "Relaxion"


@dataclass(frozen=True)
class RelaxationReport:
    """Everything the page shows; whoever has relaxed something fills it in."""

    label: str  # usually the file
    start: Atoms
    run: Run  # ours, with readings and frames; `final` is where it ended
    tolerance: float | None  # fmax asked for, eV/Å
    calculator: str
    policy: str
    free_cell: bool
    command: str | None = None
    others: Sequence[Compared] = ()  # from the same start
    hints: Sequence[str] = ()

    @property
    def runs(self) -> dict[str, Run]:
        """By optimizer, ours first."""
        return {OURS: self.run} | {other.name: other.run for other in self.others}

    @property
    def winners(self) -> list[str]:
        """Converged with the fewest force calls; several if they tie, none if nobody converged."""
        arrived = {name: run.force_calls for name, run in self.runs.items() if run.converged}
        return [name for name, calls in arrived.items() if calls == min(arrived.values())]


def relaxation_page(told: RelaxationReport) -> Page:
    """The film of ours, with the curves of all."""
    words = calls(told.run.force_calls)
    ended = f"relaxed in {words}" if told.run.converged else f"after {words}: {outcome_words(told.run.outcome)}"
    return _page(
        told, {OURS: told.run}, _tiles(told), title=f"{formula(told.start)} {ended}",
        eyebrow=f"Relaxion report · {told.label}", lead=_lead(told),
    )  # fmt: skip


def race_page(told: RelaxationReport) -> Page:
    """Everybody's film in step, calls counting up, the winner by force calls."""
    tiles = []
    for name, run in told.runs.items():
        won = name in told.winners
        tone = "good" if won else "bad" if run.error else "" if run.converged else "warn"
        note = "winner" if won else outcome_words(run.outcome)
        tiles.append(tile(name, str(run.force_calls), "force calls", note, tone))
    title = verdict(told)
    tolerance = f"To fmax {told.tolerance:g} eV/Å: {OURS} {told.run.force_calls}"
    return _page(
        told, told.runs, tiles, title=title[0].upper() + title[1:],
        eyebrow=f"Relaxion race · {told.label} · {formula(told.start)}",
        lead=f"{tolerance}, {in_words(told.run, told.others)}. Calls are counted inside the calculator.",
    )  # fmt: skip


def verdict(told: RelaxationReport) -> str:
    """`Relaxion wins with 6 force calls`."""
    if not told.winners:
        return "nobody converged"
    verb = "wins" if len(told.winners) == 1 else "tie"
    return f"{' and '.join(told.winners)} {verb} with {calls(told.runs[told.winners[0]].force_calls)}"


def raced(
    task: RelaxationTask, choice: PolicyChoice, others: Mapping[str, type[Optimizer]], reporter: Callable[[str], OnCall]
) -> tuple[Run, list[Compared]]:
    """All from the same start, ours first; `reporter` makes what is told of each force call of one of them."""
    ours = run_relaxer(task, choice, None, None, reporter(OURS))
    if ours.outcome == "interrupted":
        raise KeyboardInterrupt
    runs = {name: run_ase_optimizer(kind, task, reporter(name)) for name, kind in others.items()}
    return ours, [compared(name, run, ours, len(task.start)) for name, run in runs.items()]


def _page(told: RelaxationReport, filmed: Mapping[str, Run], tiles: list[dict[str, str]], **heading: Any) -> Page:
    several = len(filmed) > 1
    reels = [_reel(name, told.start, run, winner=several and name in told.winners) for name, run in filmed.items()]
    films, thinned = film_parts(reels)
    parts: list[Part] = [
        {"kind": "tiles", "title": "Result", "tiles": tiles},
        _film_part(films, "Side by side" if several else "Relaxation"),
        {**_fmax_plot(told), "span": 6 if several else 5},
        {**_energy_plot(told), "span": 6 if several else 5},
    ]
    parts += [_comparison_table(told)] if told.others else []
    parts += [_structure_facts(told), _run_facts(told)]
    parts += notes([*thinned, *told.hints, *filter(None, [minima_in_words(told.run, told.others)])])
    last = max((reading.call for run in filmed.values() for reading in run.readings), default=1)
    return Page(parts=[*parts, citation()], last_call=last, **heading)


def citation() -> Part:
    return facts("How to cite", [("BibTeX", CITATION)], id="citation")


def _reel(name: str, start: Atoms, run: Run, *, winner: bool = False) -> Reel:
    """A film of a run; of one that failed at once, a still of the start."""
    frames = run.frames or (Frame(1, np.asarray(start.positions, dtype=np.float32), np.asarray(start.cell)),)
    end = outcome_words(run.outcome, run.fmax_ev_per_angstrom)
    periodic = bool(start.pbc.any())
    cannot_move = [np.ravel(one.get_indices()) for one in start.constraints if isinstance(one, FixAtoms)]
    held = frozenset(int(index) for some in cannot_move for index in some)
    return Reel(name, start.numbers, periodic, frames, run.readings, end, run.converged, winner, held)


def _film_part(films: list[dict[str, Any]], title: str) -> Part:
    """Beside two plots on a wide screen; several films take the whole width."""
    shape = {"span": 7, "rows_tall": 2} if len(films) == 1 else {"span": 12}
    said = [HOW, *([FAINT] if any(film["fixed"] for film in films) else [])]
    return {"kind": "film", "title": title, "films": films, "notes": said, **shape}


def policy_in_words(asked: str | Path | None, used: str | None) -> str:
    """What was asked for, and who relaxed."""
    asked = "none" if asked is None else str(asked)
    if used is None or used == CORE:
        return f"{asked}: the classical optimizer"
    return used if used == asked else f"{asked}: {used}"


def _lead(told: RelaxationReport) -> str:
    """What it cost the others, or how small the forces became."""
    if told.others:
        return f"{in_words(told.run, told.others)}, counted inside the calculator."
    if told.run.error:
        return told.run.error
    cell = "Atoms and cell" if told.free_cell else "Atoms in a fixed cell" if told.start.pbc.any() else "Atoms"
    pressure = f" at {told.run.pressure_gpa:g} GPa" if told.run.pressure_gpa else ""
    return f"{cell}{pressure}, {len(told.start)} in all, calculator {told.calculator}."


def _tiles(told: RelaxationReport) -> list[dict[str, str]]:
    run = told.run
    first = next((one for one in told.run.readings if one.energy_ev is not None), None)
    tone = "good" if run.converged else "warn" if run.error is None else "bad"
    found = [tile("Force calls", str(run.force_calls), note=outcome_words(run.outcome), tone=tone)]
    if run.fmax_ev_per_angstrom is not None:
        asked = "" if told.tolerance is None else f"tolerance {told.tolerance:g}"
        found.append(tile("Largest force", f"{run.fmax_ev_per_angstrom:.2g}", "eV/Å", asked))
    if first is not None:
        found += _change("Energy change", first.energy_ev, run.energy_ev)
        at = f" at {run.pressure_gpa:g} GPa"
        found += _change("Enthalpy change", first.enthalpy_ev, run.enthalpy_ev, at) if run.pressure_gpa else []
    if run.final is not None:
        moved = np.linalg.norm(run.final.positions - told.start.positions, axis=1)
        where = f"atom {int(moved.argmax())}, mean {moved.mean():.2g}"
        found.append(tile("Farthest move", f"{moved.max():.2g}", "Å", where))
    if run.final is not None and told.free_cell:
        after = run.final.get_volume()
        change = signed(100 * (after / told.start.get_volume() - 1), ".1f")
        found.append(tile("Volume", change, "%", f"to {after:.2f} Å³"))
    if run.model_used:
        found.append(tile("Model calls", str(run.model_calls), note=run.model_used))
    if run.wall_time_seconds > 0:
        found.append(tile("Wall time", f"{run.wall_time_seconds:.2g}", "s", "including the calculator"))
    return found


def _change(label: str, first: float | None, last: float | None, where: str = "") -> list[dict[str, str]]:
    if first is None or last is None:
        return []
    return [tile(label, signed(last - first, ".3f"), "eV", f"to {fixed(last, '.4f')} eV{where}")]


def _fmax_plot(told: RelaxationReport) -> Part:
    """On a logarithmic axis, with the line to get below."""
    tolerance = told.tolerance
    limits = [] if tolerance is None else [{"value": tolerance, "label": f"tolerance {tolerance:g} eV/Å"}]
    series = [_series(name, run.readings, "fmax_ev_per_angstrom") for name, run in told.runs.items() if run.readings]
    return _plot("Largest force", "fmax (eV/Å)", series, log=True, limits=limits)


def _energy_plot(told: RelaxationReport) -> Part:
    """What is minimised, above the end of ours; on a logarithmic axis, so that small differences show."""
    zero = told.run.enthalpy_ev
    what = "enthalpy" if told.run.pressure_gpa else "energy"
    readings = {name: run.readings for name, run in told.runs.items() if run.readings}
    series = [_series(name, some, "enthalpy_ev", zero or 0.0) for name, some in readings.items()]
    title = what.capitalize() + ("" if zero is None else f" above the final {what} of {OURS}")
    above = [value for one in series for value in one["y"] if value is not None and value > 0]
    return _plot(title, f"{what} (eV)", series, log=zero is not None and len(above) > 1)


def _plot(title: str, y_label: str, series: list[dict[str, Any]], **more: Any) -> Part:
    known = [[f"{value:.3g}" for value in one["y"] if value is not None] or ["nothing"] for one in series]
    ends = [
        f"{one['name']} from {values[0]} to {values[-1]} in {one['x'][-1]} calls"
        for one, values in zip(series, known, strict=True)
    ]
    summary = f"{y_label} against force calls; {'; '.join(ends)}."
    return plot(title, "force calls", y_label, series, summary, **more)


def _series(name: str, readings: Sequence[Reading], what: str, zero: float = 0.0) -> dict[str, Any]:
    values = [getattr(reading, what) for reading in readings]
    return {
        "name": name,
        "x": [reading.call for reading in readings],
        "y": [None if value is None else rounded([value - zero])[0] for value in values],
        "open": [not reading.accepted for reading in readings],
    }


def _comparison_table(told: RelaxationReport) -> Part:
    """Ours and the others; whoever needed the fewest calls stands out."""
    ours = told.run
    same = {other.name: _same_minimum(ours, other) for other in told.others}
    rows = [
        {"cells": [name, *_cells(run), same.get(name, "")], "best": name in told.winners}
        for name, run in told.runs.items()
    ]
    enthalpy = [f"Enthalpy at {ours.pressure_gpa:g} GPa (eV)"] if ours.pressure_gpa else []
    headings = ["Optimizer", "Force calls", "Outcome", "Energy (eV)", *enthalpy, "fmax (eV/Å)", "Time (s)"]
    headings.append("Same minimum")
    note = (
        "Force calls are counted inside the calculator; rejected points and line searches count. Minima are "
        f"the same within {SAME_MINIMUM_EV_PER_ATOM * 1000:g} meV{' of enthalpy' if enthalpy else ''} per atom. "
        "The green row needed the fewest calls."
    )
    caption = "Comparison with other optimizers, from the same start"
    return table(caption, headings, rows, text=("Outcome", "Same minimum"), note=note)


def _cells(run: Run) -> list[str]:
    enthalpy = [(run.enthalpy_ev, ".4f")] if run.pressure_gpa else []
    numbers = [(run.energy_ev, ".4f"), *enthalpy, (run.fmax_ev_per_angstrom, ".2g"), (run.wall_time_seconds, ".2f")]
    return [str(run.force_calls), outcome_words(run.outcome), *(fixed(*number) for number in numbers)]


def _same_minimum(ours: Run, other: Compared) -> str:
    gap = other.above_ours_ev_per_atom
    if gap is None or not (ours.converged and other.run.converged):
        return "–"
    return "yes" if not other.other_minimum else f"no, {signed(1000 * gap, '.1f')} meV/atom"


def _structure_facts(told: RelaxationReport) -> Part:
    start = told.start
    final = told.run.final
    comment = told.start.info.get("comment")
    found = [
        ("Formula", formula(start)),
        ("Atoms", atoms_words(start)),
        ("Cell", cell_words(start)),
        ("Cell after", cell_words(final) if final is not None and told.free_cell else None),
        ("Space group before", space_group(start) if start.pbc.any() else None),
        ("Space group after", space_group(final) if final is not None and start.pbc.any() else None),
        *_energies(told.run),
        ("Closest pair before", closest_pair(start)),
        ("Closest pair after", None if final is None else closest_pair(final)),
        ("Comment in the file", comment if isinstance(comment, str) and comment.strip() else None),
    ]
    return facts("Structure", found, span=6)


def _energies(run: Run) -> list[tuple[str, str]]:
    """Before and after, of what was minimised too."""
    first = next((one for one in run.readings if one.energy_ev is not None), None)
    if first is None or run.energy_ev is None:
        return []
    found = [("Energy before", first.energy_ev), ("Energy after", run.energy_ev)]
    if run.pressure_gpa:
        found += [("Enthalpy before", first.enthalpy_ev), ("Enthalpy after", run.enthalpy_ev)]
    return [(label, f"{fixed(value, '.6f')} eV") for label, value in found]


def _run_facts(told: RelaxationReport) -> Part:
    run = told.run
    found = [
        ("Outcome", outcome_words(run.outcome, run.fmax_ev_per_angstrom)),
        ("Policy", told.policy),
        ("Calculator", told.calculator),
        ("Pressure", f"{run.pressure_gpa:g} GPa" if run.pressure_gpa else None),
        ("Tolerance", None if told.tolerance is None else f"fmax {told.tolerance:g} eV/Å"),
        ("Steps", _methods_in_words(run.readings)),
        ("End", run.end_check.in_words()),
        ("Error", run.error),
        *((f"{other.name} failed", other.run.error) for other in told.others),
        ("Command", told.command),
        ("Versions", versions()),
    ]
    return facts("How it was made", found, span=6)


def _methods_in_words(readings: Sequence[Reading]) -> str:
    made = Counter(METHODS.get(one.method, one.method) for one in readings if one.method not in ("", "start"))
    rejected = sum(not reading.accepted for reading in readings)
    words = [f"{number} by {method}" for method, number in made.items()]
    return ", ".join([*words, *([f"{rejected} rejected"] if rejected else [])])
