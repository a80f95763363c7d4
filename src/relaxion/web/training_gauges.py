"""The diagnosis as gauges: each number with its healthy range, its way there and, where one stands, its alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxion.training.diagnostics import DIAGNOSTICS, RULES, Diagnostic, Rule
from relaxion.training.diagnostics.alarms import column
from relaxion.training.diagnostics.numbers import PREFIX
from relaxion.web.page import Part
from relaxion.web.run import WatchedRun
from relaxion.web.words import count, short

SPARK_POINTS = 50
SHOWN_BY = {"share_non_finite": "outcome_non_finite"}  # numbers of rules that are not logged under their own name
UNITS = ("_ev_per_angstrom", "_angstrom", "_transitions")  # shown behind the value instead
AGENT_PREFIXES = ("train/", "rollout/", "imitation/", "time/fps")
MOST_ALARMS_SHOWN = 60


def diagnosis_gauges(run: WatchedRun) -> list[Part]:
    """None where this kind of run has no diagnosis."""
    known = [one for one in DIAGNOSTICS if run.history.newest(PREFIX + one.name) is not None]
    if not known:
        return []
    gauges = [_gauge(run, one) for one in known]
    note = "Newest value of each, with its way there. What every number means and what to do: docs/diagnostics.md."
    return [{"id": "diagnosis", "kind": "gauges", "title": "Diagnosis", "gauges": gauges, "note": note}]


def _gauge(run: WatchedRun, diagnostic: Diagnostic) -> dict[str, Any]:
    rules = [rule for rule in RULES if SHOWN_BY.get(rule.needs[0], rule.needs[0]) == diagnostic.name]
    standing = [(rule, words) for rule in rules if (words := _alarm(run, rule)) is not None]
    tone = "" if not standing else "warn" if all(rule.is_advice for rule, _ in standing) else "bad"
    return {
        **_number(run, PREFIX + diagnostic.name, _label(diagnostic.name)),
        "unit": diagnostic.unit if diagnostic.unit not in ("reward", "relaxations", "force calls") else "",
        "healthy": diagnostic.healthy,
        "meaning": diagnostic.meaning[0].upper() + diagnostic.meaning[1:] + ".",
        "alarm_when": "; or ".join(f"“{rule.headline}” when {rule.when}" for rule in rules),
        "alarm": " ".join(words for _, words in standing),
        "tone": tone,
    }


def _alarm(run: WatchedRun, rule: Rule) -> str | None:
    """What is said while it stands: the sentence it began with, or its headline where that was not kept."""
    said = run.standing().get(rule.name)
    if said is not None:
        return said
    return f"{rule.headline}: {rule.remedy}" if run.history.newest(column(rule)) == 1.0 else None


def agent_gauges(run: WatchedRun) -> list[Part]:
    """Losses, gradient norms, entropy weight: what the agent logs of itself."""
    names = [name for prefix in AGENT_PREFIXES for name in run.history.names(prefix)]
    if not names:
        return []
    gauges = [_number(run, name, name.split("/", 1)[1].replace("_", " ")) for name in names]
    note = f"What each is: docs/agents/{run.agent}.md." if run.agent in ("ddpg", "td3", "d4pg", "sac") else ""
    return [{"id": "agent", "kind": "gauges", "title": "The agent's own numbers", "gauges": gauges, "note": note}]


def _number(run: WatchedRun, name: str, label: str) -> dict[str, Any]:
    value = run.history.newest(name)
    _, way = run.history.points(name, SPARK_POINTS)
    spark = [float(f"{one:.4g}") for one in way]
    return {"name": name, "label": label, "value": "–" if value is None else short(value), "spark": spark}


def _label(name: str) -> str:
    for unit in UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def alarm_list(runs: Sequence[WatchedRun]) -> Part:
    """Of all runs, the newest first."""
    found = [(event["step"], place, event) for place, run in enumerate(runs) for event in run.alarms]
    found.sort(key=lambda one: (one[0], one[1]), reverse=True)
    shown = [_event(event, runs[place].label if len(runs) > 1 else "") for _, place, event in found[:MOST_ALARMS_SHOWN]]
    diagnosed = any(run.history.names(PREFIX) for run in runs)
    none = "None so far." if diagnosed else "This kind of run has no diagnosis; its own numbers are below."
    return {"id": "alarms", "kind": "alarms", "title": "Alarms", "alarms": shown, "none": none}


def _event(event: dict[str, Any], label: str) -> dict[str, Any]:
    advice, begins = "advice" in event, event.get("event") == "begins"
    badge = "ended" if not begins else "advice" if advice else "alarm"
    tone = "good" if not begins else "warn" if advice else "bad"
    where = f"{label}, " if label else ""
    return {"when": f"{where}step {count(event['step'])}", "badge": badge, "tone": tone, "sentence": event["sentence"]}
