"""`relaxion relax`: read, check, relax, write, compare, say; one structure after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ase import Atoms
from ase.optimize.optimize import Optimizer

from relaxion.doors.compare import Compared, chosen_optimizers, compared, run_ase_optimizer
from relaxion.doors.counting import CalculatorFailed
from relaxion.doors.inputs import Job, check_structure, occupancy_note, rattled, read_jobs
from relaxion.doors.output import check_free, check_out, publish, staging, write_structure
from relaxion.doors.progress import Progress, one_line, say, tell
from relaxion.doors.request import RelaxRequest, check_numbers, make_potential
from relaxion.doors.runs import OnCall, Run, Stage, Task
from relaxion.doors.sentences import (
    Report,
    as_json,
    comparison_table,
    error_sentence,
    result_sentence,
    symmetry_hint,
)
from relaxion.errors import RelaxionError, SettingsError, UnknownPotentialError
from relaxion.physics.potential import Potential
from relaxion.relaxing import Relaxer

CONVERGED, ERROR, USAGE, NOT_CONVERGED, INTERRUPTED = 0, 1, 2, 3, 130


def relax(request: RelaxRequest) -> int:
    """Do it and return the exit code."""
    try:
        check_numbers(request)
        optimizers = chosen_optimizers(request.compare)
        physics = make_potential(request.calculator)
        check_out(request.out)
        jobs = read_jobs(request.files)
    except (SettingsError, UnknownPotentialError) as error:
        say(f"relaxion: {error}")
        return USAGE
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    return _Session(request, physics, optimizers).relax_all(jobs)


class _Session:
    """One call of the command: the same physics and options for every structure."""

    def __init__(self, request: RelaxRequest, physics: Potential, optimizers: dict[str, type[Optimizer]]) -> None:
        self.request = request
        self.physics = physics
        self.optimizers = optimizers
        self.progress = Progress(quiet=request.quiet)

    def relax_all(self, jobs: list[Job]) -> int:
        """Each in turn; an error in one does not stop the others, Ctrl-C does."""
        reports = []
        for number, job in enumerate(jobs, start=1):
            with self.progress.line():
                report = self._relax_job(job)
            self._announce(report)
            reports.append(report)
            if report.interrupted:
                if number < len(jobs):
                    say(f"relaxion: interrupted; {len(jobs) - number} of {len(jobs)} structures were not started")
                return INTERRUPTED
        return _exit_code(reports)

    def _relax_job(self, job: Job) -> Report:
        if job.atoms is None:
            return Report(job, error=job.error)
        try:
            start = self._checked_start(job, job.atoms)
            report = self._relax_into_folder(job, self._task(start))
        except (RelaxionError, OSError) as error:
            return Report(job, error=one_line(str(error)))
        return self._compare(report, self._task(start)) if report.error is None else report

    def _checked_start(self, job: Job, atoms: Atoms) -> Atoms:
        """Everything that can be refused is refused here, before a force call is spent."""
        check_free(self.request.out / job.folder, self.request.force)
        check_structure(atoms, self.physics, free_cell=self.request.free_cell)
        start = rattled(atoms, self.request.rattle_angstrom, self.request.seed)
        check_structure(start, self.physics, free_cell=self.request.free_cell)
        return start

    def _task(self, start: Atoms) -> Task:
        request = self.request
        return Task(start, self.physics, request.fmax, request.steps, request.free_cell)

    def _relax_into_folder(self, job: Job, task: Task) -> Report:
        final = self.request.out / job.folder
        policy = None if self.request.policy == "none" else self.request.policy
        with staging(final) as folder:
            run = run_relaxer(
                task, policy, folder / f"{job.name}.log", folder / f"{job.name}.traj",
                self.progress.reporter(job.label, "Relaxion"),
            )  # fmt: skip
            hints = [occupancy_note(task.start), symmetry_hint(run, len(task.start), self.request.rattle_angstrom)]
            if run.final is not None:
                hints.append(write_structure(run.final, folder / f"{job.name}.extxyz", job.file, job.stem))
                publish(folder, final)
        return Report(
            job,
            run,
            error=None if run.error is None else one_line(run.error),
            written_to=None if run.final is None else final,
            hints=[hint for hint in hints if hint],
            interrupted=run.outcome == "interrupted",
        )

    def _compare(self, report: Report, task: Task) -> Report:
        """After our result is safe on disk, so that nothing can be lost here."""
        others: list[Compared] = []
        assert report.run is not None
        if report.interrupted:
            return report
        try:
            for name, kind in self.optimizers.items():
                run = run_ase_optimizer(kind, task, self.progress.reporter(report.job.label, name))
                others.append(compared(name, run, report.run, len(task.start)))
        except KeyboardInterrupt:
            hint = f"comparison interrupted, {len(others)} of {len(self.optimizers)} optimizers done"
            return replace(report, others=others, interrupted=True, hints=[*report.hints, hint])
        return replace(report, others=others)

    def _announce(self, report: Report) -> None:
        if self.request.as_json:
            tell(as_json(report, compare=bool(self.optimizers)))
        elif report.error is None and report.run is not None:
            tell(result_sentence(report, report.run))
            if report.others and sys.stdout.isatty():
                _print_table(report, report.run)
        if report.error is not None:
            say(error_sentence(report))
        for hint in report.hints:
            if not self.request.quiet:
                say(f"{report.job.label}: {hint}")


def run_relaxer(task: Task, policy: str | None, log: Path, trajectory: Path, on_call: OnCall) -> Run:
    """Our optimizer, held to the same count as the others."""
    stage = Stage(task, on_call)
    # closed before anything is moved: older ASE keeps log and trajectory open, and unflushed
    with Relaxer(stage.target, logfile=log, trajectory=trajectory, policy=policy) as optimizer:
        stage.watch(optimizer)
        try:
            optimizer.run(fmax=task.fmax, steps=task.steps)
        except KeyboardInterrupt:
            return stage.finish("interrupted", fallback_used=optimizer.fallback_used)
        except CalculatorFailed as error:
            return stage.finish("error", fallback_used=optimizer.fallback_used, error=str(error))
    outcome = optimizer.outcome.label.replace(" ", "_")
    run = stage.finish(outcome, fallback_used=optimizer.fallback_used)
    _check_count(optimizer.force_calls, run.force_calls, say)
    return run


def _check_count(claimed: int, counted: int, complain: Callable[[str], None]) -> None:
    """The number shown is always the calculator's; if the optimizer thinks otherwise, the user should know."""
    if claimed != counted:
        complain(
            f"relaxion: the optimizer counted {claimed} force calls, the calculator {counted}; the calculator's "
            "number is shown; please report this"
        )


def _print_table(report: Report, run: Run) -> None:
    from rich.console import Console

    Console(highlight=False).print(comparison_table(report, run))


def _exit_code(reports: list[Report]) -> int:
    if any(report.error is not None for report in reports):
        return ERROR
    return CONVERGED if all(report.converged for report in reports) else NOT_CONVERGED
