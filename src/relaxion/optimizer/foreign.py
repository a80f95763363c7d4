"""Options of ASE's own optimizers, which scripts and hosts leave in their calls when the optimizer is swapped."""

from __future__ import annotations

import logging
from typing import Any

from relaxion.errors import SettingsError

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
# options of Relaxer in version 0.2
REMOVED = {
    "adapt": "keep the relaxations with memory=FOLDER and let 'relaxion learn FOLDER' fine-tune the policy",
    "fallback": "FIRE takes over after many rejected steps, always",
}


def without_foreign(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that only other optimizers know; a warning names what was left out.

    Misspelt options stay in: ASE refuses them by name. SettingsError for options that were removed.
    """
    for name, instead in REMOVED.items():
        if name in options:
            raise SettingsError(f"the option {name} of Relaxer was removed: {instead}; leave it out")
    foreign = sorted(OPTIONS & options.keys())
    if foreign:
        logger.warning(
            "%s: options of other optimizers, which Relaxer ignores; "
            "its own are policy, maxstep, allow_unseen and memory (a folder)",
            ", ".join(foreign),
        )
    return {name: value for name, value in options.items() if name not in OPTIONS}
