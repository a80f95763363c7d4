"""`relaxion relax`: read, check, relax, write, compare, say; one structure after the other."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ase.optimize.optimize import Optimizer

from relaxion.apps.cli.command import DONE, ERROR, INCOMPLETE, interrupts
from relaxion.apps.cli.inputs import (
    AUTO,
    RelaxationJob,
    RelaxingOptions,
    calculator_for,
    calculator_word,
    checked_start,
    command_line,
    emt_note,
    occupancy_note,
    planner,
    read_jobs,
)
from relaxion.apps.cli.progress import ProgressLine, counted, one_line, say, speaks_ascii_only, tell
from relaxion.apps.comparison import (
    Compared,
    compared,
    in_words,
    minima_in_words,
    restart_name,
    run_ase_optimizer,
    run_relaxer,
    who_relaxed,
)
from relaxion.apps.result_folder import (
    PAGE,
    check_free,
    check_out,
    publish,
    staging,
    update_manifest,
    write_frames,
    write_structure,
)
from relaxion.errors import FileError
from relaxion.optimizer.records import database_at
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import error_in_words
from relaxion.potentials.registry import make_potential
from relaxion.structures.structures import symmetric
from relaxion.train.judge.runs import (
    PolicyChoice,
    RelaxationTask,
    Run,
    check_policy,
    chosen_optimizers,
    policy_argument,
)

SYMMETRIC_FMAX = 1e-6  # eV/Å; forces this small at the start come from symmetry (or from an earlier relaxation)
ADVICE = {
    "step_limit": "try --steps with a larger number",
    "non_finite": "check the structure and the calculator",
    "stalled": "constraints or numerical noise prevent further progress; check them, or try a larger --fmax",
    "blocked": "atoms block each other; try --rattle 0.05",
}


@dataclass(frozen=True, kw_only=True)
class RelaxRequest(RelaxingOptions):
    """What `relaxion relax` was asked."""

    files: list[Path]
    compare: str
    out: Path
    as_json: bool
    report: bool
    resume: bool
    force: bool
    leave_saddles: bool
    rattle: float  # Å
    seed: int
    quiet: bool


def relax_structures(request: RelaxRequest) -> int:
    check_policy(policy_argument(request.policy))
    optimizers = chosen_optimizers(request.compare, "--compare")
    check_out(request.out)
    database_at(request.database)
    jobs = _left(request, [_checked(request, job) for job in read_jobs(request.files)])
    progress = ProgressLine(quiet=request.quiet)
    if all(job.error is not None for job in jobs):  # nothing to relax: no calculator is loaded to say so
        return _Session(request, None, optimizers, progress).relax_all(jobs)
    request = with_calculator(request, jobs)
    with closing(make_potential(request.calc, request.device)) as physics, _model(request, jobs) as cheap:
        return _Session(request, physics, optimizers, progress, cheap).relax_all(jobs)


@contextmanager
def _model(request: RelaxRequest, jobs: list[RelaxationJob]) -> Iterator[Potential | None]:
    """The cheaper potential, where there is one."""
    images = [job.atoms for job in jobs if job.atoms is not None and job.error is None]
    found = planner(request.model, request.calc, images, request.device)
    if found is None:
        yield None
        return
    with closing(found[1]) as potential:
        yield potential


def _checked(request: RelaxRequest, job: RelaxationJob) -> RelaxationJob:
    """A job whose folder holds something already becomes an error."""
    try:
        taken = request.resume and (request.out / job.folder).is_dir()  # `_left` decides about those
        check_free(request.out / job.folder, request.force or taken)
    except FileError as error:
        return replace(job, error=job.error or str(error))
    return job


def _left(request: RelaxRequest, jobs: list[RelaxationJob]) -> list[RelaxationJob]:
    """With --resume, all but those whose results are there already."""
    if not request.resume:
        return jobs
    left = [job for job in jobs if not (request.out / job.folder).is_dir() or _restart(request, job) is not None]
    if len(left) < len(jobs) and not request.quiet:
        say(f"relaxion: {len(jobs) - len(left)} of {len(jobs)} structures are done already")
    return left


def _restart(request: RelaxRequest, job: RelaxationJob) -> Path | None:
    """What an earlier relaxation of this structure left behind when it was cut short, where it is to be resumed."""
    file = request.out / job.folder / restart_name(job.name)
    return file if request.resume and file.is_file() else None


def with_calculator(request: RelaxRequest, jobs: list[RelaxationJob]) -> RelaxRequest:
    """The request with a calculator that fits its structures, where it names none, and with its options."""
    calc = request.calc
    if calc == AUTO:
        images = [job.atoms for job in jobs if job.atoms is not None and job.error is None]
        choice = calculator_for(images, request.device)
        calc = choice.name
        if (words := choice.in_words()) and not request.quiet:
            say(f"relaxion: {words}")
    return replace(request, calc=calculator_word(calc, request.calc_options))


@dataclass(frozen=True)
class _Session:
    """One call of the command: the same physics and options for every structure."""

    request: RelaxRequest
    physics: Potential | None  # None: there is nothing to relax
    optimizers: dict[str, type[Optimizer]]
    progress: ProgressLine
    planner: Potential | None = None  # the cheaper potential
    said: set[tuple[Path, str]] = field(default_factory=set)  # of a file, so that its other frames need not repeat it

    def relax_all(self, jobs: list[RelaxationJob]) -> int:
        """Each in turn; an error in one, of whatever kind, does not stop the others; Ctrl-C does."""
        reports = []
        for number, job in enumerate(jobs, start=1):
            with self.progress.line():
                report = self._relax_job(job)
            self._announce(report)
            reports.append(report)
            if report.interrupted:
                if number < len(jobs):
                    say(f"relaxion: interrupted; {len(jobs) - number} of {len(jobs)} structures were not started")
                break
        for sentence in write_together(reports, self.request.out, force=self.request.force):
            say(f"relaxion: {sentence}")
        return interrupts.exit_code if reports and reports[-1].interrupted else _exit_code(reports)

    def _relax_job(self, job: RelaxationJob) -> Report:
        request = self.request
        if job.error is not None or job.atoms is None or self.physics is None:
            return Report(job, error=one_line(job.error or ""))
        try:  # everything that can be refused is refused before a force call is spent
            start = checked_start(job.atoms, self.physics, request.rattle, request.seed, free_cell=request.cell)
            start = symmetric(start) if request.keep_symmetry else start
            task = RelaxationTask(
                start, self.physics, request.fmax, request.steps, request.cell, record=request.report,
                pressure_gpa=request.pressure, cell_mask=request.cell_mask, leave_saddles=request.leave_saddles,
            )  # fmt: skip
            report = self._relax_into_folder(job, task)
        except Exception as error:  # noqa: BLE001 - a defect met by one structure is no reason to drop the others
            return Report(job, error=one_line(error_in_words(error)))
        report = self._compare(report, task) if report.error is None else report
        return self._with_page(report, task) if request.report else report

    def _relax_into_folder(self, job: RelaxationJob, task: RelaxationTask) -> Report:
        final = self.request.out / job.folder
        request = self.request
        unseen = request.allow_unseen
        device = request.device
        physics = task.potential
        choice = PolicyChoice.of(request.policy, task.start, allow_unseen=unseen, calculator=physics, device=device)
        with staging(final) as folder:
            earlier = _restart(request, job)
            log = folder / f"{job.name}.log"
            trajectory = folder / f"{job.name}.traj"
            restart = None if earlier is None else Path(shutil.copy(earlier, folder))
            for file in (final / log.name, final / trajectory.name) if earlier else ():
                if file.is_file():
                    shutil.copy(file, folder)
            reporter = self.progress.reporter(job.label, "Relaxion")
            run = run_relaxer(task, choice, log, trajectory, reporter, request.database, restart, self.planner)
            with interrupts.held():
                hints = self._hints(job, run, task, choice.note)
                report = self._save(Report(job, run, hints=hints), run, folder, final)
        return replace(report, interrupted=run.outcome == "interrupted" or interrupts.noticed)

    def _hints(self, job: RelaxationJob, run: Run, task: RelaxationTask, policy_note: str) -> list[str]:
        hints = [occupancy_note(task.start), symmetry_hint(run, len(task.start), self.request.rattle)]
        assumed = task.potential.assumption(task.start)
        for once in (emt_note(task.start, self.request.calc), assumed, policy_note):
            if once and (job.file, once) not in self.said:
                self.said.add((job.file, once))
                hints.append(once)
        return [hint for hint in hints if hint]

    def _save(self, report: Report, run: Run, folder: Path, final: Path) -> Report:
        """Whatever there is goes into place: where the structure cannot be written, log and trajectory still do."""
        report = report if run.error is None else _failed(report, run, run.error)
        if run.final is None:
            return report
        job = report.job
        report = replace(report, written_to=final)
        try:
            hint = write_structure(run.final, folder / f"{job.name}.extxyz", job.file, job.stem)
            report = replace(report, hints=[*report.hints, *filter(None, [hint])])
        except FileError as error:
            report = _failed(report, run, str(error))
        try:
            publish(folder, final, as_plain(report, compare=False), details(self.request, run))
        except FileError as error:
            report = replace(_failed(report, run, str(error)), written_to=None)
        return report

    def _compare(self, report: Report, task: RelaxationTask) -> Report:
        """After our result is safe on disk, so that nothing can be lost here."""
        others: list[Compared] = []
        ours = report.run
        of = len(self.optimizers)
        if ours is None or report.interrupted:
            return report
        try:
            for name, kind in self.optimizers.items():
                run = run_ase_optimizer(kind, task, self.progress.reporter(report.job.label, name))
                others.append(compared(name, run, ours, len(task.start)))
            report = replace(report, others=others)
            if others and report.written_to is not None:
                update_manifest(report.written_to, as_plain(report, compare=True), details(self.request, ours))
        except KeyboardInterrupt:
            hint = f"comparison interrupted, {len(others)} of {of} optimizers done"
            return replace(report, others=others, interrupted=True, hints=[*report.hints, hint])
        except Exception as error:  # noqa: BLE001 - a comparison that fails is no reason to drop the result
            hint = f"comparison failed after {len(others)} of {of}: {error_in_words(error)}"
            return replace(report, others=others, hints=[*report.hints, hint])
        return report

    def _with_page(self, report: Report, task: RelaxationTask) -> Report:
        """Last, when everything is known and safe; pages are loaded only here."""
        from relaxion.apps.report.relaxation import RelaxationReport, policy_in_words, relaxation_page

        request = self.request
        run = report.run
        folder = report.written_to
        if run is None or folder is None:
            return report
        policy = policy_in_words(request.policy, run.policy_used)
        told = RelaxationReport(
            report.job.label, task.start, run, task.fmax, request.calc, policy, task.free_cell, command_line(),
            report.others, report.hints,
        )  # fmt: skip
        try:
            with interrupts.held():
                report = replace(report, page=relaxation_page(told).save(folder / PAGE))
                plain = as_plain(report, compare=bool(report.others))
                update_manifest(folder, plain, details(request, run), added=[PAGE])
        except Exception as error:  # noqa: BLE001 - a page that fails is no reason to drop the result
            return replace(report, error=one_line(f"the report could not be written: {error_in_words(error)}"))
        return replace(report, interrupted=report.interrupted or interrupts.noticed)

    def _announce(self, report: Report) -> None:
        if self.request.as_json:
            tell(as_json(report, compare=bool(self.optimizers), ascii_only=speaks_ascii_only(sys.stdout)))
        elif report.error is None and report.run is not None:
            tell(result_sentence(report, report.run))
        if report.error is not None:
            say(error_sentence(report))
        for hint in () if self.request.quiet else report.hints:
            say(f"{report.job.label}: {hint}")


def _failed(report: Report, run: Run, error: str) -> Report:
    """An earlier error counts more than one that came of it."""
    error = report.error or one_line(error)
    return replace(report, run=replace(run, outcome="error", error=error), error=error)


def _exit_code(reports: list[Report]) -> int:
    if any(report.error is not None for report in reports):
        return ERROR
    return DONE if all(report.converged for report in reports) else INCOMPLETE


def details(request: RelaxRequest, run: Run) -> dict[str, Any]:
    """What `relaxion report` wants to know later; it goes into the manifest of a result folder."""
    plain = {
        "command": command_line(),
        "calculator": request.calc,
        "policy": request.policy,
        "fmax_ev_per_angstrom": request.fmax,
        "free_cell": request.cell,
    }
    names = ("model", "cell_mask", "keep_symmetry", "leave_saddles")
    given = {"pressure_gpa": request.pressure, **{name: getattr(request, name) for name in names}}
    plain |= {name: value for name, value in given.items() if value}
    columns = ("energy_ev", "enthalpy_ev", "fmax_ev_per_angstrom", "accepted", "method", "reason")
    calls = {name: [getattr(reading, name) for reading in run.readings] for name in columns}
    return {"request": plain, "calls": {**calls, "base_call": [frame.base_call for frame in run.frames]}}


def write_together(reports: Sequence[Report], out: Path, *, force: bool) -> list[str]:
    """One extxyz for each file of several structures; sentences about those that were not written."""
    said = []
    for name, relaxed in _by_file(reports).items():
        file = out / f"{name}.extxyz"
        if file.exists() and not force:
            said.append(f"{file} exists and was left as it is; --force replaces it")
            continue
        try:
            write_frames([report.run.final for report in relaxed if report.run and report.run.final], file)
        except FileError as error:
            said.append(str(error))
    return said


def _by_file(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """By the name that the folders of a file share, in order; only files of several structures."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        if report.job.index is not None and report.written_to is not None:
            found.setdefault(report.job.folder.rpartition("-")[0], []).append(report)
    return found


# ---- a result in words, as a JSON object, as a table


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
        "end_check": asdict(run.end_check),
        "wall_time_seconds": round(run.wall_time_seconds, 6),
        "written_to": None if report.written_to is None else str(report.written_to),
    }
    plain |= {"model": run.model_used, "model_calls": run.model_calls} if run.model_used else {}
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
    parts += [run.end_check.in_words()] if run.end_check.calls or run.end_check.note else []
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
    # one call at the minimum of a model is no sign that the start was relaxed
    return f"already relaxed ({calls})" if run.force_calls == 1 and not run.model_used else f"relaxed in {calls}"


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
        "forces do not lead away from it: try --leave-saddles"
    )
