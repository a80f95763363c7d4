"""The page of training runs: curves beside BFGS and FIRE, diagnosis, profile, scatter, parity, the hardest structures.

The report embeds its parts; the live page (`live.py`) is sent those that change, by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relaxion.apps.report.page import (
    FILM_BYTES,
    LARGEST_BYTES,
    SCRIPTS,
    Page,
    Part,
    count,
    duration,
    facts,
    notes,
    own_bytes,
    plot,
    rounded,
    short,
    table,
    tile,
    versions,
)
from relaxion.apps.report.relaxation import citation
from relaxion.apps.report.run import FINISHED, RUNNING, STOPPED, WatchedRun, watched
from relaxion.apps.report.training_structures import structure_parts
from relaxion.errors import RunError
from relaxion.settings import command_words
from relaxion.train.diagnostics import DIAGNOSTICS, PREFIX, RULES, Diagnostic, Rule
from relaxion.train.runs.run_folder import ASSESSED_RETURN, EXPLORED_RETURN, FORCE_CALLS, REFERENCES, SUCCESS

TRAINING_SCRIPTS = (*SCRIPTS[:-1], "training.js", SCRIPTS[-1])
MOST_RUNS = 12  # on one page: more curves than that nobody tells apart
LEAST_FILM_BYTES = 40_000
SEEDS = "assessments start from seeds of their own, the same for all runs"

NOTHING_YET = "no assessment yet; the first one is made before training begins"
SPARK_POINTS = 50
SHOWN_BY = {"share_non_finite": "outcome_non_finite"}  # numbers of rules that are not logged under their own name
UNITS = ("_ev_per_angstrom", "_angstrom", "_transitions")  # shown behind the value instead
AGENT_PREFIXES = ("train/", "rollout/", "fit/", "hops/", "time/fps")
AGENT_WORDS = {  # instead of the short names that logs of agents have
    "n_updates": "updates", "q_mean": "mean Q", "target_mean": "mean target", "actor_loss": "policy loss",
    "ep_rew_mean": "return of an episode", "ep_len_mean": "steps of an episode", "fps": "steps per second",
    "ent_coef": "entropy weight", "ent_coef_loss": "loss of the entropy weight",
}  # fmt: skip
MOST_ALARMS_SHOWN = 60
FIRST_GAUGES = 6  # the others are folded away
FIRST = (
    "assessed_calls_beside_bfgs", "outcome_converged", "blocked_share", "policy_move_beside_springs", "q_at_start",
    "replay_age_transitions",
)  # fmt: skip
HEALTHY_NUMBERS = re.compile(r"(?P<low>[\d.]+)–(?P<high>[\d.]+)|below (?P<below>[\d.]+)|above (?P<above>[\d.]+)|0$")
HEALTHY_SHARES = {  # of all relaxations, where outcomes are counted: from, to
    "soon most": (0.5, 1.0), "many at first, then few": (0.0, 0.5), "few": (0.0, 0.1), "below half": (0.0, 0.5),
    "below 10 %": (0.0, 0.1),
}  # fmt: skip
OUTCOME = "outcome_"
LATE = "late in training"  # of healthy ranges that a young run need not have reached
LEAST_TREND = 0.05  # relative change from the first to the last third of a curve


def training_report(folder: Path) -> Page:
    """Of a run folder, finished or not."""
    (run,) = watched([folder])
    run.poll(seconds=600.0)
    if run.history.step < 0:
        words = "its lines cannot be read" if run.unreadable else "it has no line yet"
        raise RunError(f"{folder} has nothing to report: {run.files.metrics.name}: {words}; wait for the first one")
    return training_page([run])


class TrainingRuns:
    """Runs as the live page follows them."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = runs

    def poll(self, seconds: float) -> bool:
        news = [run.poll(seconds / len(self.runs)) for run in self.runs]
        return any(news)

    def heading(self) -> dict[str, Any]:
        return heading(self.runs)

    def parts(self) -> list[Part]:
        return training_parts(self.runs, FILM_BYTES)

    def page(self) -> Page:
        return training_page(self.runs)


