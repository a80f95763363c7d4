"""A result in words, as a JSON object, as a table."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from relaxion.apps.cli.inputs import RelaxationJob
from relaxion.apps.cli.progress import counted
from relaxion.apps.compare.comparison import Compared, in_words, minima_in_words, restart_name, who_relaxed
from relaxion.train.judge.runs import Run
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM

SYMMETRIC_FMAX = 1e-6  # eV/Å; forces this small at the start come from symmetry (or from an earlier relaxation)
ADVICE = {
    "step_limit": "try --steps with a larger number",
    "non_finite": "check the structure and the calculator",
    "stalled": "constraints or numerical noise prevent further progress; check them, or try a larger --fmax",
    "blocked": "atoms block each other; try --rattle 0.05",
}


@dataclass(frozen=True)
class Report:
    """Everything to be said about one structure."""

    job: RelaxationJob
    run: Run | None = None  # None: refused before the first force call
    error: str | None = None
    written_to: Path | None = None
    others: list[Compared] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    interrupted: bool = False
    page: Path | None = None  # the report as HTML

    @property
    def converged(self) -> bool:
        return self.run is not None and self.run.converged

    @property
    def formula(self) -> str | None:
        return None if self.job.atoms is None else self.job.atoms.symbols.formula.format("metal")


def as_json(report: Report, *, compare: bool, ascii_only: bool = False) -> str:
    """One object, one line."""
    return json.dumps(as_plain(report, compare=compare), ensure_ascii=ascii_only, allow_nan=False)


def as_plain(report: Report, *, compare: bool) -> dict[str, Any]:
    """What --json prints; numbers that are not finite are null."""
    run = report.run or Run("error", 0, None, None, 0.0)
    job = report.job
    plain: dict[str, Any] = {"file": str(job.file)} | ({} if job.index is None else {"index": job.index})
    plain |= {
        "formula": report.formula,
        "converged": report.converged,
        "outcome": run.outcome,
        "force_calls": run.force_calls,
        "energy_ev": run.energy_ev,
        "enthalpy_ev": run.enthalpy_ev,
        "pressure_gpa": run.pressure_gpa,
        "fmax_ev_per_angstrom": run.fmax_ev_per_angstrom,
        "policy": run.policy_used,
        "policy_steps": run.policy_steps,
        "fallback_used": run.fallback_used,
        "wall_time_seconds": round(run.wall_time_seconds, 6),
        "written_to": None if report.written_to is None else str(report.written_to),
    }
    plain |= {} if report.page is None else {"report": str(report.page)}
    plain |= {} if report.error is None else {"error": report.error}
    plain |= {"reason": run.reason} if run.reason else {}
    others = {other.name: compared_as_json(other.run) for other in report.others}
    return {**plain, "compare": others} if compare else plain


def compared_as_json(run: Run) -> dict[str, Any]:
    names = ("converged", "force_calls", "energy_ev", "enthalpy_ev", "fmax_ev_per_angstrom")
    plain = {name: getattr(run, name) for name in names} | {"wall_time_seconds": round(run.wall_time_seconds, 6)}
    return plain if run.error is None else {**plain, "error": run.error}


def result_sentence(report: Report, run: Run) -> str:
    """What was reached, at what cost, where it is written."""
    beside = f" ({in_words(run, report.others)})" if report.others else ""
    parts = [f"{report.formula} {_what_happened(report, run)}{beside}", who_relaxed(run)]
    if run.fmax_ev_per_angstrom is not None:
        parts.append(f"fmax {run.fmax_ev_per_angstrom:.2g} eV/Å")
    if run.energy_ev is not None:
        parts.append(f"energy {run.energy_ev:.4f} eV")
        parts += [f"enthalpy {run.enthalpy_ev:.4f} eV at {run.pressure_gpa:g} GPa"] if run.pressure_gpa else []
    if report.written_to is not None:
        page = "" if report.page is None else f" with {report.page.name}"
        parts.append(f"written to {report.written_to}{os.sep}{page}")
    closing = [minima_in_words(run, report.others), run.reason, ADVICE.get(run.outcome, "")]
    return "; ".join([f"{report.job.label}: {', '.join(parts)}", *filter(None, closing)])


def _what_happened(report: Report, run: Run) -> str:
    calls = counted(run.force_calls, "force call")
    if run.outcome == "interrupted":
        kept = "nothing was saved" if report.written_to is None else "the structure reached so far is saved"
        return f"interrupted after {calls}, {kept}"
    if not run.converged:
        return f"not converged ({run.outcome.replace('_', ' ')}) after {calls}"
    return f"already relaxed ({calls})" if run.force_calls == 1 else f"relaxed in {calls}"


def error_sentence(report: Report) -> str:
    """What went wrong, and what was saved of it."""
    kept = (
        "" if report.written_to is None else f"; the structure reached so far is saved in {report.written_to}{os.sep}"
    )
    restart = restart_name(report.job.name)
    if report.written_to is not None and (report.written_to / restart).exists():
        kept += f", and the same command with --resume continues from {restart} there"
    error = report.error or ""
    # reading errors begin with the name of the file already
    start = "" if error.startswith(str(report.job.file)) else f"{report.job.label}: "
    return f"{start}{error}{kept}"


def symmetry_hint(run: Run, n_atoms: int, rattle_angstrom: float) -> str | None:
    """Forces that are zero by symmetry look converged and may be a saddle."""
    flat = run.first_fmax is not None and run.first_fmax < SYMMETRIC_FMAX
    if not flat or rattle_angstrom > 0 or n_atoms == 1:
        return None
    return (
        f"all forces were zero at the start (fmax {run.first_fmax:.1g} eV/Å); if that is a symmetric saddle, "
        "no optimizer can leave it: try --rattle 0.05"
    )


def comparison_table(report: Report, run: Run) -> Table:
    """For people at a terminal."""
    table = Table(title=f"{report.job.label}: {report.formula}", title_justify="left")
    table.add_column("optimizer")
    enthalpy = [f"enthalpy at {run.pressure_gpa:g} GPa (eV)"] if run.pressure_gpa else []
    for heading in ("force calls", "converged", "energy (eV)", *enthalpy, "fmax (eV/Å)", "time (s)", "same minimum"):
        table.add_column(heading, justify="right")
    table.add_row("Relaxion", *_cells(run), "")
    for other in report.others:
        table.add_row(other.name, *_cells(other.run), _same(run, other))
    return table


def _cells(run: Run) -> list[str]:
    enthalpy = [(run.enthalpy_ev, ".4f")] if run.pressure_gpa else []
    numbers = [(run.energy_ev, ".4f"), *enthalpy, (run.fmax_ev_per_angstrom, ".2g"), (run.wall_time_seconds, ".2f")]
    shown = ["–" if value is None else format(value, style) for value, style in numbers]
    return [str(run.force_calls), "yes" if run.converged else "no", *shown]


def _same(ours: Run, other: Compared) -> str:
    if not (ours.converged and other.run.converged) or other.above_ours_ev_per_atom is None:
        return "–"
    if abs(other.above_ours_ev_per_atom) <= SAME_MINIMUM_EV_PER_ATOM:
        return "yes"
    return f"no ({other.above_ours_ev_per_atom * 1000:+.1f} meV/atom)"
