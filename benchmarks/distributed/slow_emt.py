"""EMT that takes as long as a dearer potential would: it sleeps, as a core does whose work is done elsewhere."""

from __future__ import annotations

import time

from relaxion.potentials.emt import Emt
from relaxion.structures import Evaluation, Structures

SECONDS_PER_CALL = 0.25  # a larger cell with a learned potential on one core; DFT takes a thousand times as long


class SlowEmt(Emt):
    """The same answers, later."""

    name = "slow EMT"

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        time.sleep(SECONDS_PER_CALL * structures.n_structures)
        return super().evaluate(structures, stresses)
