"""The report of one relaxation: film, curves, comparison, facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from relaxion.bench.comparison import Compared, in_words, minima_in_words
from relaxion.bench.runs import Reading, Run
from relaxion.bench.statistics import SAME_MINIMUM_EV_PER_ATOM
from relaxion.optimize.choice import CORE
from relaxion.optimize.film import Frame
from relaxion.web.report_facts import CITATION, closest_pair, space_group, versions
from relaxion.web.report_film import METHODS, Reel, film_parts
from relaxion.web.report_page import Page, Part

OURS = "Relaxion"
OUTCOMES = {
    "converged": "converged",
    "step_limit": "step limit reached",
    "stalled": "stalled",
    "blocked": "blocked",
    "non_finite": "answer not finite",
    "interrupted": "interrupted",
    "error": "failed",
    "running": "still running",
}


@dataclass(frozen=True)
class Relaxation:
    """Everything the page tells; whoever has relaxed something fills it in."""

    label: str  # usually the file
    start: Atoms
    run: Run  # with readings and frames; `final` is where it ended
    tolerance: float | None  # fmax asked for, eV/Å
    calculator: str
    policy: str
    free_cell: bool
    command: str | None = None
    others: Sequence[Compared] = field(default_factory=tuple)
    hints: Sequence[str] = field(default_factory=tuple)

    @property
    def formula(self) -> str:
        return self.start.symbols.formula.format("metal")


def relaxation_page(told: Relaxation) -> Page:
    """The whole report."""
    films, notes = film_parts([reel(OURS, told.start, told.run)])
    notes = [*notes, *told.hints, *filter(None, [minima_in_words(told.run, told.others)])]
    runs = [(OURS, told.run), *((other.name, other.run) for other in told.others)]
    parts: list[Part] = [
        {"kind": "tiles", "title": "Result", "tiles": tiles(told)},
        film_part(films, "The way down"),
        fmax_plot(runs, told.tolerance),
        energy_plot(runs),
    ]
    if told.others:
        parts.append(comparison_rows(told.run, told.others, "This run beside others, from the same start"))
    parts.append({"kind": "facts", "title": "Structure", "span": 6, "facts": structure_facts(told)})
    parts.append({"kind": "facts", "title": "How it was made", "span": 6, "facts": run_facts(told)})
    parts += [{"kind": "notes", "title": "Worth knowing", "notes": notes}] if notes else []
    parts.append(citation())
    return Page(
        title=f"{told.formula} {what_happened(told.run)}",
        eyebrow=f"Relaxion report · {told.label}",
        lead=lead(told),
        parts=parts,
        last_call=max([reading.call for reading in told.run.readings], default=1),
    )


def citation() -> Part:
    return {"kind": "facts", "title": "How to cite", "facts": [{"label": "BibTeX", "value": CITATION, "code": True}]}


def reel(name: str, start: Atoms, run: Run, *, winner: bool = False) -> Reel:
    """A film of a run; of one that failed at once, a still of the start."""
    frames = run.frames or (Frame(1, np.asarray(start.positions, dtype=np.float32), np.asarray(start.cell)),)
    return Reel(name, start.numbers, bool(start.pbc.any()), frames, run.readings, end_words(run), run.converged, winner)


def film_part(films: list[dict[str, Any]], title: str) -> Part:
    """Beside two plots on a wide screen; several films take the whole width."""
    shape = {"span": 7, "rows_tall": 2} if len(films) == 1 else {"span": 12}
    how = "Each frame is one force call. Drag to turn, Ctrl and wheel to zoom."
    return {"kind": "film", "title": title, "films": films, "notes": [how], **shape}


def policy_in_words(asked: str | Path | None, used: str | None) -> str:
    """What was asked for, and who relaxed."""
    asked = "none" if asked is None else str(asked)
    if used is None or used == CORE:
        return f"{asked}: the classical core"
    return used if used == asked else f"{asked}: {used}"


def end_words(run: Run) -> str:
    fmax = "" if run.fmax_ev_per_angstrom is None else f", fmax {run.fmax_ev_per_angstrom:.2g} eV/Å"
    return f"{OUTCOMES.get(run.outcome, run.outcome)}{fmax}"


def what_happened(run: Run) -> str:
    calls = f"{run.force_calls} force call{'' if run.force_calls == 1 else 's'}"
    if run.converged:
        return f"relaxed in {calls}"
    return f"after {calls}: {OUTCOMES.get(run.outcome, run.outcome)}"


def lead(told: Relaxation) -> str:
    """What it cost the others, or how small the forces became."""
    if told.others:
        return f"{in_words(told.run, told.others)}, counted inside the calculator."
    if told.run.error:
        return told.run.error
    cell = "Atoms and cell" if told.free_cell else "Atoms in a fixed cell" if told.start.pbc.any() else "Atoms"
    return f"{cell}, {len(told.start)} in all, calculator {told.calculator}."


def tiles(told: Relaxation) -> list[dict[str, Any]]:
    run = told.run
    finite = [reading for reading in run.readings if reading.energy_ev is not None]
    found: list[dict[str, Any]] = [
        {
            "label": "Force calls",
            "value": str(run.force_calls),
            "note": OUTCOMES.get(run.outcome, run.outcome),
            "tone": "good" if run.converged else "warn" if run.error is None else "bad",
        }
    ]
    if run.fmax_ev_per_angstrom is not None:
        note = "" if told.tolerance is None else f"asked for: {told.tolerance:g}"
        found.append(
            {"label": "Largest force", "value": f"{run.fmax_ev_per_angstrom:.2g}", "unit": "eV/Å", "note": note}
        )
    if run.energy_ev is not None and finite and finite[0].energy_ev is not None:
        gained = run.energy_ev - finite[0].energy_ev
        found.append(
            {
                "label": "Energy change",
                "value": signed(gained, ".3f"),
                "unit": "eV",
                "note": f"to {run.energy_ev:.4f} eV",
            }
        )
    if run.final is not None:
        found += _geometry_tiles(told, run.final)
    if run.wall_time_seconds > 0:
        found.append(
            {"label": "Wall time", "value": f"{run.wall_time_seconds:.2g}", "unit": "s", "note": "calculator included"}
        )
    return found


def _geometry_tiles(told: Relaxation, final: Atoms) -> list[dict[str, Any]]:
    moved = np.linalg.norm(final.positions - told.start.positions, axis=1)
    note = f"atom {int(moved.argmax())}, mean {moved.mean():.2g}"
    found = [{"label": "Farthest move", "value": f"{moved.max():.2g}", "unit": "Å", "note": note}]
    if told.free_cell:
        before, after = told.start.get_volume(), final.get_volume()
        change = signed(100 * (after / before - 1), ".1f")
        found.append({"label": "Volume", "value": change, "unit": "%", "note": f"to {after:.2f} Å³"})
    return found


def fmax_plot(runs: Sequence[tuple[str, Run]], tolerance: float | None) -> Part:
    """On a logarithmic axis, with the line to get below."""
    limits = [] if tolerance is None else [{"value": tolerance, "label": f"tolerance {tolerance:g} eV/Å"}]
    series = [_series(name, run.readings, "fmax_ev_per_angstrom") for name, run in runs if run.readings]
    return _plot("Largest force", "fmax (eV/Å)", series, {"log": True, "limits": limits})


def energy_plot(runs: Sequence[tuple[str, Run]]) -> Part:
    """Above the end of the first run, so that small differences can be seen."""
    ours, first = runs[0]
    zero = 0.0 if first.energy_ev is None else first.energy_ev
    series = [_series(name, run.readings, "energy_ev", zero) for name, run in runs if run.readings]
    title = "Energy" if first.energy_ev is None else f"Energy above the end of {ours}"
    return _plot(title, "energy (eV)", series, {"log": False})


def _plot(title: str, y_label: str, series: list[dict[str, Any]], more: dict[str, Any]) -> Part:
    ends = [
        f"{one['name']} from {_known(one['y'], 0)} to {_known(one['y'], -1)} in {one['x'][-1]} calls" for one in series
    ]
    return {
        "kind": "plot", "title": title, "span": 5, "x_label": "force calls", "y_label": y_label, "series": series,
        "summary": f"{y_label} against force calls; {'; '.join(ends)}.", **more,
    }  # fmt: skip


def _known(values: Sequence[float | None], place: int) -> str:
    known = [value for value in values if value is not None]
    return f"{known[place]:.3g}" if known else "nothing"


def _series(name: str, readings: Sequence[Reading], what: str, zero: float = 0.0) -> dict[str, Any]:
    values = [getattr(reading, what) for reading in readings]
    return {
        "name": name,
        "x": [reading.call for reading in readings],
        "y": [None if value is None else _rounded(value - zero) for value in values],
        "open": [not reading.accepted for reading in readings],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def comparison_rows(ours: Run, others: Sequence[Compared], caption: str) -> Part:
    """Ours and the others; whoever needed the fewest calls stands out."""
    everybody = [(OURS, ours, ""), *((other.name, other.run, same_minimum(ours, other)) for other in others)]
    fewest = min((run.force_calls for _, run, _ in everybody if run.converged), default=None)
    rows = [
        {"cells": [name, *table_cells(run), same], "best": run.converged and run.force_calls == fewest}
        for name, run, same in everybody
    ]
    headings = ["Optimizer", "Force calls", "Outcome", "Energy (eV)", "fmax (eV/Å)", "Time (s)", "Same minimum"]
    return {
        "kind": "table",
        "caption": caption,
        "columns": [{"label": heading, "text": heading in ("Outcome", "Same minimum")} for heading in headings],
        "rows": rows,
        "note": "Force calls are counted inside the calculator; rejected points and line searches count. Minima are "
        f"the same within {SAME_MINIMUM_EV_PER_ATOM * 1000:g} meV per atom. The green row needed the fewest calls.",
    }


def table_cells(run: Run) -> list[str]:
    numbers = [(run.energy_ev, ".4f"), (run.fmax_ev_per_angstrom, ".2g"), (run.wall_time_seconds, ".2f")]
    shown = ["–" if value is None else format(value, style).replace("-", "−") for value, style in numbers]
    return [str(run.force_calls), OUTCOMES.get(run.outcome, run.outcome), *shown]


def same_minimum(ours: Run, other: Compared) -> str:
    gap = other.above_ours_ev_per_atom
    if gap is None or not (ours.converged and other.run.converged):
        return "–"
    return "yes" if not other.other_minimum else f"no, {signed(1000 * gap, '.1f')} meV/atom"


def structure_facts(told: Relaxation) -> list[dict[str, Any]]:
    final = told.run.final
    facts = [("Formula", told.formula), ("Atoms", _atoms_in_words(told.start)), ("Cell", _cell_in_words(told.start))]
    if final is not None and told.free_cell:
        facts.append(("Cell after", _cell_in_words(final)))
    facts.append(("Space group before", space_group(told.start)))
    facts += [] if final is None else [("Space group after", space_group(final))]
    facts.append(("Closest pair before", closest_pair(told.start)))
    facts += [] if final is None else [("Closest pair after", closest_pair(final))]
    comment = told.start.info.get("comment")
    facts += [("Comment in the file", comment)] if isinstance(comment, str) and comment.strip() else []
    return [{"label": label, "value": value} for label, value in facts]


def _atoms_in_words(atoms: Atoms) -> str:
    held = len(
        {
            index
            for constraint in atoms.constraints
            for index in np.ravel(constraint.todict()["kwargs"].get("indices", []))
        }
    )
    return f"{len(atoms)}" + (f", {held} of them held" if held else "")


def _cell_in_words(atoms: Atoms) -> str:
    if not atoms.pbc.any():
        return "none"
    lengths = " × ".join(f"{length:.3f}" for length in atoms.cell.lengths())
    angles = ", ".join(f"{angle:.1f}°" for angle in atoms.cell.angles())
    which = (
        ""
        if atoms.pbc.all()
        else f", periodic along {', '.join(axis for axis, on in zip('abc', atoms.pbc, strict=True) if on)}"
    )
    return f"{lengths} Å, {angles}{which}"


def run_facts(told: Relaxation) -> list[dict[str, Any]]:
    run = told.run
    methods = _methods_in_words(run.readings)
    facts: list[dict[str, Any]] = [
        {"label": "Outcome", "value": end_words(run)},
        {"label": "Policy", "value": told.policy},
        {"label": "Calculator", "value": told.calculator},
    ]
    facts += [{"label": "Tolerance", "value": f"fmax {told.tolerance:g} eV/Å"}] if told.tolerance is not None else []
    facts += [{"label": "Steps made by", "value": methods}] if methods else []
    facts += [{"label": "Error", "value": run.error}] if run.error else []
    facts += [{"label": "Command", "value": told.command, "code": True}] if told.command else []
    facts.append({"label": "Versions", "value": versions()})
    return facts


def _methods_in_words(readings: Sequence[Reading]) -> str:
    counts: dict[str, int] = {}
    for reading in readings:
        if reading.method not in ("", "start"):
            method = METHODS.get(reading.method, reading.method)
            counts[method] = counts.get(method, 0) + 1
    rejected = sum(not reading.accepted for reading in readings)
    said = [f"{method} {count}" for method, count in counts.items()]
    return ", ".join([*said, *([f"{rejected} rejected"] if rejected else [])])


def signed(value: float, style: str) -> str:
    """With a sign in front, and a minus that is as wide as a plus."""
    text = format(value, "+" + style)
    return "0" if float(text) == 0 else text.replace("-", "−")
