"""Which rules are broken just now: told once when it begins and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.training.diagnostics.rules import ENDS_BELOW, RULES, Rule
from relaxion.training.diagnostics.severities import Seen

DIAGNOSIS = "relaxion.diagnosis"  # the logger
log = logging.getLogger(DIAGNOSIS)


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

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self.rules = {rule.name: rule for rule in rules}
        self.active: list[str] = []  # names, in the order in which they began
        self._events: list[Event] = []

    def judge(self, step: int, seen: Seen) -> None:
        for rule in self.rules.values():
            if any(name not in seen.now for name in rule.needs):
                continue
            severity, is_active = rule.severity(seen), rule.name in self.active
            if not is_active and severity >= 1:
                self.active.append(rule.name)
                self._tell(Event(step, rule.name, True, rule.sentence(seen), rule.is_advice))
            elif is_active and severity < ENDS_BELOW:
                self.active.remove(rule.name)
                self._tell(Event(step, rule.name, False, f"no longer: {rule.headline}", rule.is_advice))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        log.log(logging.INFO if event.is_advice else logging.WARNING, "step %d: %s", event.step, event.sentence)

    def scalars(self) -> dict[str, float]:
        """1 for every alarm that stands, 0 for the others."""
        return {column(rule): float(rule.name in self.active) for rule in self.rules.values()}

    def take_events(self) -> list[Event]:
        """What has begun or ended since the last call."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> dict[str, Tensor]:
        names = list(self.rules)
        return {"active": torch.tensor([names.index(name) for name in self.active], dtype=torch.int64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        names = list(self.rules)
        self.active = [names[number] for number in tensors["active"].tolist()]


def column(rule: Rule) -> str:
    """The rule's name in metrics.jsonl."""
    return f"diagnosis/{'advice' if rule.is_advice else 'alarm'}_{rule.name}"


def standing(newest: Mapping[str, float]) -> list[str]:
    """Headlines of the alarms that stand in a line of metrics, for a progress bar."""
    return [rule.headline for rule in RULES if not rule.is_advice and newest.get(column(rule), 0.0) == 1.0]
