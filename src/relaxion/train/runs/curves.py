"""Learning curves as PNG: what assessments found against the true total of environment steps (R9.5)."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxion.errors import FileError, RelaxionWarning, RunError
from relaxion.files import check_regular, json_of, replace_file, toml_of
from relaxion.train.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = "time/total_timesteps"
FORCE_CALLS = "eval/force_calls_mean"
SUCCESS = "eval/success_rate"
REFERENCES = {"BFGS": "eval/force_calls_bfgs", "FIRE": "eval/force_calls_fire"}
ASSESSED_RETURN = "eval/mean_reward"
EXPLORED_RETURN = "rollout/ep_rew_mean"

# Okabe and Ito's colours, told apart by all kinds of colour vision; without yellow, which is faint on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")  # for those who see or print no colours
REFERENCE_STYLES = {"BFGS": "--", "FIRE": ":"}
FINAL = {  # metric -> what result.json calls it
    FORCE_CALLS: "final_force_calls_mean",
    SUCCESS: "final_success_rate",
    REFERENCES["BFGS"]: "force_calls_bfgs",
    REFERENCES["FIRE"]: "force_calls_fire",
    ASSESSED_RETURN: "final_return_mean",
}
LARGEST = 1e300  # beyond, nothing can be drawn
NOT_A_DIFFERENCE = ("seed", "steps", "tensorboard", "log_interval_steps", "checkpoint_interval_steps")


@dataclass(frozen=True)
class RunRecord:
    """One run as far as curves need it."""

    folder: Path
    settings: dict[str, Any]
    lines: Sequence[Mapping[str, float | None]]  # of metrics.jsonl, steps rising

    @property
    def agent(self) -> str:
        return str(self.settings.get("agent", "agent"))

    @property
    def on_structures(self) -> bool:
        return any(FORCE_CALLS in line for line in self.lines)

    def points(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values wherever the metric was written down and finite."""
        found = [(line[STEPS], line[metric]) for line in self.lines if line.get(metric) is not None]
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        return steps, values


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds only: one curve."""

    label: str
    runs: Sequence[RunRecord]


def read_run(folder: Path) -> RunRecord:
    """From a run folder, finished or not."""
    files = RunFolder(folder)
    try:
        settings = toml_of(files.settings)
        check_regular(files.metrics)
        content = files.metrics.read_bytes()
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} holds no run with metrics: {error}") from error
    lines = read_lines(content + b"\n" + json.dumps(_final_line(files.result)).encode())
    if not lines:
        raise RunError(f"{folder} has no metrics yet; wait until {files.metrics.name} has its first line")
    return RunRecord(folder, settings, lines)


def read_lines(content: bytes) -> list[dict[str, float | None]]:
    """Lines of metrics.jsonl, steps rising: one that goes back replaces what a run wrote before it was resumed.

    The last line may be half written. Lines of the same step are one.
    """
    kept: list[dict[str, float | None]] = []
    for text in filter(None, content.split(b"\n")):
        try:
            found: dict[str, Any] = json.loads(text)
            line = {name: value if _is_number(value) else None for name, value in found.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):  # half a line, or nothing of ours
            continue
        if (step := line.get(STEPS)) is None:
            continue
        while kept and float(kept[-1][STEPS] or 0) > step:
            kept.pop()
        if kept and kept[-1][STEPS] == step:
            kept[-1] |= line
        else:
            kept.append(line)
    return kept


def _is_number(value: Any) -> bool:
    """A finite one that a curve can have."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _final_line(result: Path) -> dict[str, float]:
    """The assessment at the end, which metrics.jsonl has only where an interval ended there too."""
    try:
        values = json_of(result)
        found = {STEPS: values["steps"]} | {m: values[name] for m, name in FINAL.items() if name in values}
        return {name: value for name, value in found.items() if _is_number(value)}
    except (OSError, ValueError, KeyError, TypeError):  # not finished yet
        return {}


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """By all settings but the seed, in the order they came."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        own = {name: value for name, value in run.settings.items() if name not in NOT_A_DIFFERENCE}
        found.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    groups = list(found.values())
    return [Group(_label(members, groups), members) for members in groups]


def _label(members: Sequence[RunRecord], groups: Sequence[Sequence[RunRecord]]) -> str:
    """The agent, what else sets it apart from the other curves, and how many seeds."""
    first = members[0]
    alike = [group[0].settings for group in groups if group[0].agent == first.agent]
    names = sorted({n for other in alike for n in other | first.settings if other.get(n) != first.settings.get(n)})
    names = [name for name in names if name not in NOT_A_DIFFERENCE]
    words = [f"{name} {first.settings.get(name, '–')}" for name in names] if len(names) <= 3 else [first.folder.name]
    seeds = f"{len(members)} seeds: mean and range" if len(members) > 1 else f"seed {first.settings.get('seed', '?')}"
    return ", ".join([first.agent.upper(), *words, seeds])


def mean_and_range(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Steps, mean, lowest and highest of several curves where all of them have something to say."""
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    values = np.array([np.interp(grid, steps, own) for steps, own in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def figure(runs: Sequence[RunRecord]) -> Figure:
    """Force calls and success rate of runs on structures, returns of others. Nothing global is touched."""
    from matplotlib.figure import Figure

    kinds = {run.on_structures for run in runs}
    if len(kinds) != 1:
        raise RunError("runs on structures and runs on Gymnasium tasks cannot share a figure; draw them apart")
    groups = grouped(runs)
    on_structures = kinds.pop()
    for run in runs:
        if not len(run.points(FORCE_CALLS if on_structures else _return_metric(runs))[0]):
            raise RunError(f"{run.folder} has nothing to draw yet: no assessment and no episode has ended")
    if on_structures:
        drawn = Figure(figsize=(7.0, 5.6), dpi=150, layout="constrained")
        above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        _draw_force_calls(above, groups)
        _draw_success(below, groups)
        lowest = below
    else:
        drawn = Figure(figsize=(7.0, 4.2), dpi=150, layout="constrained")
        above = lowest = drawn.subplots()
        _draw_returns(above, groups)
    above.set_title(_title(runs), fontsize=11, loc="left")
    lowest.set_xlabel("environment steps (total, those before a resume included)")
    lowest.set_xlim(left=0)
    lowest.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}".replace(",", "\u2009"))
    return drawn


def write_curve(folders: Sequence[Path], out: Path) -> None:
    """One PNG of all these runs, in one go."""
    picture = io.BytesIO()
    figure([read_run(folder) for folder in folders]).savefig(picture, format="png")
    try:
        replace_file(out, picture.getvalue())
    except OSError as error:
        raise FileError(f"{out} cannot be written ({error}); does its folder exist, is the disk full?") from error


def leave_curve(folder: Path) -> None:
    """The picture at the end of a run: whatever is wrong with it, the run is good."""
    try:
        write_curve([folder], RunFolder(folder).curve)
    except (ImportError, FileError, RunError) as error:
        warnings.warn(f"no learning curve was drawn: {error}", RelaxionWarning, stacklevel=2)


def _draw_force_calls(axes: Axes, groups: Sequence[Group]) -> None:
    for number, group in enumerate(groups):
        _draw_group(axes, number, group, FORCE_CALLS)
    for name, value in _references(groups).items():
        axes.axhline(value, color="0.25", linestyle=REFERENCE_STYLES[name], linewidth=1.4, label=f"{name} {value:.1f}")
    axes.set_ylabel("mean force calls per relaxation")
    highest = axes.dataLim.ymax
    if highest > 8 * max(axes.dataLim.ymin, 1):
        _log_scale(axes)  # an agent that begins at its limit would press the end of the curve flat
    else:
        axes.set_ylim(0, 1.1 * highest)
    _tidy(axes)


def _log_scale(axes: Axes) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter

    axes.set_yscale("log")
    marks = [number * 10.0**power for power in range(4) for number in (1, 2, 5)]
    axes.yaxis.set_major_locator(FixedLocator(marks))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_success(axes: Axes, groups: Sequence[Group]) -> None:
    for number, group in enumerate(groups):
        _draw_group(axes, number, group, SUCCESS, scale=100.0)
    axes.set_ylim(-3, 103)
    axes.set_yticks([0, 50, 100])
    axes.set_ylabel("converged (%)")
    _tidy(axes, legend=False)


def _draw_returns(axes: Axes, groups: Sequence[Group]) -> None:
    metric = _return_metric([run for group in groups for run in group.runs])
    for number, group in enumerate(groups):
        _draw_group(axes, number, group, metric)
    axes.set_ylabel("mean return" if metric == ASSESSED_RETURN else "mean return, exploring")
    _tidy(axes)


def _return_metric(runs: Sequence[RunRecord]) -> str:
    """Of assessments, if every run has been assessed."""
    assessed = all(len(run.points(ASSESSED_RETURN)[0]) for run in runs)
    return ASSESSED_RETURN if assessed else EXPLORED_RETURN


def _draw_group(axes: Axes, number: int, group: Group, metric: str, scale: float = 1.0) -> None:
    colour = COLOURS[number % len(COLOURS)]
    marker = MARKERS[number % len(MARKERS)]
    curves = [(steps, scale * values) for steps, values in (run.points(metric) for run in group.runs) if len(steps)]
    if not curves:
        return
    if len(curves) == 1:
        steps, mean = curves[0]
    else:
        for own_steps, values in curves:
            axes.plot(own_steps, values, color=colour, linewidth=0.7, alpha=0.45)
        steps, mean, lowest, highest = mean_and_range(curves)
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.18, linewidth=0)
    every = max(1, len(steps) // 20)
    axes.plot(steps, mean, color=colour, linewidth=2.0, marker=marker, markersize=5, markevery=every, label=group.label)


def _references(groups: Sequence[Group]) -> dict[str, float]:
    """Classical optimizers from the same starts: the newest number of the first run that has one."""
    found: dict[str, float] = {}
    for name, metric in REFERENCES.items():
        values = [run.points(metric)[1] for group in groups for run in group.runs]
        newest = [own[-1] for own in values if len(own)]
        if newest:
            found[name] = float(newest[0])
    return found


def _title(runs: Sequence[RunRecord]) -> str:
    """What all of them have in common."""
    words = []
    for name in ("structures", "potential") if runs[0].on_structures else ("task",):
        values = {str(run.settings.get(name, "")) for run in runs}
        if len(values) == 1 and (word := values.pop()):
            words.append(word if len(word) <= 60 else f"…{word[-59:]}")
    tolerances = {run.settings.get("force_tolerance_ev_per_angstrom") for run in runs}
    if len(tolerances) == 1 and (tolerance := tolerances.pop()) is not None:
        words.append(f"to {tolerance:g} eV/Å")
    return ", ".join(words)


def _tidy(axes: Axes, *, legend: bool = True) -> None:
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
