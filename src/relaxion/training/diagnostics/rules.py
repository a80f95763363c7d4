"""When something is wrong, said in words: what it is called, how it shows, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from relaxion.training.diagnostics import severities as s
from relaxion.training.diagnostics.severities import Seen

ENDS_BELOW = 0.7  # severity; it begins at 1, so that it does not flicker


@dataclass(frozen=True)
class Rule:
    """One trouble."""

    name: str
    headline: str  # the diagnosis, short enough for a progress bar
    when: str  # for the documentation
    remedy: str
    needs: tuple[str, ...]  # numbers without which it cannot be judged
    severity: Callable[[Seen], float]
    words: Callable[[Seen], str]  # the numbers that show it
    is_advice: bool = False  # worth saying, but nothing is broken

    def sentence(self, seen: Seen) -> str:
        return f"{self.headline}: {self.words(seen)}; {self.remedy}"


RULES: tuple[Rule, ...] = (
    Rule(
        name="wall",
        headline="blocked against a wall",
        when=f"at least {s.BLOCKED_STEPS:.0%} of the policy's steps under a large force come to nothing, or "
        f"{s.SOME_BLOCKED_STEPS:.0%} of them and {s.BLOCKED_ENDS:.0%} of the relaxations end blocked",
        remedy="look whether minimum_distance_angstrom is too large for these bonds or the starts are too dense, else "
        "raise deviation_penalty_per_angstrom2 or back_off_penalty so that the policy learns to turn away",
        needs=("blocked_share", "executed_move_angstrom", "proposed_move_angstrom"),
        severity=s.wall,
        words=s.wall_words,
    ),
    Rule(
        name="overestimation",
        headline="critic overestimates",
        when="q_at_start lies above the return (with SAC's entropy bonus) by more than half of it plus its spread plus "
        "one reward; while it is no more than the last two, only if it rises",
        remedy="lower critic_learning_rate, target_update_rate or discount_factor, or take an agent with two critics "
        "(td3, sac)",
        needs=("q_at_start", "return_from_start", "squared_return", "reward_size"),
        severity=s.overestimation,
        words=s.overestimation_words,
    ),
    Rule(
        name="stillness",
        headline="avoids penalties by not moving",
        when=f"fewer than {s.CONVERGING:.0%} of the relaxations converge, and the gate's factor has gone "
        f"{s.CLOSED:.0%} of the way to its lower bound (on a log scale) or the policy moves less than {s.IDLE:.1%} of "
        "max_displacement_angstrom under a large force",
        remedy="lower deviation_penalty_per_angstrom2 or back_off_penalty, or begin with an expert_share",
        needs=("gate_factor", "max_displacement_angstrom"),
        severity=s.stillness,
        words=s.stillness_words,
    ),
    Rule(
        name="non_finite",
        headline="the potential fails too often",
        when=f"at least {s.FAILING:.0%} of the relaxations end with NaN or infinity",
        remedy="raise minimum_distance_angstrom, lower max_displacement_angstrom, or look at the potential's range",
        needs=("share_non_finite",),
        severity=lambda seen: seen.now["share_non_finite"] / s.FAILING,
        words=lambda seen: f"{seen.now['share_non_finite']:.0%} of the relaxations end with NaN or infinity",
    ),
    Rule(
        name="crowding",
        headline="atoms lean on the minimum distance",
        when=f"at least {s.LEANING:.0%} of the steps end with a pair at minimum_distance_angstrom",
        remedy="lower minimum_distance_angstrom if bonds are shorter than that, else start from looser structures: the "
        "corrector decides here, not the policy",
        needs=("crowded_share", "minimum_distance_angstrom"),
        severity=lambda seen: seen.now["crowded_share"] / s.LEANING,
        words=lambda seen: f"{seen.now['crowded_share']:.0%} of the steps end with a pair as near as is allowed",
    ),
    Rule(
        name="expert",
        headline="the expert does not step back",
        when=f"when half of its schedule is over the expert's share is at least {s.EXPERT_SHARE:.0%} and has not "
        f"fallen by {1 - s.NOT_FALLING:.0%}",
        remedy="set expert_share_final to 0 and expert_steps shorter: the policy hardly sees what its own moves "
        "lead to",
        needs=("expert_share", "first_expert_share", "expert_fades_within_steps", "trained_steps"),
        severity=s.expert_stays,
        words=s.expert_words,
    ),
    Rule(
        name="replay_old",
        headline="replay is too old",
        when="the mean age is that of a replay more than ten times larger than suits the systems (R8.1)",
        remedy="lower replay_capacity: batches show what policies of long ago did",
        needs=("replay_age_transitions", "atoms_per_structure"),
        severity=s.too_old,
        words=s.replay_words,
    ),
    Rule(
        name="replay_young",
        headline="replay is too young",
        when="the replay forgets, and the mean age is that of one less than a tenth of what suits the systems (R8.1)",
        remedy="raise replay_capacity or replay_atom_capacity, whichever is reached first: all it learns from is the "
        "newest steps",
        needs=("replay_age_transitions", "atoms_per_structure", "replay_forgets"),
        severity=s.too_young,
        words=s.replay_words,
    ),
    Rule(
        name="support",
        headline="returns leave the critic's support",
        when=f"at least {s.OUTSIDE_SUPPORT:.0%} of the returns lie outside lowest_value … highest_value (D4PG)",
        remedy="widen lowest_value and highest_value in a new run, or scale the reward",
        needs=("returns_outside_support",),
        severity=lambda seen: seen.now["returns_outside_support"] / s.OUTSIDE_SUPPORT,
        words=lambda seen: f"{seen.now['returns_outside_support']:.0%} of the discounted returns cannot be expressed",
    ),
    Rule(
        name="worse_than_bfgs",
        headline="needs more force calls than BFGS",
        when=f"after {s.LATE_MEMORIES} memories of training the newest assessment needs more force calls than BFGS "
        "from the same starts",
        remedy="train longer, with an expert_share, a wider max_displacement_angstrom or a larger network",
        needs=("assessed_calls_beside_bfgs", "trained_steps"),
        severity=s.behind_bfgs,
        words=lambda seen: f"{seen.now['assessed_calls_beside_bfgs']:.2f} times as many from the same starts",
        is_advice=True,
    ),
)
