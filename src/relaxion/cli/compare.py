"""ASE's own optimizers on the same start, counted by the same calculator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ase.optimize.optimize import Optimizer

from relaxion.bench.runs import OnCall, Run, Stage, Task
from relaxion.bench.statistics import SAME_MINIMUM_EV_PER_ATOM


def run_ase_optimizer(kind: type[Optimizer], task: Task, on_call: OnCall) -> Run:
    """Run it as a user of ASE would, with its defaults."""
    stage = Stage(task, on_call)
    try:
        with kind(stage.target, logfile=None) as optimizer:  # pyright: ignore[reportArgumentType] - filters work too
            stage.watch(optimizer)
            converged = optimizer.run(fmax=task.fmax, steps=task.steps)
    except Exception as error:  # noqa: BLE001 - ASE's optimizers report failure by exceptions of many kinds
        return stage.finish("error", error=f"{type(error).__name__}: {error}")
    return stage.finish("converged" if converged else "step_limit")


@dataclass(frozen=True)
class Compared:
    """One optimizer beside ours."""

    name: str
    run: Run
    above_ours_ev_per_atom: float | None  # None: one of the two has no energy

    @property
    def other_minimum(self) -> bool:
        """Both converged, but not to the same place."""
        gap = self.above_ours_ev_per_atom
        return self.run.converged and gap is not None and abs(gap) > SAME_MINIMUM_EV_PER_ATOM


def compared(name: str, run: Run, ours: Run, n_atoms: int) -> Compared:
    if run.energy_ev is None or ours.energy_ev is None:
        return Compared(name, run, None)
    return Compared(name, run, (run.energy_ev - ours.energy_ev) / n_atoms)


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
