"""From minimum to minimum: kinds of moves, walkers, distinct minima; a mixture, a bandit or a critic chooses hops.

The room and its main function have one name, so the room itself can be called: `relaxion.search(atoms, "emt")`.
"""

import sys
from types import ModuleType
from typing import Any

from relaxion.search.choices import SearchSettings
from relaxion.search.run import SearchResult, search

__all__ = ["SearchResult", "SearchSettings", "search"]


class _Room(ModuleType):
    def __call__(self, *values: Any, **options: Any) -> SearchResult:
        """As `search`."""
        return search(*values, **options)


sys.modules[__name__].__class__ = _Room
