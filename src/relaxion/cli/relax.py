"""`relaxion relax`: read, check, relax, write, compare, say; one structure after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ase import Atoms
from ase.optimize.optimize import Optimizer

from relaxion.bench.optimizers import chosen_optimizers
from relaxion.bench.runs import OnCall, Reading, Run, Stage, Task, finite
from relaxion.cli.compare import Compared, compared, run_ase_optimizer
from relaxion.cli.inputs import Job, check_structure, emt_note, occupancy_note, rattled, read_jobs
from relaxion.cli.interrupts import Interrupts
from relaxion.cli.output import PAGE, check_free, check_out, publish, staging, update_manifest, write_structure
from relaxion.cli.progress import Progress, one_line, say, speaks_ascii_only, tell
from relaxion.cli.request import PolicyChoice, RelaxRequest, check_numbers, details, make_potential
from relaxion.cli.sentences import (
    Report,
    as_json,
    as_plain,
    comparison_table,
    error_sentence,
    restart_name,
    result_sentence,
    symmetry_hint,
)
from relaxion.errors import FileError, PolicyError, RelaxionError, SettingsError, UnknownPotentialError
from relaxion.optimize import Relaxer
from relaxion.potentials.counting import error_in_words
from relaxion.potentials.potential import Potential

CONVERGED, ERROR, USAGE, NOT_CONVERGED = 0, 1, 2, 3  # and 130 or 143: see Interrupts


def relax(request: RelaxRequest) -> int:
    """Do it and return the exit code."""
    with Interrupts() as interrupts:
        try:
            return _relax(request, interrupts)
        except KeyboardInterrupt:  # where there was nothing to save: while reading, between two structures
            say("relaxion: interrupted")
            return interrupts.exit_code


def _relax(request: RelaxRequest, interrupts: Interrupts) -> int:
    try:
        check_numbers(request)
        optimizers = chosen_optimizers(request.compare, "--compare")
        physics = make_potential(request.calculator)
        check_out(request.out)
        jobs = read_jobs(request.files)
    except (SettingsError, UnknownPotentialError, PolicyError) as error:
        say(f"relaxion: {error}")
        return USAGE
    except (RelaxionError, OSError) as error:
        say(f"relaxion: {error}")
        return ERROR
    return _Session(request, physics, optimizers, interrupts).relax_all(jobs)


class _Session:
    """One call of the command: the same physics and options for every structure."""

    def __init__(
        self,
        request: RelaxRequest,
        physics: Potential,
        optimizers: dict[str, type[Optimizer]],
        interrupts: Interrupts,
    ) -> None:
        self.request = request
        self.physics = physics
        self.optimizers = optimizers
        self.interrupts = interrupts
        self.progress = Progress(quiet=request.quiet)
        self._said: set[tuple[Path, str]] = set()  # about the elements of a file; its other frames need no repetition

    def relax_all(self, jobs: list[Job]) -> int:
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
                return self.interrupts.exit_code
        return _exit_code(reports)

    def _relax_job(self, job: Job) -> Report:
        if job.atoms is None:
            return Report(job, error=one_line(job.error or ""))
        try:
            start = self._checked_start(job, job.atoms)
            report = self._relax_into_folder(job, self._task(start))
        except Exception as error:  # noqa: BLE001 - a defect met by one structure is no reason to drop the others
            return Report(job, error=one_line(error_in_words(error)))
        report = self._compare(report, self._task(start)) if report.error is None else report
        return self._with_page(report, self._task(start)) if self.request.report else report

    def _checked_start(self, job: Job, atoms: Atoms) -> Atoms:
        """Everything that can be refused is refused here, before a force call is spent."""
        check_free(self.request.out / job.folder, self.request.force)
        check_structure(atoms, self.physics, free_cell=self.request.free_cell)
        start = rattled(atoms, self.request.rattle_angstrom, self.request.seed)
        check_structure(start, self.physics, free_cell=self.request.free_cell)
        return start

    def _task(self, start: Atoms) -> Task:
        request = self.request
        return Task(start, self.physics, request.fmax, request.steps, request.free_cell, record=request.report)

    def _relax_into_folder(self, job: Job, task: Task) -> Report:
        final, choice = self.request.out / job.folder, PolicyChoice.of(self.request, task.start)
        with staging(final) as folder:
            run = run_relaxer(
                task, choice, folder / f"{job.name}.log", folder / f"{job.name}.traj",
                self.progress.reporter(job.label, "Relaxion"),
            )  # fmt: skip
            with self.interrupts.held():
                hints = self._hints(job, run, task, choice.note)
                report = self._save(Report(job, run, hints=hints), run, folder, final)
        return replace(report, interrupted=run.outcome == "interrupted" or self.interrupts.noticed)

    def _hints(self, job: Job, run: Run, task: Task, policy_note: str) -> list[str]:
        hints = [occupancy_note(task.start), symmetry_hint(run, len(task.start), self.request.rattle_angstrom)]
        for once in (emt_note(task.start, self.request.calculator), policy_note):
            if once and (job.file, once) not in self._said:
                self._said.add((job.file, once))
                hints.append(once)
        return [hint for hint in hints if hint]

    def _save(self, report: Report, run: Run, folder: Path, final: Path) -> Report:
        """Whatever there is goes into place: where the structure cannot be written, log and trajectory still do."""
        report = report if run.error is None else _failed(report, run, run.error)
        if run.final is None:
            return report
        job, report = report.job, replace(report, written_to=final)
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

    def _compare(self, report: Report, task: Task) -> Report:
        """After our result is safe on disk, so that nothing can be lost here."""
        others: list[Compared] = []
        ours = report.run
        assert ours is not None
        if report.interrupted:
            return report
        try:
            for name, kind in self.optimizers.items():
                run = run_ase_optimizer(kind, task, self.progress.reporter(report.job.label, name))
                others.append(compared(name, run, ours, len(task.start)))
            report = replace(report, others=others)
            if others and report.written_to is not None:
                update_manifest(report.written_to, as_plain(report, compare=True), details(self.request, ours))
        except KeyboardInterrupt:
            hint = f"comparison interrupted, {len(others)} of {len(self.optimizers)} optimizers done"
            return replace(report, others=others, interrupted=True, hints=[*report.hints, hint])
        except Exception as error:  # noqa: BLE001 - a comparison that fails is no reason to drop the result
            hint = f"comparison failed after {len(others)} of {len(self.optimizers)}: {error_in_words(error)}"
            return replace(report, others=others, hints=[*report.hints, hint])
        return report

    def _with_page(self, report: Report, task: Task) -> Report:
        """Last, when everything is known and safe; pages are loaded only here."""
        from relaxion.web.report_relaxation import page_of_report

        run, folder = report.run, report.written_to
        if run is None or folder is None:
            return report
        try:
            with self.interrupts.held():
                page = page_of_report(report, run, task, self.request).save(folder / PAGE)
                report = replace(report, page=page)
                plain = as_plain(report, compare=bool(report.others))
                update_manifest(folder, plain, details(self.request, run), added=[PAGE])
        except Exception as error:  # noqa: BLE001 - a page that fails is no reason to drop the result
            return replace(report, error=one_line(f"the report could not be written: {error_in_words(error)}"))
        return replace(report, interrupted=report.interrupted or self.interrupts.noticed)

    def _announce(self, report: Report) -> None:
        if self.request.as_json:
            tell(as_json(report, compare=bool(self.optimizers), ascii_only=speaks_ascii_only(sys.stdout)))
        elif report.error is None and report.run is not None:
            tell(result_sentence(report, report.run))
            if report.others and sys.stdout.isatty():
                _print_table(report, report.run)
        if report.error is not None:
            say(error_sentence(report))
        for hint in report.hints:
            if not self.request.quiet:
                say(f"{report.job.label}: {hint}")


def run_relaxer(task: Task, choice: PolicyChoice, log: Path | None, trajectory: Path | None, on_call: OnCall) -> Run:
    """Our optimizer, held to the same count as the others."""
    stage = Stage(task, on_call)
    optimizer = Relaxer(
        stage.target, logfile=log, trajectory=trajectory, policy=choice.policy, allow_unseen=choice.allow_unseen
    )
    stage.watch(optimizer)
    outcome, error = _ended(optimizer, task)
    if outcome in ("error", "interrupted") and trajectory is not None:
        with suppress(OSError):  # a full disk may be what ended it: what else there is must not be lost
            optimizer.save(trajectory.with_name(restart_name(trajectory.stem)))
    stands = outcome == "converged" or _last_stands(optimizer, stage)
    run = stage.finish(outcome, error=error, last_stands=stands)
    if outcome not in ("interrupted", "error"):
        _check_count(optimizer.force_calls, run.force_calls, say)
    return replace(
        run,
        policy_used=optimizer.policy_used,
        fallback_used=optimizer.fallback_used,
        readings=readings_of(optimizer),
        frames=tuple(optimizer.film.frames),
    )


def readings_of(optimizer: Relaxer) -> tuple[Reading, ...]:
    """Every force call of its history."""
    return tuple(
        Reading(
            entry.call,
            finite(entry.energy_ev),
            finite(entry.fmax_ev_per_angstrom),
            entry.accepted,
            entry.method,
            entry.reason,
        )
        for entry in optimizer.history
    )


def _ended(optimizer: Relaxer, task: Task) -> tuple[str, str | None]:
    """Run it; the outcome, and the error if there was one."""
    try:
        with optimizer:  # closed before anything is moved: older ASE keeps log and trajectory open, and unflushed
            optimizer.run(fmax=task.fmax, steps=task.steps)
    except KeyboardInterrupt:
        return "interrupted", None
    except Exception as error:  # noqa: BLE001 - the calculator's failure, a full disk, a defect: what is done is kept
        return "error", error_in_words(error)
    return optimizer.outcome.label.replace(" ", "_"), None


def _last_stands(optimizer: Relaxer, stage: Stage) -> bool:
    """Whether the last point is what was reached, and not one that was tried and rejected, or never judged."""
    judged = bool(optimizer.history) and optimizer.force_calls == stage.counter.answers
    finite = stage.counter.last is not None and stage.counter.last.finite
    return judged and finite and optimizer.history[-1].accepted


def _failed(report: Report, run: Run, error: str) -> Report:
    """An earlier error counts more than one that came of it."""
    error = report.error or one_line(error)
    return replace(report, run=replace(run, outcome="error", error=error), error=error)


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
