"""Tables of what agents learned on atoms, from the files that `benchmarks/atoms/learning.py` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Run = dict[str, Any]

TASKS = {  # the classical rows of each task, and its runs in order
    "emt": (
        "emt-stiffness-classical",
        {
            "emt-stiffness-td3": "TD3, stiffness policy",
            "emt-stiffness-td3 12032": "the same, first 12 000 steps",
            "emt-stiffness-paper": "TD3 as in its paper, stiffness policy",
            "emt-stiffness-lessons": "the same network, fitted to examples",
            "emt-metals-td3": "TD3, direct policy",
            "emt-metals-sac": "SAC, direct policy",
            "emt-metals-d4pg": "D4PG, direct policy",
            "emt-metals-ddpg": "DDPG, direct policy",
            "emt-metals-expert": "TD3, direct policy, expert at first",
        },
    ),
    "al-fe": (
        "al-fe-classical",
        {
            "al-fe-stiffness-td3": "TD3, stiffness policy",
            "al-fe-stiffness-td3 10048": "the same, first 10 000 steps",
            "al-fe-stiffness-sac": "SAC, stiffness policy",
            "al-fe-stiffness-d4pg": "D4PG, stiffness policy",
            "al-fe-stiffness-ddpg": "DDPG, stiffness policy",
            "al-fe-stiffness-forces": "TD3, stiffness policy, rewarded for forces only",
            "al-fe-stiffness-lessons": "the same network, fitted to examples",
            "al-fe-td3": "TD3, direct policy",
            "al-fe-expert": "TD3, direct policy, expert at first",
        },
    ),
    "alfe": (
        "alfe-cubic-classical",
        {
            "alfe-light-td3": "TD3",
            "alfe-light-sac": "SAC",
            "alfe-light-d4pg": "D4PG",
            "alfe-light-ddpg": "DDPG",
            "alfe-e3nn-td3": "TD3, e3nn policy",
        },
    ),
}
RIVALS = ("BFGSLineSearch", "core")  # the table has the steps until a policy needs fewer calls
COLUMNS = (
    "", "steps", "force calls, each seed", "failed", "below BFGSLineSearch after", "below classical after",
    "later worst", "CPU minutes",
)  # fmt: skip


def table(root: Path, task: str) -> str:
    """Runs of one task, and the classical optimizers from the same starts."""
    classical, rows = TASKS[task]
    others = json.loads((_folder(root) / f"{classical}.json").read_text())
    limits = [others[name]["mean_force_calls"] for name in RIVALS]
    runs = {label: runs_of(root, name) for name, label in rows.items()}
    lines = [_row(label, own, limits) for label, own in runs.items() if own]
    lines += _springs(root, task)
    lines += [f"| {_title(name)} | – | {own['mean_force_calls']:.2f} | | | | | |" for name, own in others.items()]
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *lines])


def _springs(root: Path, task: str) -> list[str]:
    """Springs times one number found on validation starts, where it was looked for (`gain.py`)."""
    file = _folder(root) / f"{task}-springs.json"
    if not file.exists():
        return []
    held_out = json.loads(file.read_text())["held_out"]
    cells = {
        gain: (f"{row['force_calls_mean']:.2f}", f"{1 - row['success_rate']:.0%}") for gain, row in held_out.items()
    }
    return [
        f"| springs × {gain}, nothing learned | – | {calls} | {failed} | | | | |"
        for gain, (calls, failed) in cells.items()
    ]


def runs_of(root: Path, name: str) -> list[Run]:
    """By seed, 0 to 9; of `NAME STEPS` the first steps."""
    name, _, steps = name.partition(" ")
    files = (_folder(root) / f"{name}-{seed}.json" for seed in range(10))
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    return [_first(run, int(steps)) for run in runs] if steps else runs


def _first(run: Run, steps: int) -> Run:
    """As if it had ended then: the kept policy was the best on validation starts until then."""
    curve = [row for row in run["curve"] if row[0] <= steps]
    kept = dict(zip(run["columns"], min(curve, key=lambda row: row[2]), strict=True))
    facts = {"kept_force_calls_mean": kept["force_calls_mean"], "kept_success_rate": kept["success_rate"]}
    return {"curve": curve, "steps": curve[-1][0], "cpu_seconds": run["cpu_seconds"] * steps / run["steps"], **facts}


def worst_later(run: Run) -> float:
    """The worst assessment after the best one, on validation starts, beside it."""
    calls = [row[2] for row in run["curve"]]
    best = min(calls)
    return max(calls[calls.index(best) :]) / best


def below(run: Run, limit: float) -> int | None:
    """Steps until the first assessment with fewer force calls than this, from the starts of the results."""
    return next((row[0] for row in run["curve"] if row[1] < limit), None)


def _row(label: str, runs: list[Run], limits: list[float]) -> str:
    cells = [label, _thousands(runs[0]["steps"])]
    cells += ["**" + ", ".join(f"{run['kept_force_calls_mean']:.2f}" for run in runs) + "**"]
    cells += [_span([f"{1 - run['kept_success_rate']:.0%}" for run in runs])]
    cells += [_after([below(run, limit) for run in runs]) for limit in limits]
    cells += [_span([f"{worst_later(run):.2f}" for run in runs])]
    cells += [_span([f"{seconds / 60:.1f}" for run in runs if (seconds := run["cpu_seconds"])])]  # not kept of some
    return f"| {' | '.join(cells)} |"


def _after(steps: list[int | None]) -> str:
    """Of the quickest and the slowest seed; those that never got there are counted."""
    reached = [_thousands(step) for step in sorted(step for step in steps if step is not None)]
    if not reached:
        return "never"
    missing = len(steps) - len(reached)
    return "–".join(dict.fromkeys((reached[0], reached[-1]))) + (f", {missing} never" if missing else "")


def _thousands(steps: int) -> str:
    return f"{round(steps, -2):,}".replace(",", " ")


def _span(values: list[str]) -> str:
    """The lowest and the highest of numbers as they are printed."""
    if not values:
        return "–"
    low, high = (choose(values, key=lambda text: float(text.rstrip("%"))) for choose in (min, max))
    return low if low == high else f"{low}–{high}"


def _title(name: str) -> str:
    return "classical optimizer" if name == "core" else f"ASE {name}"


def _folder(root: Path) -> Path:
    return root / "benchmarks/atoms/results/learning"


# ---- what to turn first: benchmarks/atoms/tuning_guide.py

SYSTEMS = {"alfe": "cubic AlFe", "emt": "EMT metals", "al-fe": "Al–Fe"}
BASE = "base"


def turned(root: Path, system: str = "") -> str:
    """All that was measured on one system, or without a name all systems beside their bases."""
    runs = json.loads((_folder(root) / "tuning-guide.json").read_text())
    level = json.loads((_folder(root) / "tuning-guide-classical.json").read_text())
    names = list(dict.fromkeys(run["row"] for run in runs))

    def of(row: str, place: str) -> list[Run]:
        found = [run for run in runs if (run["row"], run["system"]) == (row, place)]
        return sorted(found, key=lambda run: run["seed"])

    if not system:
        lines = [f"| turned | {' | '.join(SYSTEMS.values())} |", "|---" * (len(SYSTEMS) + 1) + "|"]
        return "\n".join([*lines, *(_beside(row, [(of(row, place), of(BASE, place)) for place in SYSTEMS])
                                    for row in names)])  # fmt: skip
    columns = ("turned", "force calls, each seed", "later worst", "below classical after", "CPU seconds")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in names:
        if own := of(row, system):
            best = ", ".join(f"{_best(run):.1f}" for run in own)
            worst = _span([f"{_worst(run):.2f}" for run in own])
            after = _after([next((step for step, calls in run["curve"] if calls < level[system]), None) for run in own])
            seconds = _span([str(run["cpu_seconds"]) for run in own])
            lines.append(f"| {row} | {best} | {worst} | {after} | {seconds} |")
    return "\n".join([*lines, f"| classical optimizer | {level[system]:.1f} | | | |"])


def _beside(row: str, cells: list[tuple[list[Run], list[Run]]]) -> str:
    """Mean calls of the best policies divided by those of the base with the same seeds; lowest and highest."""
    shown = []
    for own, base in cells:
        bases = {run["seed"]: _best(run) for run in base}
        pairs = [(_best(run), bases[run["seed"]]) for run in own if run["seed"] in bases]
        if not pairs:
            shown.append("")
        elif row == BASE:
            shown.append(f"{sum(bases.values()) / len(bases):.1f} calls")
        else:
            ratios = [calls / other for calls, other in pairs]
            mean = sum(calls for calls, _ in pairs) / sum(other for _, other in pairs)
            shown.append(f"{mean:.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if len(pairs) > 1 else f"{mean:.2f}*")
    return f"| {row} | {' | '.join(shown)} |"


def _best(run: Run) -> float:
    return min(calls for _, calls in run["curve"])


def _worst(run: Run) -> float:
    """The worst assessment after the best, beside it."""
    calls = [calls for _, calls in run["curve"]]
    return max(calls[calls.index(min(calls)) :]) / min(calls)
