"""The trust rule: how steps are made of a learned stiffness (scale, trust radius, secants, floor).

It is the same at every step. A bundle may bring a rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from relaxion.errors import PolicyError
from relaxion.model.policy_file import Network


@dataclass(frozen=True)
class StepControl:
    """How a step is made of a stiffness and of what the last steps met (`secants.believed`)."""

    log_scale: float = 0.0
    """Natural logarithm of a factor on the step."""
    log_trust: float = 0.0
    """Natural logarithm of a factor on the trust radius."""
    secant_weight: float = 0.9
    """How far the secant of a short step is believed: 0 the metric alone, 1 the secant alone."""
    n_secants: int = 8
    """So many of the newest are used; each counts less than the next newer one."""
    secant_length: float = 0.1
    """Å: the secant of a step of this length has half the weight. Shorter for more exact metrics."""
    floor: float = 0.0
    """Extra stiffness of every coordinate against its place, eV/Å²."""

    def as_factors(self) -> dict[str, float]:
        """For the history: factors in place of their logarithms."""
        return {
            "scale": float(np.exp(self.log_scale)),
            "trust_factor": float(np.exp(self.log_trust)),
            "secant_weight": self.secant_weight,
            "secant_length_angstrom": self.secant_length,
            "floor_ev_per_angstrom2": self.floor,
        }


DEFAULT = StepControl(log_trust=float(np.log(2)))
"""Where a bundle has no rule: twice the core's trust radius. Measured in docs/decisions.md."""
INEXACT = 0.3  # Å, `secant_length` of a metric for everything

GATE = "gate"  # the role of a rule in a bundle
CONSTANT = "steady"  # among its settings: it has no network, its weights are the control itself
CONSTANTS = ("log_scale", "log_trust", "secant_weight", "n_secants", "secant_length", "floor")


def rule_of(network: Network, name: str) -> StepControl:
    """The rule of the bundle `name`."""
    if CONSTANT not in network.settings:
        raise PolicyError(
            f"the policy {name} has a learned gate, which early releases could train; those were no better than the "
            "rule that is the same at every step, and are no longer read: train the policy again, without a gate"
        )
    try:
        weights = {"secant_length": torch.tensor(INEXACT, dtype=torch.float64)} | dict(network.weights)
        values = {key: float(weights[key]) for key in CONSTANTS}
        control = StepControl(**{**values, "n_secants": int(values["n_secants"])})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the steady gate of {name} cannot be rebuilt: {type(error).__name__} {error}") from error
    sound = control.n_secants >= 1 and control.secant_length > 0 and control.floor >= 0
    if not (0 <= control.secant_weight <= 1 and sound):
        raise PolicyError(f"the steady gate of {name} sets parameters out of their ranges: {control}")
    if "secant_length" not in network.weights and control.secant_weight > 0:
        # of an earlier release: its weight was one of steps, which nobody uses any more
        return replace(control, secant_weight=DEFAULT.secant_weight, n_secants=DEFAULT.n_secants)
    return control


def constant_network(control: StepControl) -> Network:
    """What a bundle keeps of its rule."""
    weights = {name: torch.tensor(float(getattr(control, name)), dtype=torch.float64) for name in CONSTANTS}
    return Network(GATE, {CONSTANT: True}, weights, {})
