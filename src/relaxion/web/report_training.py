"""The page of training runs: curves beside BFGS and FIRE, diagnosis, profile, scatter, parity, the hardest structures.

The report embeds its parts; the live page (`live_server`) is sent those that change, by their ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relaxion.errors import RunError
from relaxion.training.curves import ASSESSED_RETURN, EXPLORED_RETURN, FORCE_CALLS, REFERENCES, SUCCESS
from relaxion.web.report_facts import versions
from relaxion.web.report_film import LARGEST_BYTES as MOST_FILM_BYTES
from relaxion.web.report_page import LARGEST_BYTES, SCRIPTS, Page, Part, own_bytes
from relaxion.web.report_relaxation import citation
from relaxion.web.report_training_gauges import agent_gauges, alarm_list, diagnosis_gauges
from relaxion.web.report_training_structures import structure_parts
from relaxion.web.report_training_words import count, duration, short
from relaxion.web.watch_run import FINISHED, RUNNING, STOPPED, WatchedRun, watched

TRAINING_SCRIPTS = (*SCRIPTS[:-1], "training.js", SCRIPTS[-1])
MOST_RUNS = 12  # on one page: more curves than that nobody tells apart
LEAST_FILM_BYTES = 40_000
X_LABEL = "environment steps"  # the true total, those before a resume included


def training_report(folder: Path) -> Page:
    """Of a run folder, finished or not."""
    (run,) = watched([folder])
    run.poll(seconds=600.0)
    if run.history.step < 0:
        words = "its lines cannot be read" if run.unreadable else "it has no line yet"
        raise RunError(f"{folder} has nothing to report: {run.files.metrics.name}: {words}; wait for the first one")
    return training_page([run])


def training_page(runs: Sequence[WatchedRun]) -> Page:
    """Complete in itself and below 1 MB: films get what the rest leaves."""
    rest = len(json.dumps(training_parts(runs, film_bytes=0), ensure_ascii=False).encode())
    room = min(MOST_FILM_BYTES, LARGEST_BYTES - own_bytes(TRAINING_SCRIPTS) - rest - 8_000)
    parts = training_parts(runs, film_bytes=max(LEAST_FILM_BYTES, room))
    words = heading(runs)
    return Page(words["title"], words["eyebrow"], words["lead"], parts, scripts=TRAINING_SCRIPTS)


def heading(runs: Sequence[WatchedRun]) -> dict[str, str]:
    """Title, the line above and the sentence below."""
    if len(runs) > 1:
        return {
            "title": f"{len(runs)} training runs",
            "eyebrow": "Relaxion training · " + ", ".join(run.label for run in runs),
            "lead": "; ".join(f"{run.label}: {status(run)}" for run in runs),
        }
    (run,) = runs
    return {"title": _title(run), "eyebrow": f"Relaxion training · {run.label}", "lead": _lead(run)}


def _title(run: WatchedRun) -> str:
    who = f"{run.agent.upper()}, seed {run.seed}"
    calls, returns = run.history.newest(FORCE_CALLS), _newest_return(run)
    if calls is not None:
        bfgs = run.history.newest(REFERENCES["BFGS"])
        beside = "" if bfgs is None else f", BFGS needs {short(bfgs)}"
        return f"{who}: {short(calls)} force calls per relaxation{beside}"
    return f"{who}: {'no assessment yet' if returns is None else f'mean return {short(returns)}'}"


def _lead(run: WatchedRun) -> str:
    settings = run.settings
    names = ("structures", "potential") if run.on_structures else ("task",)
    words = [str(settings[name]) for name in names if name in settings] or [str(settings.get("task", "a run"))]
    tolerance = settings.get("force_tolerance_ev_per_angstrom")
    words += [f"to {tolerance:g} eV/Å"] if isinstance(tolerance, int | float) else []
    return f"{', '.join(words)}. {status(run)[0].upper()}{status(run)[1:]}."


def status(run: WatchedRun) -> str:
    """`running, step 12 000 of 20 000`."""
    steps = run.settings.get("steps")
    at = f"step {count(max(run.history.step, 0))}" + (f" of {count(steps)}" if isinstance(steps, int) else "")
    if run.status == STOPPED:
        return f"stopped at {at}; the same command with --resume goes on"
    return f"{run.status} at {at}" if run.status in (FINISHED, RUNNING) else run.status


def training_parts(runs: Sequence[WatchedRun], film_bytes: int) -> list[Part]:
    """Everything, each part with an id that stays."""
    several = len(runs) > 1
    parts: list[Part] = [_runs_table(runs)] if several else [_tiles(runs[0])]
    parts += _curves(runs)
    parts.append(alarm_list(runs))
    if several:
        choices = [f"{run.label} ({run.agent.upper()}, seed {run.seed})" for run in runs]
        chooser = {"kind": "chooser", "title": "One run closely", "label": "Show", "choices": choices}
        parts.append({"id": "chooser", **chooser})
    for place, run in enumerate(runs):
        own = _parts_of(run, film_bytes // len(runs))
        parts += [{**part, "id": f"{part['id']}-{place}", **({"run": place} if several else {})} for part in own]
    return [*parts, {**citation(), "id": "citation"}]


def _parts_of(run: WatchedRun, film_bytes: int) -> list[Part]:
    found, missing = run.kept(f"structures {film_bytes}", lambda: structure_parts(run, film_bytes))
    parts = [*diagnosis_gauges(run), *found, *agent_gauges(run)]
    parts.append({"id": "facts", "kind": "facts", "title": f"How {run.label} was made", "facts": _facts(run)})
    if run.settings_text:
        parts.append(
            {
                "id": "settings", "kind": "folded", "title": "Settings", "text": run.settings_text,
                "summary": f"All {len(run.settings)} settings, as in settings.toml",
            }
        )  # fmt: skip
    notes = [*missing, *_notes(run)]
    return parts + ([{"id": "notes", "kind": "notes", "title": "Worth knowing", "notes": notes}] if notes else [])


def _tiles(run: WatchedRun) -> Part:
    tiles = _structure_tiles(run) if run.on_structures else _return_tiles(run)
    steps = run.settings.get("steps")
    of = f"of {count(steps)}, {run.status}" if isinstance(steps, int) else run.status
    tiles.append({"label": "Environment steps", "value": count(max(run.history.step, 0)), "note": of})
    spent = run.history.newest("time/force_calls")
    tiles += [{"label": "Spent on training", "value": count(spent), "unit": "force calls"}] if spent else []
    seconds = (run.result or {}).get("wall_time_seconds", run.history.newest("time/time_elapsed"))
    tiles += [{"label": "Time", "value": duration(seconds), "note": "resumes included"}] if seconds else []
    standing = run.standing()
    if run.history.names("diagnosis/"):
        tone, note = ("good", "none stands") if not standing else ("bad", ", ".join(standing).replace("_", " "))
        tiles.append({"label": "Alarms", "value": str(len(standing)), "note": note, "tone": tone})
    return {"id": "tiles", "kind": "tiles", "title": "Result", "tiles": tiles}


def _structure_tiles(run: WatchedRun) -> list[dict[str, Any]]:
    steps, calls = run.history.points(FORCE_CALLS)
    if not calls:
        return [{"label": "Force calls per relaxation", "value": "–", "note": "not assessed yet"}]
    classical = {name: run.history.newest(metric) for name, metric in REFERENCES.items()}
    bfgs, success = classical["BFGS"], run.history.newest(SUCCESS)
    note = f"{short(calls[0])} at step {count(steps[0])}" if len(calls) > 1 else f"at step {count(steps[0])}"
    tiles: list[dict[str, Any]] = [{"label": "Force calls per relaxation", "value": short(calls[-1]), "note": note}]
    if bfgs:
        beside = ", ".join(f"{name} {short(value)}" for name, value in classical.items() if value is not None)
        tone = "good" if calls[-1] < bfgs else "warn"
        tiles.append({"label": "Beside BFGS", "value": f"{calls[-1] / bfgs:.2f} ×", "note": beside, "tone": tone})
    if success is not None:
        tone = "good" if success >= 0.99 else "warn"
        tiles.append({"label": "Converged", "value": f"{100 * success:.0f} %", "note": "of the starts", "tone": tone})
    return tiles


def _return_tiles(run: WatchedRun) -> list[dict[str, Any]]:
    returns, found = _newest_return(run), (run.assessment or {}).get("returns") or []
    known = [value for value in found if isinstance(value, int | float)]
    worst = min(known) if known else run.history.newest("eval/worst_reward")
    note = "" if worst is None else f"worst {short(worst)}"
    return [{"label": "Mean return", "value": "–" if returns is None else short(returns), "note": note}]


def _newest_return(run: WatchedRun) -> float | None:
    assessed = run.history.newest(ASSESSED_RETURN)
    return run.history.newest(EXPLORED_RETURN) if assessed is None else assessed


def _runs_table(runs: Sequence[WatchedRun]) -> Part:
    headings = ["Run", "Agent", "Seed", "Status", "Step", "Force calls", "Converged", "Mean return", "Alarms"]
    rows = []
    for run in runs:
        calls, success, returns = (run.history.newest(m) for m in (FORCE_CALLS, SUCCESS, ASSESSED_RETURN))
        shown = ["–" if v is None else short(v) for v in (calls, None if success is None else 100 * success, returns)]
        shown[1] += " %" if success is not None else ""
        cells = [run.label, run.agent.upper(), str(run.seed), run.status, count(max(run.history.step, 0))]
        rows.append({"cells": [*cells, *shown, str(len(run.standing()))]})
    columns = [{"label": heading, "text": heading in ("Agent", "Status")} for heading in headings]
    return {"id": "runs", "kind": "table", "caption": "Runs", "columns": columns, "rows": rows}


def _curves(runs: Sequence[WatchedRun]) -> list[Part]:
    parts: list[Part] = []
    on_structures = [run for run in runs if run.on_structures]
    others = [run for run in runs if not run.on_structures]
    if on_structures:
        parts += [_force_call_curve(on_structures, runs), _success_curve(on_structures, runs)]
    if others:
        parts.append(_return_curve(others, runs))
    return parts


def _force_call_curve(shown: Sequence[WatchedRun], runs: Sequence[WatchedRun]) -> Part:
    series = [_series(run, FORCE_CALLS, runs) for run in shown]
    limits = []
    for place, (name, metric) in enumerate(REFERENCES.items()):
        known = [value for run in shown if (value := run.history.newest(metric)) is not None]
        if known:
            limits.append({"value": known[0], "label": f"{name} {short(known[0])}", "style": place + 1})
    values = [value for one in series for value in one["y"]] + [limit["value"] for limit in limits]
    wide = bool(values) and max(values) > 8 * max(min(values), 1)  # else the end of the curve would be pressed flat
    return {
        "id": "curve", "kind": "plot", "title": "Force calls per relaxation", "span": 7, "x_label": X_LABEL,
        "y_label": "mean force calls", "series": series, "limits": limits, "log": wide, "x_range": _x_range(series),
        **({} if wide or not values else {"y_range": [0, 1.08 * max(values)]}),
        "empty": "no assessment yet", "summary": _summary("mean force calls of assessments", series, limits),
    }  # fmt: skip


def _success_curve(shown: Sequence[WatchedRun], runs: Sequence[WatchedRun]) -> Part:
    series = [_series(run, SUCCESS, runs, scale=100.0) for run in shown]
    return {
        "id": "success", "kind": "plot", "title": "Converged", "span": 5, "x_label": X_LABEL, "y_label": "starts (%)",
        "series": series, "y_range": [-3, 103], "x_range": _x_range(series), "empty": "no assessment yet",
        "summary": _summary("share of starts that converge, per cent", series),
    }  # fmt: skip


def _return_curve(shown: Sequence[WatchedRun], runs: Sequence[WatchedRun]) -> Part:
    assessed = all(run.history.newest(ASSESSED_RETURN) is not None for run in shown)
    metric, y_label = (ASSESSED_RETURN, "mean return") if assessed else (EXPLORED_RETURN, "mean return, exploring")
    series = [_series(run, metric, runs) for run in shown]
    if len(shown) == 1 and assessed:
        place = _place(shown[0], runs)
        series.append({**_series(shown[0], "eval/worst_reward", runs), "name": "worst start", "style": place + 1})
        series.append({**_series(shown[0], EXPLORED_RETURN, runs), "name": "exploring", "style": place + 2})
    series = [one for one in series if one["x"]] or series[:1]
    return {
        "id": "returns", "kind": "plot", "title": "Return", "span": 12, "x_label": X_LABEL, "y_label": y_label,
        "series": series, "x_range": _x_range(series), "empty": "no episode has ended yet",
        "summary": _summary(y_label, series),
    }  # fmt: skip


def _series(run: WatchedRun, metric: str, runs: Sequence[WatchedRun], scale: float = 1.0) -> dict[str, Any]:
    steps, values = run.history.points(metric)
    name = run.label if len(runs) > 1 else run.agent.upper()
    return {"name": name, "x": steps, "y": [float(f"{scale * v:.5g}") for v in values], "style": _place(run, runs)}


def _place(run: WatchedRun, runs: Sequence[WatchedRun]) -> int:
    """Of its colour, the same in all plots."""
    return next(place for place, other in enumerate(runs) if other is run)


def _x_range(series: Sequence[dict[str, Any]]) -> list[int]:
    return [0, max([1, *(one["x"][-1] for one in series if one["x"])])]


def _summary(what: str, series: Sequence[dict[str, Any]], limits: Sequence[dict[str, Any]] = ()) -> str:
    ends = [
        f"{one['name']} from {short(one['y'][0])} to {short(one['y'][-1])} at step {count(one['x'][-1])}"
        for one in series
        if one["y"]
    ]
    said = "; ".join([*ends, *(limit["label"] for limit in limits)])
    return f"{what} against environment steps; {said or 'nothing yet'}."


def _facts(run: WatchedRun) -> list[dict[str, Any]]:
    settings, result, record = run.settings, run.result or {}, run.assessment or {}
    seeds = f"{run.seed} decides everything drawn; assessments start from seeds of their own, the same for all runs"
    facts = [
        ("Folder", str(run.folder)),
        ("Status", run.status),
        ("Agent", run.agent.upper()),
        ("Task", str(settings.get("task", "not recorded"))),
        ("Structures", settings.get("structures")),
        ("Held apart", settings.get("held_apart")),
        ("Potential", settings.get("potential", result.get("potential"))),
        ("Seed", seeds),
        ("Assessed at", f"step {count(record['step'])}" if isinstance(record.get("step"), int) else None),
        ("Weights", f"SHA-256 {result['weights_sha256']}" if "weights_sha256" in result else None),
        ("Versions", f"{versions()} (of this page)"),
    ]
    shown: list[dict[str, Any]] = [{"label": label, "value": str(value)} for label, value in facts if value]
    if isinstance(record.get("command"), str):
        shown.append({"label": "Command", "value": record["command"], "code": True})
    again = f"relaxion train {run.folder}/settings.toml --out NEW"
    return [*shown, {"label": "The same again", "value": again, "code": True}]


def _notes(run: WatchedRun) -> list[str]:
    notes = list(run.problems.values())
    if run.unreadable:
        lines = "line" if run.unreadable == 1 else "lines"
        notes.append(f"{run.unreadable} {lines} of metrics.jsonl could not be read and are left out.")
    if run.cut_line:
        notes.append("metrics.jsonl ends with half a line, which is left out: the run was cut while it wrote.")
    if run.thinned:
        notes.append("metrics.jsonl is long: curves show some of its lines, assessments first.")
    return notes
