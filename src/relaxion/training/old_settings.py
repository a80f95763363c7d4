"""Settings as earlier releases spelled them, in recipes, run folders, checkpoints and cards: old name -> new name.

The tasks `metals` and `universal` are one task now, `metric`; what belonged to the training of a gate is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxion.errors import SettingsError

METRIC = "metric"
METALS, UNIVERSAL = "metals", "universal"  # what the task metric was called
EXAMPLES = {METALS: "live", UNIVERSAL: "store"}
RENAMED = {
    "n_updates": "lesson_updates",
    "n_lessons": "lessons_per_update",
    "learning_rate": "lesson_learning_rate",
    "final_learning_rate": "lesson_learning_rate_final",
    "largest_gradient_norm": "lesson_largest_gradient_norm",
    "updates_per_round": "lesson_updates_per_gathering",
    "starts_per_round": "lesson_starts",
    "rounds_before": "lesson_gatherings_before",
    "rounds_kept": "lesson_gatherings_kept",
    "label_tolerance_ev_per_angstrom": "lesson_tolerance_ev_per_angstrom",
    "smallest_force_ev_per_angstrom": "lesson_smallest_force_ev_per_angstrom",
    "farthest_angstrom": "lesson_farthest_angstrom",
    "end_tolerance_ev_per_angstrom": "lesson_end_tolerance_ev_per_angstrom",
    "max_force_calls": "lesson_force_calls",
    "core_force_calls": "lesson_core_force_calls",
    "trust_angstrom": "lesson_trust_angstrom",
}
DEFAULTS = {  # of the old tasks, where they are not those of the new one
    METALS: {"lesson_updates": 4000},
    UNIVERSAL: {"secant_weight": 0.6, "n_secants": 1},
}
REMOVED = frozenset({  # of the agent that trained a gate, and of its replay
    "replay_capacity", "batch_size", "warmup_steps", "n_steps", "exploration_noise_final", "exploration_noise_steps",
    "n_environments", "updates_per_step", "discount_factor", "normalise_observations", "assessment_max_steps", "widths",
    "gate_cluster_share", "gate_packing_share", "lowest_tolerance_ev_per_angstrom", "highest_tolerance_ev_per_angstrom",
    "gate_max_force_calls", "shaping", "departure_penalty", "gate_start_force_limit_ev_per_angstrom", "n_critics",
    "policy_learning_rate", "critic_learning_rate", "entropy_weight_learning_rate", "initial_entropy_weight",
    "target_update_rate", "exploration_noise", "policy_delay", "target_noise", "target_noise_clip", "lowest_value",
    "highest_value", "n_bins", "soft_error",
})  # fmt: skip


def renamed(values: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """The settings of a task under their present names; one layer of a recipe at a time, so that the last word wins."""
    if task not in (METRIC, *EXAMPLES):
        return dict(values)
    return {RENAMED.get(name, name): value for name, value in values.items() if name not in REMOVED}


def removed(values: Mapping[str, Any], task: Any) -> list[str]:
    """Those among the values that the task no longer has."""
    return sorted(REMOVED.intersection(values)) if task in (METRIC, *EXAMPLES) else []


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
            f"that was removed, since it lost against the guard's own rule: take --steps {lessons} for the metric alone"
        )
    return given
