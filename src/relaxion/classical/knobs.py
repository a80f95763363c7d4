"""The gate's knobs as a vector from -1 to 1, the action of an agent, and a learned gate that turns them."""

from __future__ import annotations

import numpy as np

from relaxion.classical.guard import Knobs
from relaxion.classical.point import Array

N_KNOBS = 4
LARGEST_LOG_SCALE = 0.7  # the step is at most doubled or halved
LARGEST_LOG_TRUST = 1.4  # the trust radius at most fourfold or a quarter
SMALLEST_FLOOR, LARGEST_FLOOR = 0.02, 2.0  # eV/Å²; the knob's lower half means none


def knobs_from(action: Array) -> Knobs:
    """Scale, trust, weight of the secants, floor. All zero: step and trust as they are, half the secants, no floor."""
    scale, trust, weight, floor = np.clip(np.nan_to_num(action), -1.0, 1.0)
    return Knobs(
        log_scale=LARGEST_LOG_SCALE * float(scale),
        log_trust=LARGEST_LOG_TRUST * float(trust),
        secant_weight=float(weight + 1) / 2,
        floor=0.0 if floor <= 0 else float(SMALLEST_FLOOR * (LARGEST_FLOOR / SMALLEST_FLOOR) ** floor),
    )
