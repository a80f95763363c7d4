"""Options of ASE's own optimizers, which scripts and hosts leave in their calls when the optimizer is swapped."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

# BFGS, LBFGS, FIRE, FIRE2, MDMin, BFGSLineSearch, CellAwareBFGS; `maxstep` we have ourselves
OPTIONS = frozenset(
    {
        "alpha",
        "memory",
        "damping",
        "use_line_search",
        "bulk_modulus",
        "poisson_ratio",
        "long_output",
        "c1",
        "c2",
        "stpmax",
    }
    | {"dt", "dtmax", "dtmin", "maxmove", "Nmin", "finc", "fdec", "astart", "fa", "a", "downhill_check", "use_abc"}
    | {"position_reset_callback", "force_consistent"}
)


def without_foreign(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that only other optimizers know; a warning names what was left out.

    Misspelt options stay in: ASE refuses them by name.
    """
    foreign = sorted(OPTIONS & options.keys())
    if foreign:
        logger.warning(
            "%s: options of other optimizers, which Relaxer ignores; "
            "its own are policy, maxstep, fallback, allow_unseen, adapt and memory (a folder)",
            ", ".join(foreign),
        )
    return {name: value for name, value in options.items() if name not in OPTIONS}
