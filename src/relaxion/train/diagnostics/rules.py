"""When something is wrong, said in words: told once when it begins and once when it ends. Tables: `tables.toml`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relaxion.files import toml_of
from relaxion.train.experience.structure_replay import capacity_range

TABLES = toml_of(Path(__file__).with_name("tables.toml"))
LIMITS: dict[str, float] = TABLES["limits"]
KINDS, LENGTHS = ("value", "worth"), ("half", "own", "double")  # what the critic said, what came of it
PREFIX = "diagnosis/"  # of names in metrics.jsonl
DIAGNOSIS = "relaxion.diagnosis"  # the logger
log = logging.getLogger(DIAGNOSIS)


@dataclass(frozen=True)
class Seen:
    """What a rule may look at: numbers and facts of the run by name."""

    now: Mapping[str, float]  # averages over the newest numbers, one memory at least, and facts
    before: Mapping[str, float]  # slow averages


def wall(seen: Seen) -> float:
    """Steps that come to nothing, or relaxations that end so."""
    steps = seen.now["blocked_share"]
    ends = seen.now.get("share_blocked", 0.0)
    ended = min(ends / LIMITS["blocked_ends"], steps / LIMITS["some_blocked_steps"])
    return max(steps / LIMITS["blocked_steps"], ended)


def worth(seen: Seen) -> float:
    """What the critic should have said: the return, and for SAC the entropy it is paid for."""
    return seen.now["return_from_start"] + seen.now.get("entropy_bonus", 0.0)


def overestimation(seen: Seen) -> float:
    """How far Q lies above what was obtained, in units of what chance and a young critic explain.

    A critic near 0 that does not rise has not learned yet: above a negative return, but on its way down.
    """
    now = seen.now
    before = seen.before
    chance = math.sqrt(max(0.0, now["squared_return"] - now["return_from_start"] ** 2)) + now["reward_size"]
    rises = now["q_at_start"] - before["q_at_start"] > 0.1 * chance
    if now["q_at_start"] <= chance and not rises:
        return 0.0
    return (now["q_at_start"] - worth(seen)) / max(0.5 * abs(worth(seen)) + chance, 1e-12)


def overestimation_words(seen: Seen) -> str:
    now = seen.now
    before = seen.before
    rises = now["q_at_start"] > before["q_at_start"] and now["return_from_start"] <= before["return_from_start"]
    words = f"it predicts {now['q_at_start']:.3g} at the start of relaxations that return {worth(seen):.3g}"
    return words + (", and it rises while the return does not" if rises else "")


def is_late(seen: Seen) -> bool:
    """Whether training has gone on long enough to be judged by its success."""
    return seen.now["trained_steps"] >= LIMITS["late_memories"] * seen.now["memory_steps"]


def stillness(seen: Seen) -> float:
    """A closed gate, or hardly a move where forces are large; neither matters where relaxations converge.

    Policies that learn well pass through a few hundredths of the springs' moves when they are young.
    """
    now = seen.now
    if now.get("share_converged", 0.0) >= LIMITS["converging"]:
        return 0.0
    limit = LIMITS["idle"] if is_late(seen) else LIMITS["still"]
    idle = limit / max(now.get("policy_move_beside_springs", math.inf), 1e-12)
    if "lowest_gate_factor" not in now:
        return idle
    return max(idle, math.log(now["gate_factor"]) / (LIMITS["closed"] * math.log(now["lowest_gate_factor"])))


def stillness_words(seen: Seen) -> str:
    now = seen.now
    parts = [f"the gate's factor is {now['gate_factor']:.2g}"] if "lowest_gate_factor" in now else []
    if "policy_move_angstrom" in now:
        share = f", {now['policy_move_beside_springs']:.2g} of what springs would"
        parts.append(f"under a large force the policy moves {now['policy_move_angstrom']:.2g} Å{share}")
    return " and ".join(parts)


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
    (youngest, oldest) = _replay_limits(seen)
    age = seen.now["replay_age_transitions"]
    atoms = seen.now["atoms_per_structure"]
    return f"sampled transitions are {age:.0f} steps old; for {atoms:.0f} atoms {youngest:.0f} to {oldest:.0f} would do"


def behind_bfgs(seen: Seen) -> float:
    return seen.now["assessed_calls_beside_bfgs"] if is_late(seen) else 0.0


def wrong_way(seen: Seen) -> float:
    """How far the critic's difference between two lengths lies on the wrong side, in what chance does to the truth."""
    worst = 0.0
    for length in ("half", "double"):
        said, true = (seen.now[f"{kind}_of_{length}_move"] - seen.now[f"{kind}_of_own_move"] for kind in KINDS)
        chance = max(LIMITS["errors"] * seen.now[f"{length}_move_error"], 1e-12)
        if said * true < 0:
            worst = max(worst, min(abs(said), abs(true)) / chance)
    return worst


