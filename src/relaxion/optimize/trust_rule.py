"""The trust rule: how each step is made of a learned stiffness (scale, trust radius, secants, floor).

A bundle may bring a rule of its own: the same choice at every step (`constant`), or a small network that departs from
the default rule by what the guard has seen. Zero departures are the default rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from relaxion.bundles import Network
from relaxion.errors import PolicyError
from relaxion.networks.vector import BoxActions, VectorGaussianPolicy, VectorPolicy
from relaxion.optimize.point import Array


@dataclass(frozen=True)
class StepControl:
    """What a trust rule decides for one step. The defaults leave everything to metric and guard."""

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
    leave_to_core: bool = False
    """The core makes this step: a rule can doubt the metric before it has failed."""

    def as_factors(self) -> dict[str, float]:
        """For the history: factors in place of their logarithms."""
        return {
            "scale": float(np.exp(self.log_scale)),
            "trust_factor": float(np.exp(self.log_trust)),
            "secant_weight": self.secant_weight,
            "floor_ev_per_angstrom2": self.floor,
        }


TrustRule: TypeAlias = Callable[[Array], StepControl]
"""From the guard's `OBSERVATION` to the control of the next step."""

OBSERVATION = (
    "log10_largest_force",
    "log10_force_over_tolerance",
    "energy_ratio",
    "log_curvature_ratio",
    "alignment",
    "log10_force_ratio",
    "back_off",
    "rejected",
    "log_points",
    "metric_error",
    "log_step_over_trust",
    "log_trust",
    "springs_cosine",
    "log_springs_ratio",
    "by_policy",
    "core_steps_left",
    "disappointments",
)
"""What a rule sees of one point, in this order; numbers of order one, the same in every frame."""

DEFAULT = StepControl(log_trust=float(np.log(2)), secant_weight=0.0)
"""Where a bundle has no rule: the metric alone, since secants harm it, and twice the core's trust radius.

Measured in docs/decisions.md."""

GATE = "gate"  # the role of a rule in a bundle
CONSTANT = "steady"  # among its settings: it has no network, its weights are the control itself
CONSTANTS = ("log_scale", "log_trust", "secant_weight", "n_secants", "floor")
ACTIONS = ("scale", "trust", "secants", "floor", "core")  # of a learned rule, each between -1 and 1
LARGEST_LOG_SCALE = 0.7  # the step is at most doubled or halved
LARGEST_LOG_TRUST = 1.4  # the trust radius at most fourfold or a quarter of the default's
SMALLEST_FLOOR, LARGEST_FLOOR = 0.02, 2.0  # eV/Å²; the lower half of the action means none
CORE_FROM = 0.5  # of the last action; below it the metric makes the step


def default_rule(observation: Array) -> StepControl:
    """The default, whatever was seen."""
    del observation
    return DEFAULT


def control_from(action: Array) -> StepControl:
    """The default control, each part changed as far as its component of the action says."""
    scale, trust, secants, floor, core = np.clip(np.nan_to_num(action), -1.0, 1.0)
    return StepControl(
        log_scale=DEFAULT.log_scale + LARGEST_LOG_SCALE * float(scale),
        log_trust=DEFAULT.log_trust + LARGEST_LOG_TRUST * float(trust),
        secant_weight=float(np.clip(DEFAULT.secant_weight + max(0.0, float(secants)), 0.0, 1.0)),
        n_secants=DEFAULT.n_secants,
        floor=DEFAULT.floor if floor <= 0 else float(SMALLEST_FLOOR * (LARGEST_FLOOR / SMALLEST_FLOOR) ** floor),
        leave_to_core=bool(core > CORE_FROM),
    )


def rule_of(network: Network, name: str) -> TrustRule:
    """The rule of the bundle `name`."""
    if CONSTANT in network.settings:
        control = _constant(network, name)
        return lambda _: control
    if list(network.settings.get("observation", ())) != list(OBSERVATION):
        raise PolicyError(f"the gate of {name} expects other inputs than this relaxion's guard has; update relaxion")
    if list(network.settings.get("knobs", ())) != list(ACTIONS):
        raise PolicyError(f"the gate of {name} sets other parameters than this relaxion's guard has; update relaxion")
    box = BoxActions(-torch.ones(len(ACTIONS)), torch.ones(len(ACTIONS)))
    kind = VectorGaussianPolicy if network.settings.get("stochastic") else VectorPolicy
    try:
        module = kind(len(OBSERVATION), box, network.settings["widths"], torch.Generator())
        module.load_state_dict(dict(network.weights))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the gate of {name} cannot be rebuilt: {error}") from error
    module.eval().requires_grad_(False)

    def rule(observation: Array) -> StepControl:
        with torch.no_grad():
            action = module(torch.from_numpy(observation.astype(np.float32))[None])[0]
        return control_from(action.double().numpy())

    return rule


def _constant(network: Network, name: str) -> StepControl:
    try:
        values = {key: float(network.weights[key]) for key in CONSTANTS}
        control = StepControl(**{**values, "n_secants": int(values["n_secants"])})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the steady gate of {name} cannot be rebuilt: {type(error).__name__} {error}") from error
    if not (0 <= control.secant_weight <= 1 and control.n_secants >= 1 and control.floor >= 0):
        raise PolicyError(f"the steady gate of {name} sets parameters out of their ranges: {control}")
    return control


def constant_network(control: StepControl) -> Network:
    """What a bundle keeps of a constant rule."""
    weights = {name: torch.tensor(float(getattr(control, name)), dtype=torch.float64) for name in CONSTANTS}
    return Network(GATE, {CONSTANT: True}, weights, {})
