"""Ours and ASE's own optimizers on the same start, counted by the same calculator, and how they compare in words."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ase.io import Trajectory
from ase.optimize.optimize import Optimizer

from relaxion.optimizer.choice import CORE
from relaxion.optimizer.point import quiet_filters
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import error_in_words
from relaxion.relaxer import Relaxer
from relaxion.train.judge.runs import OnCall, PolicyChoice, Reading, RelaxationTask, Run, Stage, finite
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM

logger = logging.getLogger(__name__)


def run_ase_optimizer(kind: type[Optimizer], task: RelaxationTask, on_call: OnCall) -> Run:
    """Run it as a user of ASE would, with its defaults."""
    stage = Stage(task, on_call)
    try:
        stepping = kind(stage.target, logfile=None)  # pyright: ignore[reportArgumentType] - filters work too
        with stepping as optimizer, quiet_filters():
            stage.watch(optimizer)
            converged = optimizer.run(fmax=task.fmax, steps=task.steps)
    except Exception as error:  # noqa: BLE001 - ASE's optimizers report failure by exceptions of many kinds
        return stage.finish("error", error=f"{type(error).__name__}: {error}")
    return stage.finish("converged" if converged else "step_limit")


def restart_name(name: str) -> str:
    """Of the file with the state of the optimizer, left behind where a relaxation was cut short."""
    return f"{name}.restart.json"


def run_relaxer(
    task: RelaxationTask,
    choice: PolicyChoice,
    log: Path | None,
    trajectory: Path | None,
    on_call: OnCall,
    database: Path | None = None,
    restart: Path | None = None,
    model: Potential | None = None,
) -> Run:
    """Our optimizer, held to the same count as the others.

    restart: go on from this file of an earlier run. model: a cheaper potential that plans.
    """
    stage = Stage(task, on_call)
    optimizer = Relaxer(
        stage.target,
        restart=restart,
        logfile=log,
        trajectory=trajectory if restart is None else None,
        policy=choice.policy,
        allow_unseen=choice.allow_unseen,
        database=database,
        device=choice.device,
        model=model,
        leave_saddles=task.leave_saddles,
    )
    if restart is not None and trajectory is not None:
        # ASE, where it appends, leaves out the first point as known; here it is new
        optimizer.attach(optimizer.closelater(Trajectory(trajectory, "a", stage.atoms)))
    optimizer.go_on()
    stage.watch(optimizer)
    outcome, error = _ended(optimizer, task)
    _keep_restart(optimizer, restart, trajectory, cut_short=outcome in ("error", "interrupted"))
    stands = outcome == "converged" or _last_stands(optimizer, stage)
    run = stage.finish(outcome, error=error, last_stands=stands)
    run = replace(run, force_calls=run.force_calls + optimizer.calls_before)
    if outcome not in ("interrupted", "error"):
        check_count(optimizer.force_calls, run.force_calls)
    return replace(
        run,
        policy_used=optimizer.policy_used,
        policy_steps=optimizer.policy_steps,
        fallback_used=optimizer.fallback_used,
        model_used=optimizer.model_used,
        model_calls=optimizer.model_calls,
        model_steps=optimizer.model_steps,
        reason=optimizer.reason,
        readings=readings_of(optimizer),
        frames=tuple(optimizer.film.frames),
        end_check=optimizer.end_check,
    )


def _keep_restart(optimizer: Relaxer, restart: Path | None, trajectory: Path | None, *, cut_short: bool) -> None:
    """Where there is something to go on with. A full disk may be what ended the run: the rest must not be lost."""
    with suppress(OSError):
        if cut_short and trajectory is not None:
            optimizer.save(trajectory.with_name(restart_name(trajectory.stem)))
        elif restart is not None:
            restart.unlink()


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
            finite(entry.enthalpy_ev - entry.energy_ev) or 0.0,
        )
        for entry in optimizer.history
    )


def _ended(optimizer: Relaxer, task: RelaxationTask) -> tuple[str, str | None]:
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
    judged = bool(optimizer.history) and optimizer.force_calls - optimizer.calls_before == stage.counter.answers
    finite = stage.counter.last is not None and stage.counter.last.finite
    return judged and finite and optimizer.history[-1].accepted


def check_count(claimed: int, counted: int) -> None:
    """The number shown is always the calculator's; if the optimizer thinks otherwise, the user should know."""
    if claimed != counted:
        logger.warning(
            "relaxion: the optimizer counted %d force calls, the calculator %d; the calculator's number is shown; "
            "please report this", claimed, counted,
        )  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One optimizer beside ours."""

    name: str
    run: Run
    above_ours_ev_per_atom: float | None  # in enthalpy; None: one of the two has none

    @property
    def other_minimum(self) -> bool:
        """Both converged, but not to the same place."""
        gap = self.above_ours_ev_per_atom
        return self.run.converged and gap is not None and abs(gap) > SAME_MINIMUM_EV_PER_ATOM


def compared(name: str, run: Run, ours: Run, n_atoms: int) -> Compared:
    if run.enthalpy_ev is None or ours.enthalpy_ev is None:
        return Compared(name, run, None)
    return Compared(name, run, (run.enthalpy_ev - ours.enthalpy_ev) / n_atoms)


def in_words(ours: Run, others: Sequence[Compared]) -> str:
    """`BFGS 21, FIRE 44: 3.0 × fewer than BFGS`."""
    counts = ", ".join(_count(other) for other in others)
    finished = [other for other in others if other.run.converged]
    if not ours.converged or not finished:
        return counts
    best = min(finished, key=lambda other: other.run.force_calls)
    return f"{counts}: {_ratio(best.run.force_calls / ours.force_calls)} {best.name}"


def _count(other: Compared) -> str:
    calls = other.run.force_calls
    if other.run.converged:
        return f"{other.name} {calls}"
    return f"{other.name} {'failed' if other.run.error else 'not converged'} after {calls}"


def _ratio(fewer: float) -> str:
    if 1 / 1.05 < fewer < 1.05:
        return "about as many as"
    return f"{fewer:.1f} × fewer than" if fewer > 1 else f"{1 / fewer:.1f} × more than"


def minima_in_words(ours: Run, others: Sequence[Compared]) -> str:
    """Who ended somewhere else; empty when nobody did, or when we have no minimum to compare with."""
    if not ours.converged:
        return ""
    strangers = [
        f"{other.name} found another minimum, {abs(other.above_ours_ev_per_atom) * 1000:.1f} meV/atom "
        f"{'higher' if other.above_ours_ev_per_atom > 0 else 'lower'}"
        for other in others
        if other.other_minimum and other.above_ours_ev_per_atom is not None
    ]
    return "; ".join(strangers)


def who_relaxed(run: Run) -> str:
    """`policy metals`, and how often somebody else had to step in; the cheaper potential, where there is one."""
    asked = f"{run.model_calls} call{'' if run.model_calls == 1 else 's'} of it"
    planned = f", model {run.model_used} ({asked})" if run.model_used else ""
    return _who_stepped(run) + planned


def _who_stepped(run: Run) -> str:
    if run.model_steps:
        every = run.model_steps + run.policy_steps + run.fallback_used
        return f"{run.model_steps} of {every} steps planned by the model"
    if run.policy_used in (None, CORE):
        steps = f"{run.fallback_used} step{'' if run.fallback_used == 1 else 's'}"
        return "classical optimizer" + (f" ({steps} by FIRE)" if run.fallback_used else "")
    every = run.policy_steps + run.fallback_used
    by_others = f" ({run.policy_steps} of {every} steps, the others by the classical optimizer)"
    return f"policy {run.policy_used}" + (by_others if run.fallback_used else "")
