"""The relaxation database: every structure that was evaluated, in SQLite files that need no Relaxion to be read."""

from relaxion.database.relaxations import (
    EvaluatedPoint,
    Note,
    Recording,
    RelaxationDatabase,
    key_of,
)
from relaxion.database.trajectory import RelaxationStart, Trajectory

__all__ = [
    "EvaluatedPoint",
    "Note",
    "Recording",
    "RelaxationDatabase",
    "RelaxationStart",
    "Trajectory",
    "key_of",
]