def training_page(runs: Sequence[WatchedRun]) -> Page:
    """Complete in itself and below 1 MB: films get what the rest leaves."""
    rest = len(json.dumps(training_parts(runs, film_bytes=0), ensure_ascii=False).encode())
    room = min(FILM_BYTES, LARGEST_BYTES - own_bytes(TRAINING_SCRIPTS) - rest - 8_000)
    parts = training_parts(runs, film_bytes=max(LEAST_FILM_BYTES, room))
    return Page(**heading(runs), parts=parts, scripts=TRAINING_SCRIPTS)


def heading(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Title, the line above and the sentence below."""
    several = len(runs) > 1
    title = f"{len(runs)} training runs" if several else _title(runs[0])
    lead = "; ".join(f"{run.label}: {status(run)}" for run in runs) if several else _lead(runs[0])
    return {"title": title, "eyebrow": f"Relaxion training · {', '.join(run.label for run in runs)}", "lead": lead}


def _title(run: WatchedRun) -> str:
    who = f"{run.learner}, seed {run.seed}"
    calls = run.newest(FORCE_CALLS)
    bfgs = run.newest(REFERENCES["BFGS"])
    returns = _newest_return(run)
    if calls is None:
        return f"{who}: {'no assessment yet' if returns is None else f'mean return {short(returns)}'}"
    beside = "" if bfgs is None else f", BFGS needs {short(bfgs)}"
    return f"{who}: {short(calls)} force calls per relaxation{beside}"


def _lead(run: WatchedRun) -> str:
    settings = run.settings
    said = status(run)
    names = ("structures", "potential") if run.on_structures else ("task",)
    words = [str(settings[name]) for name in names if name in settings and not run.is_supervised] or [_task(run)]
    tolerance = settings.get("force_tolerance_ev_per_angstrom")
    words += [f"to {tolerance:g} eV/Å"] if isinstance(tolerance, int | float) else []
    return f"{', '.join(words)}. {said[0].upper()}{said[1:]}."


def _task(run: WatchedRun) -> str:
    if run.settings.get("task") == "search":
        return f"Learned from hops of {run.settings.get('structures')}"
    if run.is_supervised:
        return f"Fitted to examples ({run.settings.get('kinds_of', run.settings.get('examples', 'live'))})"
    return str(run.settings.get("task", "a run"))


def status(run: WatchedRun) -> str:
    """`running, step 12 000 of 20 000`."""
    at = f"step {_step(run)}" + (f" of {count(run.steps)}" if run.steps else "")
    if run.status == STOPPED:
        return f"stopped at {at}; it can be resumed"
    return f"{run.status} at {at}" if run.status in (FINISHED, RUNNING) else run.status


def _step(run: WatchedRun) -> str:
    return count(max(run.history.step, 0))


def training_parts(runs: Sequence[WatchedRun], film_bytes: int) -> list[Part]:
    """Everything, each part with an id that stays."""
    several = len(runs) > 1
    headings = ["Run", "Agent", "Seed", "Status", "Step", "Force calls", "Converged", "Mean return", "Alarms"]
    rows = [_cells(run) for run in runs]
    first = table("Runs", headings, rows, text=("Agent", "Status"), id="runs") if several else _tiles(runs[0])
    parts: list[Part] = [first, *_curves(runs), _alarm_list(runs)]
    if several:
        choices = [f"{run.label} ({run.learner}, seed {run.seed})" for run in runs]
        chooser = {"id": "chooser", "kind": "chooser", "title": "One run in detail", "label": "Show"}
        parts.append({**chooser, "choices": choices})
    for place, run in enumerate(runs):
        own = _parts_of(run, film_bytes // len(runs))
        parts += [{**part, "id": f"{part['id']}-{place}", **({"run": place} if several else {})} for part in own]
    return [*parts, citation()]


def _parts_of(run: WatchedRun, film_bytes: int) -> list[Part]:
    found, missing = run.kept(f"structures {film_bytes}", lambda: structure_parts(run, film_bytes))
    settings = {
        "id": "settings", "kind": "folded", "title": "Settings", "text": run.settings_text,
        "summary": f"All {len(run.settings)} settings, as in settings.toml",
    }  # fmt: skip
    shown = [*_diagnosis_gauges(run), *found, *_agent_gauges(run), _facts(run)]
    return [*shown, *([settings] if run.settings_text else []), *notes([*missing, *_problems(run)], id="notes")]


def _tiles(run: WatchedRun) -> Part:
    tiles = _structure_tiles(run) if run.on_structures else [_return_tile(run)]
    standing = run.standing()
    of = f"of {count(run.steps)}, {run.status}" if run.steps else run.status
    tiles.append(tile(_steps_label([run]), _step(run), note=of))
    spent = run.newest("time/force_calls")
    tiles += [tile("Spent on training", count(spent), "force calls")] if spent else []
    seconds = (run.result or {}).get("wall_time_seconds", run.newest("time/time_elapsed"))
    tiles += [tile("Time", duration(seconds), note="including resumes")] if seconds else []
    if run.history.names("diagnosis/"):
        names = ", ".join(standing).replace("_", " ")
        tiles.append(tile("Alarms", str(len(standing)), note=names or "none active", tone="bad" if names else "good"))
    return {"id": "tiles", "kind": "tiles", "title": "Result", "tiles": tiles}


def _structure_tiles(run: WatchedRun) -> list[dict[str, str]]:
    steps, calls = run.history.points(FORCE_CALLS)
    if not calls:
        return [tile("Force calls per relaxation", "–", note="not assessed yet")]
    classical = {name: run.newest(scalar) for name, scalar in REFERENCES.items()}
    bfgs = classical["BFGS"]
    success = run.newest(SUCCESS)
    note = (f"{short(calls[0])} " if len(calls) > 1 else "") + f"at step {count(steps[0])}"
    tiles = [tile("Force calls per relaxation", short(calls[-1]), note=note)]
    if bfgs:
        beside = ", ".join(f"{name} {short(value)}" for name, value in classical.items() if value is not None)
        tone = "good" if calls[-1] < bfgs else "warn"
        tiles.append(tile("Relative to BFGS", f"{calls[-1] / bfgs:.2f} ×", note=beside, tone=tone))
    if success is not None:
        tone = "good" if success >= 0.99 else "warn"
        tiles.append(tile("Converged", f"{100 * success:.0f} %", note="of the starts", tone=tone))
    return tiles


def _return_tile(run: WatchedRun) -> dict[str, str]:
    returns = _newest_return(run)
    found = (run.assessment or {}).get("returns") or []
    known = [value for value in found if isinstance(value, int | float)]
    worst = min(known) if known else run.newest("eval/worst_reward")
    return tile("Mean return", short(returns), note="" if worst is None else f"worst {short(worst)}")


def _newest_return(run: WatchedRun) -> float | None:
    assessed = run.newest(ASSESSED_RETURN)
    return run.newest(EXPLORED_RETURN) if assessed is None else assessed


def _cells(run: WatchedRun) -> list[str]:
    calls, success, returns = (run.newest(scalar) for scalar in (FORCE_CALLS, SUCCESS, ASSESSED_RETURN))
    converged = "–" if success is None else f"{short(100 * success)} %"
    first = [run.label, run.learner, str(run.seed), run.status, _step(run)]
    return [*first, short(calls), converged, short(returns), str(len(run.standing()))]


def _curves(runs: Sequence[WatchedRun]) -> list[Part]:
    structures, others = ([run for run in runs if run.on_structures is kind] for kind in (True, False))
    parts = []
    if structures:
        shares = [_series(run, SUCCESS, runs, scale=100.0) for run in structures]
        success = _curve("success", "Converged", 5, "starts (%)", shares, structures, y_range=[-3, 103])
        parts += [_force_call_curve(structures, runs), success]
    return parts + ([_return_curve(others, runs)] if others else [])


def _force_call_curve(shown: Sequence[WatchedRun], runs: Sequence[WatchedRun]) -> Part:
    series = [_series(run, FORCE_CALLS, runs) for run in shown]
    limits = []
    for place, (name, scalar) in enumerate(REFERENCES.items()):
        known = {short(value): (value, run.label) for run in shown if (value := run.newest(scalar)) is not None}
        for words, (value, label) in known.items():  # one where all runs were assessed on the same structures
            beside = f" ({label})" if len(known) > 1 else ""
            limits.append({"value": value, "label": f"{name} {words}{beside}", "style": place + 1})
    values = [value for one in series for value in one["y"]] + [limit["value"] for limit in limits]
    wide = bool(values) and max(values) > 8 * max(min(values), 1)  # else the end of the curve would be pressed flat
    more = {"limits": limits, "log": wide} | ({} if wide or not values else {"y_range": [0, 1.08 * max(values)]})
    return _curve("curve", "Force calls per relaxation", 7, "mean force calls", series, shown, **more)


def _return_curve(shown: Sequence[WatchedRun], runs: Sequence[WatchedRun]) -> Part:
    assessed = all(run.newest(ASSESSED_RETURN) is not None for run in shown)
    scalar, y_label = (ASSESSED_RETURN, "mean return") if assessed else (EXPLORED_RETURN, "mean return, exploring")
    series = [_series(run, scalar, runs) for run in shown]
    if len(shown) == 1 and assessed:
        place = series[0]["style"]
        for number, (name, other) in enumerate((("worst start", "eval/worst_reward"), ("exploring", EXPLORED_RETURN))):
            series.append({**_series(shown[0], other, runs), "name": name, "style": place + number + 1})
    series = [one for one in series if one["x"]] or series[:1]
    return _curve("returns", "Return", 12, y_label, series, shown, empty="no episode has ended yet")


def _steps_label(runs: Sequence[WatchedRun]) -> str:
    """What steps are counted in: the true total, those before a resume included."""
    return "Updates" if all(run.is_supervised for run in runs) else "Environment steps"


def _curve(
    name: str, title: str, span: int, y_label: str, series: Sequence[dict[str, Any]], runs: Sequence[WatchedRun],
    **more: Any,
) -> Part:  # fmt: skip
    x_label = _steps_label(runs).lower()
    last = max([0, *(one["x"][-1] for one in series if one["x"])])
    ends = [
        f"{one['name']} from {short(one['y'][0])} to {short(one['y'][-1])} at step {count(one['x'][-1])}"
        for one in series
        if one["y"]
    ]
    said = "; ".join([*ends, *(limit["label"] for limit in more.get("limits", ()))])
    wide = last or max(run.steps or 1 for run in runs)
    summary = f"{y_label} against {x_label}; {said or 'nothing yet'}."
    more = {"x_range": [0, wide], "empty": NOTHING_YET} | more
    return plot(title, x_label, y_label, series, summary, id=name, span=span, **more)


def _series(run: WatchedRun, scalar: str, runs: Sequence[WatchedRun], scale: float = 1.0) -> dict[str, Any]:
    """With the colour of its run, the same in all plots."""
    steps, values = run.history.points(scalar)
    name = run.label if len(runs) > 1 else run.learner
    place = [other is run for other in runs].index(True)
    return {"name": name, "x": steps, "y": rounded((scale * value for value in values), 5), "style": place}


def _facts(run: WatchedRun) -> Part:
    settings = run.settings
    result = run.result or {}
    record = run.assessment or {}
    found = [
        ("Folder", run.folder),
        ("Status", run.status),
        ("Agent", None if run.is_supervised else run.learner),
        ("Task", _task(run) if settings else "not recorded"),
        ("Structures", settings.get("structures")),
        ("Held out", settings.get("held_apart")),
        ("Potential", settings.get("potential", result.get("potential"))),
        ("Seed", f"{run.seed} for all random numbers; {SEEDS}"),
        ("Assessed at", f"step {count(record['step'])}" if isinstance(record.get("step"), int) else None),
        ("Weights", f"SHA-256 {result['weights_sha256']}" if "weights_sha256" in result else None),
        ("Versions", f"{versions()} (of this page)"),
        ("Command", str(record["command"]).replace("__main__.py", "relaxion", 1) if "command" in record else None),
        ("Reproduce", " ".join(command_words("train", f"{run.folder}/settings.toml", out="NEW"))),
    ]
    return facts(f"How {run.label} was made", found, id="facts")


def _problems(run: WatchedRun) -> list[str]:
    found = list(run.problems.values())
    name = run.files.metrics.name
    if run.unreadable:
        found.append(f"{run.unreadable} line{'' if run.unreadable == 1 else 's'} of {name} could not be read.")
    if run.cut_line:
        found.append(f"{name} ends with an incomplete line, which is left out: the run was interrupted while writing.")
    if run.thinned:
        found.append(f"{name} is long: curves show a selection of its lines, all assessments included.")
    return found


def _diagnosis_gauges(run: WatchedRun) -> list[Part]:
    """Each number with its healthy range, its way there and its alarm; none where a kind of run has no diagnosis."""
    gauges = [_gauge(run, one) for one in DIAGNOSTICS if run.newest(PREFIX + one.name) is not None]
    if not gauges:
        return []
    gauges.sort(key=_urgency)
    return [{"id": "diagnosis", "kind": "gauges", "title": "Diagnosis", "gauges": gauges, "first": FIRST_GAUGES}]


def _urgency(gauge: dict[str, Any]) -> tuple[int, int]:
    """Alarms, then advice, then the numbers that say most."""
    name = gauge["name"].removeprefix(PREFIX)
    standing = ("alarm", "advice").index(gauge["verdict"]) if gauge["alarm"] else 2
    return standing, FIRST.index(name) if name in FIRST else len(FIRST)


def _gauge(run: WatchedRun, diagnostic: Diagnostic) -> dict[str, Any]:
    rules = [rule for rule in RULES if _shown_at(rule) == diagnostic.name]
    standing = [(rule, words) for rule in rules if (words := _alarm(run, rule)) is not None]
    if standing:
        verdict = ("advice", "warn") if all(rule.is_advice for rule, _ in standing) else ("alarm", "bad")
    else:
        verdict = _verdict(run, diagnostic)
    meaning = f"{diagnostic.meaning[0].upper()}{diagnostic.meaning[1:]}."
    alarms = [f"Alarm: “{rule.headline}” when {rule.when}. What to do: {rule.remedy}." for rule in rules]
    unit = diagnostic.unit if diagnostic.unit not in ("reward", "relaxations", "force calls") else ""
    return {
        **_number(run, PREFIX + diagnostic.name, _label(diagnostic.name)),
        "unit": f"of {short(_relaxations(run))}" if diagnostic.name.startswith(OUTCOME) else unit,
        "summary": f"healthy: {diagnostic.healthy}",
        "more": [meaning, *alarms],
        "alarm": " ".join(words for _, words in standing),
        "verdict": verdict[0],
        "tone": verdict[1],
    }


def _shown_at(rule: Rule) -> str:
    """The diagnostic at which a rule is shown: the first that it needs."""
    return SHOWN_BY.get(rule.needs[0], rule.needs[0])


def _relaxations(run: WatchedRun) -> float:
    """That ended since the line before, whatever their outcome."""
    return sum(run.newest(name) or 0.0 for name in run.history.names(PREFIX + OUTCOME))


def _verdict(run: WatchedRun, diagnostic: Diagnostic) -> tuple[str, str]:
    """A word and a tone, of the healthy range where it is one of numbers or a trend, else of the rules."""
    values = run.history.points(PREFIX + diagnostic.name)[1]
    if diagnostic.healthy in ("falling", "rising"):
        return _trend(values, diagnostic.healthy)
    limits = _limits(diagnostic, run.settings)
    if limits is not None:
        value = values[-1] / (max(_relaxations(run), 1.0) if diagnostic.name.startswith(OUTCOME) else 1.0)
        if limits[0] <= value <= limits[1]:
            return "healthy", "good"
        return ("not yet", "") if LATE in diagnostic.healthy else ("outside its range", "warn")
    rules = [rule for rule in RULES if diagnostic.name in rule.needs]
    if not rules or any(_alarm(run, rule) is not None for rule in rules):
        return "no verdict", ""
    return "no alarm", "good"


def _limits(diagnostic: Diagnostic, settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """`0.01–0.5`, `below 0.3`, `above 0.1 …`, `0`, `above` a setting; None where a healthy range is of another kind."""
    if diagnostic.name.startswith(OUTCOME):
        return HEALTHY_SHARES.get(diagnostic.healthy)
    setting = settings.get(diagnostic.healthy.removeprefix("above "))
    if isinstance(setting, int | float):
        return setting, float("inf")
    found = HEALTHY_NUMBERS.match(diagnostic.healthy)
    if found is None:
        return None
    low = found["low"] or found["above"] or 0.0
    high = found["high"] or found["below"] or (0.0 if found["above"] is None else float("inf"))
    return float(low), float(high)


def _trend(values: Sequence[float], healthy: str) -> tuple[str, str]:
    third = max(1, len(values) // 3)
    before = sum(values[:third]) / third
    change = sum(values[-third:]) / third - before
    if abs(change) <= LEAST_TREND * abs(before):
        return "level", ""
    trend = "rising" if change > 0 else "falling"
    return trend, "good" if trend == healthy else "warn"


def _alarm(run: WatchedRun, rule: Rule) -> str | None:
    """What is said while it stands: the sentence it began with, or its headline where that was not kept."""
    without = f"{rule.headline}: {rule.remedy}" if run.newest(rule.column) == 1.0 else None
    return run.standing().get(rule.name, without)


def _agent_gauges(run: WatchedRun) -> list[Part]:
    """Losses, gradient norms, entropy weight: what the agent logs of itself."""
    names = [name for prefix in AGENT_PREFIXES for name in run.history.names(prefix)]
    if not names:
        return []
    gauges = [_number(run, name, _label(name.split("/", 1)[1])) for name in names]
    title = f"Numbers of the {'fit' if run.is_supervised else 'agent'}"
    return [{"id": "agent", "kind": "gauges", "title": title, "gauges": gauges, "first": FIRST_GAUGES}]


def _number(run: WatchedRun, name: str, label: str) -> dict[str, Any]:
    spark = rounded(run.history.points(name, SPARK_POINTS)[1], 4)
    return {"name": name, "label": label, "value": short(run.newest(name)), "spark": spark}


def _label(name: str) -> str:
    for unit in UNITS:
        name = name.removesuffix(unit)
    words = AGENT_WORDS.get(name, name.replace("_", " ")).replace("bfgs", "BFGS")
    return words[0].upper() + words[1:]


def _alarm_list(runs: Sequence[WatchedRun]) -> Part:
    """Of all runs, the newest first."""
    found = [(event["step"], place, event) for place, run in enumerate(runs) for event in run.alarms]
    found.sort(key=lambda one: one[:2], reverse=True)
    shown = [_event(event, place, runs) for _, place, event in found[:MOST_ALARMS_SHOWN]]
    diagnosed = any(run.history.names(PREFIX) for run in runs)
    none = "None so far." if diagnosed else "This kind of run has no diagnostics."
    if all(run.history.step < 0 for run in runs):  # when something will be seen, as far as the settings say
        found_intervals = [run.settings.get("log_interval_steps") for run in runs]
        intervals = [interval for interval in found_intervals if isinstance(interval, int)]
        none = f"The first numbers come at step {count(min(intervals))}." if intervals else "No numbers yet."
    return {"id": "alarms", "kind": "alarms", "title": "Alarms", "alarms": shown, "none": none}


def _event(event: dict[str, Any], place: int, runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """With a link to the number that it is about."""
    label = runs[place].label if len(runs) > 1 else ""
    name = event.get("alarm", event.get("advice"))
    shown = next((PREFIX + _shown_at(rule) for rule in RULES if rule.name == name), "")
    target = f"diagnosis-{place}-{shown}" if runs[place].newest(shown) is not None else ""
    advice = "advice" in event
    begins = event.get("event") == "begins"
    badge = "ended" if not begins else "advice" if advice else "alarm"
    tone = "good" if not begins else "warn" if advice else "bad"
    when = f"{label}, step {count(event['step'])}" if label else f"step {count(event['step'])}"
    return {"when": when, "badge": badge, "tone": tone, "sentence": event["sentence"], "target": target}
