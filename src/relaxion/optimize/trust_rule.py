"""The trust rule: how steps are made of a learned stiffness (scale, trust radius, secants, floor).

It is the same at every step. A bundle may bring a rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from relaxion.bundles import Network
from relaxion.errors import PolicyError


@dataclass(frozen=True)
class StepControl:
    """How a step is made. The defaults leave everything to metric and guard."""

    log_scale: float = 0.0
    """Natural logarithm of a factor on the step."""
    log_trust: float = 0.0
    """Natural logarithm of a factor on the trust radius."""
    secant_weight: float = 1.0
    """0: the metric alone; 1: corrected by the newest secants."""
    n_secants: int = 2
    """So many of them; old ones harm on top of a good metric."""
    floor: float = 0.0
    """Extra stiffness of every coordinate against its place, eV/Å²."""

    def as_factors(self) -> dict[str, float]:
        """For the history: factors in place of their logarithms."""
        return {
            "scale": float(np.exp(self.log_scale)),
            "trust_factor": float(np.exp(self.log_trust)),
            "secant_weight": self.secant_weight,
            "floor_ev_per_angstrom2": self.floor,
        }


DEFAULT = StepControl(log_trust=float(np.log(2)), secant_weight=0.0)
"""Where a bundle has no rule: the metric alone, since secants harm it, and twice the core's trust radius.

Measured in docs/decisions.md."""

GATE = "gate"  # the role of a rule in a bundle
CONSTANT = "steady"  # among its settings: it has no network, its weights are the control itself
CONSTANTS = ("log_scale", "log_trust", "secant_weight", "n_secants", "floor")


def rule_of(network: Network, name: str) -> StepControl:
    """The rule of the bundle `name`."""
    if CONSTANT not in network.settings:
        raise PolicyError(
            f"the policy {name} has a learned gate, which early releases could train; those were no better than the "
            "rule that is the same at every step, and are no longer read: train the policy again, without a gate"
        )
    try:
        values = {key: float(network.weights[key]) for key in CONSTANTS}
        control = StepControl(**{**values, "n_secants": int(values["n_secants"])})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the steady gate of {name} cannot be rebuilt: {type(error).__name__} {error}") from error
    if not (0 <= control.secant_weight <= 1 and control.n_secants >= 1 and control.floor >= 0):
        raise PolicyError(f"the steady gate of {name} turns its knobs out of their ranges: {control}")
    return control


def constant_network(control: StepControl) -> Network:
    """What a bundle keeps of its rule."""
    weights = {name: torch.tensor(float(getattr(control, name)), dtype=torch.float64) for name in CONSTANTS}
    return Network(GATE, {CONSTANT: True}, weights, {})
