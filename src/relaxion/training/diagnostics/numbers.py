"""Every number of the diagnosis: its name in metrics.jsonl, its unit, what it means and what is healthy."""

from __future__ import annotations

from dataclasses import dataclass

from relaxion.structures import Outcome

PREFIX = "diagnosis/"
LARGE_FORCE = 10.0  # tolerances; above it a structure has reason to move
UNDONE = 0.9  # back-off from which on a step counts as blocked
CROWDED = 1.01  # minimum distances; a structure whose closest pair is nearer leans on the corrector
ENDS = tuple(outcome for outcome in Outcome if outcome != Outcome.RUNNING)


@dataclass(frozen=True)
class Diagnostic:
    """One number of the log. All are of the steps since the line before unless the meaning says otherwise."""

    name: str
    unit: str
    meaning: str
    healthy: str


def outcome_name(outcome: Outcome) -> str:
    return f"outcome_{outcome.name.lower()}"


_OUTCOMES_HEALTHY = {
    Outcome.CONVERGED: "soon most",
    Outcome.STEP_LIMIT: "many at first, then few",
    Outcome.STALLED: "few",
    Outcome.BLOCKED: "below half",
    Outcome.NON_FINITE: "below 10 %",
}

DIAGNOSTICS: tuple[Diagnostic, ...] = (
    Diagnostic("proposed_move_angstrom", "Å", "mean over steps of the longest displacement asked for", "0.01–0.5"),
    Diagnostic("executed_move_angstrom", "Å", "the same of what was done", "near the proposed one"),
    Diagnostic("back_off", "", "mean fraction of a step that the corrector undid", "below 0.1"),
    Diagnostic(
        "blocked_share",
        "",
        f"share of the policy's steps with a force above {LARGE_FORCE:g} tolerances of which the corrector undid at "
        f"least {UNDONE:.0%}",
        "below 0.3",
    ),
    Diagnostic(
        "largest_force_ev_per_angstrom", "eV/Å", "geometric mean over steps of the largest force after it", "falling"
    ),
    Diagnostic(
        "policy_move_angstrom",
        "Å",
        "longest displacement the policy wants without noise, mean over the structures under way with a force above "
        f"{LARGE_FORCE:g} tolerances; at the time of the line",
        "above 0.5 % of max_displacement_angstrom",
    ),
    Diagnostic(
        "gate_factor",
        "",
        "geometric mean of the gate's factor over the structures under way, 1 without a gate; at the time of the line",
        "more than a fifth of the way from its lower bound (0.16 of 0.1 … 10)",
    ),
    Diagnostic(
        "q_at_start",
        "reward",
        "what the critic expected at the start of the relaxations that have ended: the smallest of several critics, "
        "the mean of D4PG's distribution; starts in the warm-up are left out",
        "within half of the return, its spread and one reward above return_from_start",
    ),
    Diagnostic("return_from_start", "reward", "discounted return these relaxations really brought", "rising"),
    Diagnostic(
        "entropy_bonus",
        "reward",
        "what the entropy term adds to the return in SAC's critic: entropy weight · entropy · Σ γᵏ; SAC only",
        "no range",
    ),
    Diagnostic("reward_size", "reward", "mean absolute reward of a step", "no range"),
    Diagnostic(
        "closest_pair_angstrom",
        "Å",
        "distance of the nearest two atoms of all structures, own images included; 4 where none is nearer",
        "above minimum_distance_angstrom",
    ),
    Diagnostic(
        "crowded_share",
        "",
        f"share of steps that end with the closest pair within {CROWDED - 1:.0%} of minimum_distance_angstrom",
        "below 0.5",
    ),
    *(
        Diagnostic(outcome_name(end), "relaxations", f"how many relaxations ended: {end.label}", _OUTCOMES_HEALTHY[end])
        for end in ENDS
    ),
    Diagnostic(
        "force_calls_per_relaxation", "force calls", "mean of the relaxations that ended, with exploration", "falling"
    ),
    Diagnostic("expert_share", "", "share of steps the expert proposed", "falling"),
    Diagnostic("imitation_weight", "", "weight of the imitation term in the policy's loss", "falling"),
    Diagnostic(
        "replay_age", "", "mean age of what batches are drawn from, as a share of the capacity", "0.5 when full"
    ),
    Diagnostic(
        "replay_age_transitions", "transitions", "the same age, counted in transitions", "between the limits of R8.1"
    ),
    Diagnostic(
        "returns_outside_support",
        "",
        "share of returns_from_start below lowest_value or above highest_value; D4PG only",
        "0",
    ),
    Diagnostic(
        "assessed_calls_beside_bfgs",
        "",
        "force calls of the newest assessment over those of BFGS from the same starts",
        "below 1 late in training",
    ),
)
