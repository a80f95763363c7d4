"""Diagnostics of training on structures, with a diagnosis in words (R9). Table: docs/diagnostics.md."""

from relaxion.training.diagnostics.alarms import DIAGNOSIS, Alarms, Event, standing
from relaxion.training.diagnostics.diagnosis import Diagnosis, Facts
from relaxion.training.diagnostics.numbers import DIAGNOSTICS, Diagnostic
from relaxion.training.diagnostics.rules import RULES, Rule
from relaxion.training.diagnostics.severities import Seen

__all__ = [
    "DIAGNOSIS",
    "DIAGNOSTICS",
    "RULES",
    "Alarms",
    "Diagnosis",
    "Diagnostic",
    "Event",
    "Facts",
    "Rule",
    "Seen",
    "standing",
]
