"""Settings as earlier releases spelled them, in recipes, run folders, checkpoints and cards (`old_settings.toml`).

The tasks `metals` and `universal` are one task now, `metric`; what belonged to the training of a gate is left out. The
task `relax` has lost the agent that moved only a gate and the anchor beside lessons: settings that did not ask for
them are left out, others refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relaxion.errors import SettingsError
from relaxion.files import toml_of

METRIC, RELAX = "metric", "relax"
METALS, UNIVERSAL = "metals", "universal"  # what the task metric was called
EXAMPLES = {METALS: "live", UNIVERSAL: "store"}
TABLES = toml_of(Path(__file__).with_suffix(".toml"))
RENAMED: dict[str, str] = TABLES["renamed"]
DEFAULTS: dict[str, dict[str, Any]] = TABLES["defaults"]
REMOVED = frozenset(TABLES["removed"]["names"])
WITHOUT: dict[str, Any] = TABLES["without"]


def renamed(values: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """The settings of a task under their present names; one layer of a recipe at a time, so that the last word wins."""
    if task == RELAX:
        _refuse_removed(values)
        return {name: value for name, value in values.items() if name not in WITHOUT}
    if task not in (METRIC, *EXAMPLES):
        return dict(values)
    return {RENAMED.get(name, name): value for name, value in values.items() if name not in REMOVED}


def _refuse_removed(values: Mapping[str, Any]) -> None:
    for name, without in WITHOUT.items():
        if (given := values.get(name, without)) != without:
            raise SettingsError(
                f"{name} = {given} was removed: reinforcement learning on top of lessons brought no gain "
                "(docs/results/learning.md); leave it out. A new run can take an old one's weights: `from_weights=RUN`"
            )


def removed(values: Mapping[str, Any], task: Any) -> list[str]:
    """Those among the values that the task no longer has."""
    if task == RELAX:
        return sorted(WITHOUT.keys() & values.keys())
    return sorted(REMOVED.intersection(values)) if task in (METRIC, *EXAMPLES) else []


def deprecation(values: Mapping[str, Any], task: Any) -> str:
    """A sentence about names that are read for one more release; empty where there are none."""
    old = [f"{name} (now {RENAMED[name]})" for name in sorted(RENAMED.keys() & values.keys())]
    if task in EXAMPLES:
        old.insert(0, f"task = {task} (now task = {METRIC} with examples = {EXAMPLES[task]})")
    if task not in (METRIC, *EXAMPLES) or not old:
        return ""
    return f"deprecated, read by this release but not by the next: {', '.join(old)}"


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A whole flat table as it would be written today."""
    task = values.get("task")
    given = renamed(values, task)
    if task not in EXAMPLES:
        return given
    given = {"examples": EXAMPLES[task], **DEFAULTS[task], **given, "task": METRIC}
    steps, lessons = given.get("steps", 10_000), given["lesson_updates"] if task == METALS else None
    if lessons is not None and isinstance(steps, int) and isinstance(lessons, int) and steps > lessons:
        raise SettingsError(
            f"task = metals with more steps ({steps}) than updates of the metric ({lessons}) trained a gate after it; "
            f"that was removed, since it lost against the guard's own rule: take `steps={lessons}` for the metric alone"
        )
    return given
