"""The page of a folder of `relax-many`: what failed and why, outcomes, the slowest, energies, force calls over the run.

Where policies learn during the run, it shows where they got better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxion.apps.relax_many.learning import FOLDER, LAG, read_fit
from relaxion.apps.relax_many.results import CSV, DATABASE, Row, read_counts, read_manifest, read_rows
from relaxion.apps.report.page import Page, Part, count, facts, fixed, notes, outcome_words, plot, rounded, table, tile
from relaxion.errors import CheckpointError, FileError
from relaxion.files import json_of

WINDOW = 20  # structures of the running mean
MOST_POINTS = 2000  # of a curve
MOST_ROWS = 1500  # of the table of structures: the page stays below 1 MB
SLOWEST = 10
EXAMPLES = 3  # named with each reason
WAITING = "waiting"
CONVERGED = "converged"


def many_page(folder: Path, against: Sequence[Path] = ()) -> Page:
    """`against`: other folders for the same input, with another policy, say, or what `relaxion bench` says of it."""
    shown = ManyFolder(folder, against)
    shown.poll(0.0)
    if not shown.ended:
        raise FileError(f"{folder} has no result yet; wait for the first")
    return shown.page()


class ManyFolder:
    """One folder, growing or done, as the live page follows it."""

    def __init__(self, folder: Path, against: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.against = against
        self.settings = read_manifest(folder)["settings"]
        self.every = int(self.settings.get("learn_every", 0))
        self.rows: list[Row] = []
        self.input_read = False
        self.studies: list[dict[str, Any]] = []
        self.others: dict[str, np.ndarray] = {}
        self._seen: list[tuple[str, int, int]] = []

    def poll(self, seconds: float) -> bool:
        """All of it anew where any file has grown, however long that takes."""
        del seconds
        files = sorted(file for path in (self.folder, *self.against) for file in _grow(path))
        seen = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        if seen == self._seen:
            return False
        self._seen = seen
        self.rows = read_rows(self.folder)
        self.input_read = read_counts(self.folder).input_read
        self.others = {name: calls for path in self.against for name, calls in _calls_of(path).items()}
        self.studies = studies_of(self.folder) if self.every else []
        return True

    @property
    def ended(self) -> list[Row]:
        """Those with a result or a reason."""
        return [row for row in self.rows if row.outcome != WAITING]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.reason is not None]

    @property
    def calls(self) -> np.ndarray:
        """Of everything that was relaxed, in the order of the input."""
        return np.array([row.force_calls for row in self.rows if _has_result(row)], dtype=float)

    def heading(self) -> dict[str, Any]:
        number = count(len(self.rows)) if self.input_read else f"{count(len(self.rows))} read so far"
        title = f"{self.folder.absolute().name}: {count(len(self.calls))} of {number} structures relaxed"
        title += f", {count(len(self.failed))} failed" if self.failed else ""
        lead = _lead(self.calls, self.every, self.studies) if len(self.calls) else "No structure is relaxed yet."
        return {"title": title, "eyebrow": "Relaxion relax-many", "lead": lead}

    def parts(self) -> list[Part]:
        pressure = bool(self.settings.get("pressure_gpa"))
        found: list[Part] = [_outcomes(self.rows)]
        found += [_reasons(self.failed, self.folder)] if self.failed else []
        if len(self.calls):
            found += [_tiles(self.calls, self.others, self.every), _slowest(self.rows, pressure)]
            found += [_plot(self.calls, self.others, self.every, self.studies), _energies(self.rows, pressure)]
            found += _notes(self.studies)
        found += [_structures(self.rows, pressure)] if self.rows else []
        return [{"id": part["kind"], **part} for part in (*found, _facts(self.settings))]

    def page(self) -> Page:
        return Page(**self.heading(), parts=self.parts())


def _has_result(row: Row) -> bool:
    return row.outcome != WAITING and row.reason is None and row.force_calls is not None


def _grow(path: Path) -> list[Path]:
    """The files of a result that grow."""
    if path.is_file():
        return [path]
    patterns = (DATABASE, f"{DATABASE}-wal", f"{FOLDER}/*.safetensors")
    return [file for pattern in patterns for file in path.glob(pattern)]


def _calls_of(path: Path) -> dict[str, np.ndarray]:
    """Of another folder, or of each optimizer of a benchmark on the same structures, by what to call it."""
    if path.is_dir():
        return {
            path.name: np.array(
                [row.force_calls for row in read_rows(path) if row.force_calls and row.reason is None], dtype=float
            )
        }
    try:
        told = json_of(path)
        own = {told["ours"]: " and ".join(told["policies_used"])}
        return {own.get(name) or name: np.array(calls, dtype=float) for name, calls in told["force_calls"].items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} is neither a folder of 'relax-many' nor a JSON file of 'relaxion bench'") from error


def studies_of(folder: Path) -> list[dict[str, Any]]:
    """What each study said, in order; damaged ones are left out."""
    found = []
    for file in sorted((folder / FOLDER).glob("*.safetensors")):
        try:
            found.append(read_fit(file).values)
        except CheckpointError:
            continue
    return found


def _lead(calls: np.ndarray, every: int, studies: Sequence[dict[str, Any]]) -> str:
    mean = f"{calls.mean():.1f} force calls on average, {count(calls.sum())} in all"
    if not every:
        return f"{mean}."
    adopted = max((int(study["n_adopted"]) for study in studies), default=0)
    return f"{mean}; {len(studies)} fits, of which {adopted} gave a better policy."


# ---- what became of the structures


def _outcomes(rows: Sequence[Row]) -> Part:
    """One tile for each outcome, failures first."""
    failed = Counter(_outcome(row) for row in rows if row.reason is not None)
    others = Counter(_outcome(row) for row in rows if row.reason is None)
    of = f"of {count(len(rows))}"
    shown = [tile(words.capitalize(), count(number), note=of, tone="bad") for words, number in failed.items()]
    for words, number in sorted(others.items()):
        tone = "good" if words == CONVERGED else "" if words == WAITING else "warn"
        shown.append(tile(words.capitalize(), count(number), note=of, tone=tone))
    return {"kind": "tiles", "id": "outcomes", "title": "Outcomes", "tiles": shown}


def _outcome(row: Row) -> str:
    return outcome_words(row.outcome).replace("_", " ")


def _name(row: Row) -> str:
    return f"{Path(row.file).name}#{row.structure}"


def _reasons(failed: Sequence[Row], folder: Path) -> Part:
    """The most frequent first, each with some of its structures."""
    by_reason: dict[str, list[Row]] = {}
    for row in failed:
        by_reason.setdefault(str(row.reason), []).append(row)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    rows = [{"cells": [reason[:400], count(len(some)), _some(some)], "tone": "bad"} for reason, some in ordered]
    left = f" {count(len(rows) - MOST_ROWS)} more reasons are not shown." if len(rows) > MOST_ROWS else ""
    note = f"{folder.name}/{DATABASE} contains the first and last state of each (table results).{left}"
    heads = ["Reason", "Structures", "Which"]
    long = ("Reason", "Which")
    return table("Failures and their reasons", heads, rows[:MOST_ROWS], long=long, note=note, id="failures")


def _some(rows: Sequence[Row]) -> str:
    names = [_name(row) + (f" ({row.id})" if row.id else "") for row in rows[:EXAMPLES]]
    return ", ".join(names) + (f" and {count(len(rows) - EXAMPLES)} more" if len(rows) > EXAMPLES else "")


def _slowest(rows: Sequence[Row], pressure: bool) -> Part:
    most = sorted((row for row in rows if _has_result(row)), key=lambda row: -(row.force_calls or 0))[:SLOWEST]
    return _table(f"The {len(most)} slowest, by force calls", most, pressure, id="slowest")


def _structures(rows: Sequence[Row], pressure: bool) -> Part:
    """All of them as far as the page has room: failed, not converged, and then the slowest first."""
    ordered = sorted(rows, key=lambda row: (row.reason is None, row.outcome == CONVERGED, -(row.force_calls or 0)))
    shown = (
        f"The first {count(MOST_ROWS)} of {count(len(rows))}" if len(rows) > MOST_ROWS else f"All {count(len(rows))}"
    )
    caption = f"{shown}: failed, then not converged, then by force calls"
    more = {"title": "Structures", "note": f"All structures: {CSV}.", "search": "Formula, id, outcome, …"}
    return _table(caption, ordered[:MOST_ROWS], pressure, id="structures", **more)


def _table(caption: str, rows: Sequence[Row], pressure: bool, **more: Any) -> Part:
    """Structures with outcome, calls, energies and largest force; a column of ids where there are any."""
    ids = any(row.id is not None for row in rows)
    minimised = ["Enthalpy (eV)"] if pressure else []
    heads = ["Structure", *(["Id"] if ids else []), "Formula", "Outcome", "Force calls", "Energy (eV)", *minimised]
    heads += ["Energy (eV/atom)", "fmax (eV/Å)", "Policy"]
    found = []
    for row in rows:
        per_atom = row.energy_ev / row.n_atoms if row.energy_ev is not None and row.n_atoms else None
        numbers = [(row.force_calls, "d"), (row.energy_ev, ".4f"), *([(row.enthalpy_ev, ".4f")] if pressure else [])]
        numbers += [(per_atom, ".4f"), (row.fmax_ev_per_angstrom, ".2g")]
        shown = [fixed(*number) for number in numbers]
        names = [_name(row), *([row.id or ""] if ids else []), row.formula or "", _outcome(row)]
        found.append({"cells": [*names, *shown, row.policy or ""], "tone": "bad" if row.reason is not None else ""})
    return table(caption, heads, found, text=("Id", "Formula", "Outcome", "Policy"), **more)


def _energies(rows: Sequence[Row], pressure: bool) -> Part:
    """Per atom, so that a structure that went astray stands out."""
    what, name = ("enthalpy", "enthalpy_ev") if pressure else ("energy", "energy_ev")
    known = [
        (place, getattr(row, name) / row.n_atoms)
        for place, row in enumerate(rows, start=1)
        if _has_result(row) and getattr(row, name) is not None and row.n_atoms
    ]
    shown = [known[place] for place in _thinned(len(known))]
    values = [value for _, value in known] or [0.0]
    series = {"name": what, "mode": "dots", "x": [place for place, _ in shown], "y": rounded(v for _, v in shown)}
    summary = f"{count(len(known))} structures from {min(values):.4g} to {max(values):.4g} eV per atom."
    labels = f"Final {what} per atom", "structure", f"{what} (eV per atom)"
    return plot(*labels, [series], summary, span=6, id="energies")


# ---- force calls


def _tiles(calls: np.ndarray, others: dict[str, np.ndarray], every: int) -> Part:
    third = max(1, len(calls) // 3)
    shown = [
        tile("Force calls, mean", f"{calls.mean():.1f}"),
        tile("Force calls, median", f"{np.median(calls):.0f}"),
        tile("Force calls, most", f"{calls.max():.0f}"),
    ]
    if every or others:
        shown.append(tile("Mean of the last third", f"{calls[-third:].mean():.1f}"))
    if every:
        shown.append(tile("Mean before learning", f"{calls[: LAG * every].mean():.1f}"))
    for name, other in others.items():
        same = min(len(calls), len(other))
        ratio = calls[:same][-third:].mean() / other[:same][-third:].mean()
        shown.append(tile(f"Against {name}", f"{ratio:.2f}", " ×", note="its force calls, last third"))
    return {"kind": "tiles", "title": "Force calls", "span": 12, "tiles": shown}


def _plot(calls: np.ndarray, others: dict[str, np.ndarray], every: int, studies: Sequence[dict[str, Any]]) -> Part:
    series = [_running("this run", calls), *(_running(name, other) for name, other in others.items())]
    adopted = [0, *(int(study["n_adopted"]) for study in studies)]
    better = [study for study, before, now in zip(studies, adopted, adopted[1:], strict=False) if now > before]
    places = [min((int(study["round"]) + LAG) * every + 1, len(calls)) for study in better]
    if places:
        heights = [float(calls[max(0, place - WINDOW) : place].mean()) for place in places]
        series.append({"name": "a better policy", "mode": "dots", "x": places, "y": rounded(heights)})
    limits = [{"value": float(calls[: LAG * every].mean()), "label": "mean before learning"}] if every else []
    summary = f"{calls[:WINDOW].mean():.1f} calls at the beginning, {calls[-WINDOW:].mean():.1f} at the end"
    labels = f"Force calls, mean of {WINDOW} structures", "structure", "force calls"
    return plot(*labels, series, summary, span=6, limits=limits)


def _running(name: str, calls: np.ndarray) -> dict[str, Any]:
    sums = np.concatenate([[0.0], np.cumsum(calls)])
    ends = np.arange(1, len(calls) + 1)[_thinned(len(calls))]
    begins = np.maximum(ends - WINDOW, 0)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    return {"name": name, "x": ends.tolist(), "y": means.round(3).tolist()}


def _thinned(number: int) -> list[int]:
    """Places of the points that are shown, evenly spread."""
    return sorted({round(place) for place in np.linspace(0, number - 1, min(number, MOST_POINTS))})


def _notes(studies: Sequence[dict[str, Any]]) -> list[Part]:
    judged = [study for study in studies if study.get("acceptance")]
    if not judged:
        return []
    last = judged[-1]["acceptance"]
    return notes(
        [
            f"The last fit: error {last['ratio']:.2f} ({last['low']:.2f}–{last['high']:.2f}) of that of the policy "
            f"in use, on {last['n_validation']} held-out relaxations."
        ]
    )


def _facts(settings: dict[str, Any]) -> Part:
    names = {"calculator": "Calculator", "policy": "Policy", "fmax_ev_per_angstrom": "Tolerance (eV/Å)",
             "free_cell": "Free cell", "pressure_gpa": "Pressure (GPa)", "cell_mask": "Strains that may change",
             "keep_symmetry": "Symmetry kept", "learn_every": "Structures per fit"}  # fmt: skip
    found = ((label, settings.get(name)) for name, label in names.items())
    return facts("Settings", [(label, "yes" if value is True else value) for label, value in found])
