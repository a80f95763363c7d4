"""A relaxation as a page, from Python: `opt.view()`, or `relaxion.report(opt)`; Jupyter shows either."""

from __future__ import annotations

from pathlib import Path

from ase import Atoms
from ase.filters import StrainFilter, UnitCellFilter

from relaxion.bench.comparison import readings_of
from relaxion.bench.result_folder import MANIFEST
from relaxion.bench.runs import Run, finite
from relaxion.errors import SettingsError
from relaxion.optimize.ase_interface import bare_atoms
from relaxion.optimize.relaxer import Relaxer
from relaxion.web.report_folder import relaxation_on_disk
from relaxion.web.report_page import Page
from relaxion.web.report_relaxation import Relaxation, policy_in_words, relaxation_page
from relaxion.web.report_training import training_report
from relaxion.web.watch_run import looks_like_run


def report(thing: Relaxer | str | Path) -> Page:
    """Of a relaxer, a result folder of `relaxion relax`, a trajectory or a training run; `.save(path)`, `.view()`."""
    if not isinstance(thing, str | Path):
        return page_of(thing)
    path = Path(thing)
    if path.is_dir() and not (path / MANIFEST).exists() and looks_like_run(path):
        return training_report(path)
    return relaxation_page(relaxation_on_disk(path))


def page_of(optimizer: Relaxer) -> Page:
    """The report of what this relaxer has done so far; it costs no force call."""
    if not isinstance(optimizer, Relaxer):
        raise SettingsError(f"a report is made of a relaxion.Relaxer, got {type(optimizer).__name__}")
    if not optimizer.history:
        raise SettingsError("nothing to show yet: call run() first")
    return relaxation_page(
        Relaxation(
            label=type(optimizer).__name__,
            start=_start(optimizer),
            run=_run(optimizer),
            tolerance=optimizer.fmax,
            calculator=_calculator_name(bare_atoms(optimizer.atoms)),
            policy=policy_in_words(optimizer.policy, optimizer.policy_used),
            free_cell=isinstance(optimizer.atoms, UnitCellFilter | StrainFilter),
        )
    )


def _run(optimizer: Relaxer) -> Run:
    """As the command line tells a run; nobody has kept the time."""
    outcome = optimizer.outcome.label.replace(" ", "_")
    entries = optimizer.history
    stands = entries[-1] if outcome == "converged" else next((e for e in reversed(entries) if e.accepted), entries[-1])
    return Run(
        outcome=outcome,
        force_calls=optimizer.force_calls,
        energy_ev=finite(stands.energy_ev),
        fmax_ev_per_angstrom=finite(stands.fmax_ev_per_angstrom),
        wall_time_seconds=0.0,
        policy_used=optimizer.policy_used,
        fallback_used=optimizer.fallback_used,
        final=bare_atoms(optimizer.atoms).copy(),
        readings=readings_of(optimizer),
        frames=tuple(optimizer.film.frames),
    )


def _start(optimizer: Relaxer) -> Atoms:
    first = optimizer.film.frames[0]
    start = bare_atoms(optimizer.atoms).copy()
    start.set_cell(first.cell, apply_constraint=False)
    start.positions[:] = first.positions
    return start


def _calculator_name(atoms: Atoms) -> str:
    return "unknown" if atoms.calc is None else str(getattr(atoms.calc, "name", None) or type(atoms.calc).__name__)
