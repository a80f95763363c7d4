"""Relaxion: learned relaxation of atomic structures.

Importing it is quick and changes nothing global: the names below are loaded when first used. Our Gymnasium environments
are registered by `import relaxion.train.gym`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"  # the one place where it is written

if TYPE_CHECKING:
    from relaxion.apps.report.view import report
    from relaxion.batch import relax_batch, relax_stream
    from relaxion.potentials.registry import potential
    from relaxion.relaxer import Relaxer
    from relaxion.search.run import search
    from relaxion.structures import Evaluation, Graph, Move, Outcome, State, Structures

_HOMES = {
    "Evaluation": "relaxion.structures",
    "Graph": "relaxion.structures",
    "Move": "relaxion.structures",
    "Outcome": "relaxion.structures",
    "Relaxer": "relaxion.relaxer",
    "State": "relaxion.structures",
    "Structures": "relaxion.structures",
    "potential": "relaxion.potentials",
    "relax_batch": "relaxion.batch",
    "relax_stream": "relaxion.batch",
    "report": "relaxion.apps.report.view",
    "search": "relaxion.search",
}

__all__ = [
    "Evaluation", "Graph", "Move", "Outcome", "Relaxer", "State", "Structures", "__version__", "potential",
    "relax_batch", "relax_stream", "report", "search",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relaxion' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