def wrong_way_words(seen: Seen) -> str:
    said, true = (", ".join(f"{seen.now[f'{kind}_of_{name}_move']:.2g}" for name in LENGTHS) for kind in KINDS)
    return f"its values of 0.5, 1 and 2 times the move are {said}; their worth is {true}"


def runs_away(seen: Seen) -> float:
    """A weight that rises while the entropy stays far below its target."""
    rise = seen.now["entropy_weight"] / max(seen.before["entropy_weight"], 1e-12)
    return min(rise / LIMITS["entropy_weight_rise"], seen.now["entropy_gap"] / LIMITS["entropy_gap"])


# How bad each trouble is, from averages: 1 is where it begins.
SEVERITIES: dict[str, Callable[[Seen], float]] = {
    "wall": wall,
    "overestimation": overestimation,
    "stillness": stillness,
    "non_finite": lambda seen: seen.now["share_non_finite"] / LIMITS["failing"],
    "crowding": lambda seen: seen.now["crowded_share"] / LIMITS["leaning"],
    "replay_old": too_old,
    "replay_young": too_young,
    "support": lambda seen: seen.now["returns_outside_support"] / LIMITS["outside_support"],
    "worse_than_bfgs": behind_bfgs,
    "lost": lambda seen: (seen.now["assessed_calls_beside_best"] - 1) / (LIMITS["lost"] - 1),
    "entropy_weight": runs_away,
    "wrong_way": wrong_way,
}
WORDS: dict[str, Callable[[Seen], str]] = {  # where they are more than numbers put into a text
    "overestimation": overestimation_words,
    "stillness": stillness_words,
    "replay_old": replay_words,
    "replay_young": replay_words,
    "wrong_way": wrong_way_words,
}


@dataclass(frozen=True)
class Diagnostic:
    """One number of the log."""

    name: str
    unit: str
    meaning: str
    healthy: str


@dataclass(frozen=True)
class Rule:
    """One trouble."""

    name: str
    headline: str
    when: str
    remedy: str
    needs: tuple[str, ...]
    words: str = ""  # the numbers that show it
    is_advice: bool = False  # worth saying, but nothing is broken

    @property
    def column(self) -> str:
        """Its name in metrics.jsonl."""
        return f"{PREFIX}{'advice' if self.is_advice else 'alarm'}_{self.name}"

    def sentence(self, seen: Seen) -> str:
        shown = WORDS[self.name](seen) if self.name in WORDS else self.words.format_map(seen.now)
        return f"{self.headline}: {shown}; {self.remedy}"


DIAGNOSTICS = tuple(Diagnostic(**row | {"meaning": row["meaning"].format_map(LIMITS)}) for row in TABLES["numbers"])
RULES = tuple(Rule(**row | {"when": row["when"].format_map(LIMITS)}) for row in TABLES["rules"])


@dataclass(frozen=True)
class Event:
    """An alarm, or a piece of advice, that begins or ends: one line of alarms.jsonl."""

    step: int
    name: str
    begins: bool
    sentence: str
    is_advice: bool

    def as_record(self) -> dict[str, object]:
        kind = "advice" if self.is_advice else "alarm"
        event = "begins" if self.begins else "ends"
        return {"step": self.step, kind: self.name, "event": event, "sentence": self.sentence}


class Alarms:
    """Each rule is judged at every line of the log for which its numbers are known."""

    def __init__(self) -> None:
        self.active: list[str] = []  # names, in the order in which they began
        self._events: list[Event] = []

    def judge(self, step: int, seen: Seen) -> None:
        for rule in RULES:
            if any(name not in seen.now for name in rule.needs):
                continue
            severity = SEVERITIES[rule.name](seen)
            is_active = rule.name in self.active
            if not is_active and severity >= 1:
                self.active.append(rule.name)
                self._tell(Event(step, rule.name, True, rule.sentence(seen), rule.is_advice))
            elif is_active and severity < LIMITS["ends_below"]:
                self.active.remove(rule.name)
                self._tell(Event(step, rule.name, False, f"resolved: {rule.headline}", rule.is_advice))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        log.log(logging.INFO if event.is_advice else logging.WARNING, "step %d: %s", event.step, event.sentence)

    def scalars(self) -> dict[str, float]:
        """1 for every alarm that stands, 0 for the others."""
        return {rule.column: float(rule.name in self.active) for rule in RULES}

    def take_events(self) -> list[Event]:
        """What has begun or ended since the last call."""
        events = self._events
        self._events = []
        return events

    def snapshot(self) -> dict[str, Tensor]:
        names = [rule.name for rule in RULES]
        return {"active": torch.tensor([names.index(name) for name in self.active], dtype=torch.int64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.active = [RULES[number].name for number in tensors["active"].tolist()]


def standing(newest: Mapping[str, float]) -> list[str]:
    """Headlines of the alarms that stand in a line of metrics, for a progress bar."""
    return [rule.headline for rule in RULES if not rule.is_advice and newest.get(rule.column, 0.0) == 1.0]
