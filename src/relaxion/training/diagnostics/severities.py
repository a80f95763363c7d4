"""How bad each trouble is, from averages: 1 is where it begins. And the numbers that show it, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from relaxion.experience.structure_replay import capacity_range

BLOCKED_STEPS, BLOCKED_ENDS = 0.3, 0.5  # shares of steps, of ended relaxations
SOME_BLOCKED_STEPS = 0.1  # those that end first in a young run are the blocked ones: ends alone would mislead
CLOSED = 0.8  # of the way from 1 to the gate's lower bound, on a log scale
IDLE = 0.005  # of the largest displacement allowed
CONVERGING = 0.8  # share of relaxations; whoever converges may move as little as he likes
FAILING = 0.1  # share of relaxations
LEANING = 0.5  # share of steps
EXPERT_SHARE, NOT_FALLING, EXPERT_MEMORIES = 0.2, 0.8, 5
OUTSIDE_SUPPORT = 0.02  # share of returns
LATE_MEMORIES = 10  # of training, before advice about its success makes sense


@dataclass(frozen=True)
class Seen:
    """What a rule may look at: numbers and facts of the run by name."""

    now: Mapping[str, float]  # averages over the newest numbers, one memory at least, and facts
    before: Mapping[str, float]  # slow averages


def wall(seen: Seen) -> float:
    """Steps that come to nothing, or relaxations that end so."""
    steps, ends = seen.now["blocked_share"], seen.now.get("share_blocked", 0.0)
    return max(steps / BLOCKED_STEPS, min(ends / BLOCKED_ENDS, steps / SOME_BLOCKED_STEPS))


def wall_words(seen: Seen) -> str:
    now = seen.now
    return (
        f"moves of {now['proposed_move_angstrom']:.2g} Å are asked for, {now['executed_move_angstrom']:.2g} Å done; "
        f"{now['blocked_share']:.0%} of the steps under a large force come to nothing"
    )


def worth(seen: Seen) -> float:
    """What the critic should have said: the return, and for SAC the entropy it is paid for."""
    return seen.now["return_from_start"] + seen.now.get("entropy_bonus", 0.0)


def overestimation(seen: Seen) -> float:
    """How far Q lies above what was obtained, in units of what chance and a young critic explain.

    A critic near 0 that does not rise has not learned yet: above a negative return, but on its way down.
    """
    now, before = seen.now, seen.before
    chance = math.sqrt(max(0.0, now["squared_return"] - now["return_from_start"] ** 2)) + now["reward_size"]
    rises = now["q_at_start"] - before["q_at_start"] > 0.1 * chance
    if now["q_at_start"] <= chance and not rises:
        return 0.0
    return (now["q_at_start"] - worth(seen)) / max(0.5 * abs(worth(seen)) + chance, 1e-12)


def overestimation_words(seen: Seen) -> str:
    now, before = seen.now, seen.before
    rises = now["q_at_start"] > before["q_at_start"] and now["return_from_start"] <= before["return_from_start"]
    words = f"it expects {now['q_at_start']:.3g} at the start of relaxations that bring {worth(seen):.3g}"
    return words + (", and it rises while the return does not" if rises else "")


def stillness(seen: Seen) -> float:
    """A closed gate, or no move where forces are large; neither matters where relaxations converge."""
    now = seen.now
    if now.get("share_converged", 0.0) >= CONVERGING:
        return 0.0
    idle = IDLE * now["max_displacement_angstrom"] / max(now.get("policy_move_angstrom", math.inf), 1e-12)
    if "lowest_gate_factor" not in now:
        return idle
    return max(idle, math.log(now["gate_factor"]) / (CLOSED * math.log(now["lowest_gate_factor"])))


def stillness_words(seen: Seen) -> str:
    now = seen.now
    parts = [f"the gate's factor is {now['gate_factor']:.2g}"] if "lowest_gate_factor" in now else []
    if "policy_move_angstrom" in now:
        parts.append(f"under a large force the policy moves {now['policy_move_angstrom']:.2g} Å")
    return " and ".join(parts)


def expert_stays(seen: Seen) -> float:
    """Still there, and as often as at first, when half of its schedule is over."""
    now = seen.now
    waited = max(EXPERT_MEMORIES * now["memory_steps"], now["expert_fades_within_steps"] / 2)
    if now["trained_steps"] < waited or now["expert_share"] < NOT_FALLING * now["first_expert_share"]:
        return 0.0
    return now["expert_share"] / EXPERT_SHARE


def expert_words(seen: Seen) -> str:
    share, first = seen.now["expert_share"], seen.now["first_expert_share"]
    return f"it still proposes {share:.0%} of the steps, {first:.0%} at first"


def _replay_limits(seen: Seen) -> tuple[float, float]:
    """Mean ages in a full replay of a tenth and of ten times the capacity that suits the systems (R8.1)."""
    low, high = capacity_range(seen.now["atoms_per_structure"])
    return low / 10 / 2, high * 10 / 2


def too_old(seen: Seen) -> float:
    return seen.now["replay_age_transitions"] / _replay_limits(seen)[1]


def too_young(seen: Seen) -> float:
    forgets = seen.now["replay_forgets"] > 0.99  # else it is still filling
    return _replay_limits(seen)[0] / max(seen.now["replay_age_transitions"], 0.5) if forgets else 0.0


def replay_words(seen: Seen) -> str:
    (youngest, oldest), age = _replay_limits(seen), seen.now["replay_age_transitions"]
    atoms = seen.now["atoms_per_structure"]
    return f"what is drawn is {age:.0f} transitions old, for {atoms:.0f} atoms {youngest:.0f} to {oldest:.0f} would do"


def behind_bfgs(seen: Seen) -> float:
    late = seen.now["trained_steps"] >= LATE_MEMORIES * seen.now["memory_steps"]
    return seen.now["assessed_calls_beside_bfgs"] if late else 0.0
