"""A contest as a table for people, as JSON for programs, and in two sentences."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from rich import box
from rich.table import Table

from relaxion.optimizer.choice import CORE as CLASSICAL
from relaxion.train.judge.optimizers import CORE
from relaxion.train.judge.statistics import (
    Comparison,
    ContestResult,
    Interval,
    OptimizerSummary,
    charged,
    median_distance,
)
from relaxion.version import __version__

HEADINGS = ("mean", "95 %", "median", "p95", "worst", "failures", "of the best", "same minimum", "time (s)", "ms/call")


def as_plain(result: ContestResult) -> dict[str, Any]:
    """What --json writes. Counts are charged: a failure is the cap."""
    told = result.circumstances
    to_best = result.to_best
    to_core = result.to_core
    return {
        "set": told.set_name,
        "title": told.title,
        "structures": result.n_structures,
        "interrupted": told.interrupted,
        "calculator": told.calculator,
        "policy": told.policy,
        "policies_used": dict(told.policies_used),
        "fmax_ev_per_angstrom": told.fmax,
        "force_call_cap": told.cap,
        "free_cell": told.free_cell,
        "seed": told.seed,
        "perturb": told.perturb,
        "ours": result.ours,
        "optimizers": {name: _optimizer(result, name) for name in result.by_calls()},
        "best_classical": result.best,
        "ratio_to_best_classical": None if to_best is None else to_best.ratio.value,
        "ratio_to_best_classical_interval_95": None if to_best is None else _ends(to_best.ratio),
        "geometric_ratio_to_best_classical": None if to_best is None else to_best.geometric_ratio,
        "same_minimum_rate": None if to_best is None else to_best.same_minimum_rate,
        "lower_minimum_rate": None if to_best is None else to_best.lower_minimum_rate,
        "break_even_seconds_per_force_call": None if to_best is None else to_best.break_even_seconds,
        "ratio_to_core": to_core.ratio.value,
        "ratio_to_core_interval_95": _ends(to_core.ratio),
        "geometric_ratio_to_core": to_core.geometric_ratio,
        "p95_of_paired_ratios_to_core": to_core.p95_of_paired_ratios,
        "p95_of_paired_ratios_to_core_in_the_same_minimum": to_core.p95_where_same,
        "same_minimum_rate_as_core": to_core.same_minimum_rate,
        "lower_minimum_rate_than_core": to_core.lower_minimum_rate,
        "force_calls": {name: charged(scores).astype(int).tolist() for name, scores in result.scores.items()},
        "converged": {name: [score.converged for score in scores] for name, scores in result.scores.items()},
        "energies_ev": {name: [score.energy_ev for score in scores] for name, scores in result.scores.items()},
        "n_atoms": [score.n_atoms for score in result.scores[result.ours]],
        "versions": versions(),
        "command": told.command,
    }


def _optimizer(result: ContestResult, name: str) -> dict[str, Any]:
    summary = result.summaries[name]
    best = result.best
    return {
        "mean_force_calls": summary.mean.value,
        "median_force_calls": summary.median,
        "p95_force_calls": summary.p95,
        "failures": summary.failures,
        "wall_time_seconds": summary.seconds,
        "mean_force_calls_interval_95": _ends(summary.mean),
        "worst_force_calls": summary.worst,
        "calculator_seconds": summary.calculator_seconds,
        "overhead_seconds_per_force_call": summary.overhead_seconds_per_call,
        "same_minimum_rate": None if best is None else result.compared(name, best).same_minimum_rate,
        "median_distance_from_ours_angstrom": median_distance(result.scores[result.ours], result.scores[name]),
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def versions() -> dict[str, str]:
    """Of whatever can change a number."""
    packages = {name: version(name) for name in ("ase", "numpy", "scipy", "torch")}
    return {"relaxion": __version__, **packages, "python": platform.python_version()}


def as_table(result: ContestResult) -> Table:
    """For people at a terminal."""
    told = result.circumstances
    title = f"{told.set_name}: {told.title}; {result.n_structures} structures, fmax {told.fmax:g} eV/Å"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("force calls of")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name in result.by_calls():
        style = "bold" if name == result.ours else ""
        table.add_row(name, *cells(result, name), style=style)
    return table


def cells(result: ContestResult, name: str) -> list[str]:
    """Of one optimizer, below `HEADINGS`."""
    summary: OptimizerSummary = result.summaries[name]
    best = None if result.best is None else result.compared(name, result.best)
    rate = None if best is None else best.same_minimum_rate
    return [
        f"{summary.mean.value:.1f}",
        f"{summary.mean.low:.1f}–{summary.mean.high:.1f}",
        f"{summary.median:.1f}",
        f"{summary.p95:.1f}",
        str(summary.worst),
        str(summary.failures),
        "–" if best is None else f"{best.ratio.value:.2f}",
        "–" if rate is None else f"{rate:.0%}",
        f"{summary.seconds:.1f}",
        f"{1000 * summary.overhead_seconds_per_call:.2g}",
    ]


def sentences(result: ContestResult) -> list[str]:
    """What the table comes to: ratio to the best, ratio to the core, break-even."""
    said = _who_relaxed(result)
    if result.to_best is not None:
        said += [_to_best(result, result.to_best), _break_even(result, result.to_best)]
    if result.ours != CORE:
        core = result.to_core
        said.append(
            f"{result.ours} needs {core.ratio:.2f} of the force calls of its classical optimizer; 95th percentile of "
            f"paired ratios {core.p95_of_paired_ratios:.2f}, {_ratio(core.p95_where_same)} where both end in the same "
            f"minimum ({_per_cent(core.same_minimum_rate)}; lower in {_per_cent(core.lower_minimum_rate)})."
        )
    return said


def _who_relaxed(result: ContestResult) -> list[str]:
    """By which policies; nothing where there was only the core."""
    used = result.circumstances.policies_used
    if not set(used) - {CLASSICAL}:
        return []
    words = [f"{'the classical optimizer' if name == CLASSICAL else name} {number}" for name, number in used.items()]
    return [f"Structures that {result.ours} relaxed by policy: {', '.join(words)}."]


def _to_best(result: ContestResult, best: Comparison) -> str:
    return (
        f"{result.ours} needs {best.ratio:.2f} of the force calls of {best.other}, the best classical one here "
        f"(shifted geometric mean {best.geometric_ratio:.2f}); same minimum in {_per_cent(best.same_minimum_rate)}, "
        f"a lower one in {_per_cent(best.lower_minimum_rate)} of the structures where both converged."
    )


def _break_even(result: ContestResult, best: Comparison) -> str:
    price = best.break_even_seconds
    if price is None:
        return f"{result.ours} saves no force calls over {best.other}, so it is not faster at any cost of a force call."
    if price == 0:
        return f"Break-even: {result.ours} takes less time than {best.other} at any cost of a force call."
    cost = f"{1000 * price:.2g} ms" if price < 1 else f"{price:.2g} s"
    return f"Break-even: {result.ours} takes less time than {best.other} where a force call costs above {cost}."


def _ratio(number: float | None) -> str:
    return "none" if number is None else f"{number:.2f}"


def _per_cent(rate: float | None) -> str:
    return "no start" if rate is None else f"{rate:.0%}"
