"""Diagnostics of training on structures, with a diagnosis in words (R9). Table: docs/diagnostics.md."""

from relaxion.train.diagnostics.diagnosis import Diagnosis, Facts
from relaxion.train.diagnostics.rules import (
    DIAGNOSIS,
    DIAGNOSTICS,
    PREFIX,
    RULES,
    Alarms,
    Diagnostic,
    Event,
    Rule,
    Seen,
    standing,
)

__all__ = [
    "DIAGNOSIS", "DIAGNOSTICS", "PREFIX", "RULES", "Alarms", "Diagnosis", "Diagnostic", "Event", "Facts", "Rule",
    "Seen", "standing",
]  # fmt: skip
