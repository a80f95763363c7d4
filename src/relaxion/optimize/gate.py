"""The gate's knobs as a vector from -1 to 1, the action of an agent, and a learned gate that turns them.

Actions are departures from the hand-made rule: all zero is the rule itself, so that learning begins there. A bundle may
also have a steady gate, which turns the knobs the same way always: a rule of its own, found by trying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from relaxion.bundles import Network
from relaxion.errors import PolicyError
from relaxion.networks.roles import Policy
from relaxion.networks.vector import BoxActions, VectorGaussianPolicy, VectorPolicy
from relaxion.optimize.guard import OBSERVATION, Gate, Knobs, hand_made_gate
from relaxion.optimize.point import Array

GATE = "gate"  # its role in a bundle
STEADY = "steady"  # among its settings: it has no network, its weights are the knobs themselves
STEADY_KNOBS = ("log_scale", "log_trust", "secant_weight", "n_secants", "floor")
KNOBS = ("scale", "trust", "secants", "floor", "core")
N_KNOBS = len(KNOBS)
LARGEST_LOG_SCALE = 0.7  # the step is at most doubled or halved
LARGEST_LOG_TRUST = 1.4  # the trust radius at most fourfold or a quarter of the rule's
SMALLEST_FLOOR, LARGEST_FLOOR = 0.02, 2.0  # eV/Å²; the knob's lower half means none
CORE_FROM = 0.5  # of the last knob; below it the metric makes the step


def knobs_from(action: Array, rule: Knobs) -> Knobs:
    """The rule's knobs, each turned as far as its component of the action says."""
    scale, trust, secants, floor, core = np.clip(np.nan_to_num(action), -1.0, 1.0)
    return Knobs(
        log_scale=rule.log_scale + LARGEST_LOG_SCALE * float(scale),
        log_trust=rule.log_trust + LARGEST_LOG_TRUST * float(trust),
        secant_weight=float(np.clip(rule.secant_weight + max(0.0, float(secants)), 0.0, 1.0)),
        n_secants=rule.n_secants,
        floor=rule.floor if floor <= 0 else float(SMALLEST_FLOOR * (LARGEST_FLOOR / SMALLEST_FLOOR) ** floor),
        leave_to_core=rule.leave_to_core or bool(core > CORE_FROM),
    )


def gate_of(network: Network, name: str) -> Gate:
    """The gate of a bundle, as a function from the guard's observation to its knobs."""
    if STEADY in network.settings:
        return _steady(network, name)
    if list(network.settings.get("observation", ())) != list(OBSERVATION):
        raise PolicyError(f"the gate of {name} sees other numbers than this relaxion's guard has; update relaxion")
    if list(network.settings.get("knobs", ())) != list(KNOBS):
        raise PolicyError(f"the gate of {name} turns other knobs than this relaxion's guard has; update relaxion")
    box = BoxActions(-torch.ones(N_KNOBS), torch.ones(N_KNOBS))
    kind = VectorGaussianPolicy if network.settings.get("stochastic") else VectorPolicy
    try:
        module = kind(len(OBSERVATION), box, network.settings["widths"], torch.Generator())
        module.load_state_dict(dict(network.weights))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the gate of {name} cannot be rebuilt: {error}") from error
    return gate_from(module.eval().requires_grad_(False))


def _steady(network: Network, name: str) -> Gate:
    try:
        values = {key: float(network.weights[key]) for key in STEADY_KNOBS}
        knobs = Knobs(**{**values, "n_secants": int(values["n_secants"])})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the steady gate of {name} cannot be rebuilt: {type(error).__name__} {error}") from error
    if not (0 <= knobs.secant_weight <= 1 and knobs.n_secants >= 1 and knobs.floor >= 0):
        raise PolicyError(f"the steady gate of {name} turns its knobs out of their ranges: {knobs}")
    return lambda _: knobs


def gate_from(policy: Policy) -> Gate:
    """A vector policy that turns the knobs."""

    def gate(observation: Array) -> Knobs:
        with torch.no_grad():
            action = policy(torch.from_numpy(observation.astype(np.float32))[None])[0]
        return knobs_from(action.double().numpy(), hand_made_gate(observation))

    return gate


def begin_at_the_rule(policy: torch.nn.Module) -> None:
    """Last layer to zero: a new gate turns nothing, so the agent begins at the hand-made rule, to the bit."""
    with torch.no_grad():
        for parameter in list(policy.parameters())[-2:]:
            parameter.zero_()


def described_gate(weights: Mapping[str, Tensor], widths: Sequence[int], *, stochastic: bool) -> Network:
    """What a bundle keeps of a gate."""
    seen_and_turned = {"observation": list(OBSERVATION), "knobs": list(KNOBS)}
    settings = {**seen_and_turned, "widths": list(widths), "stochastic": stochastic}
    return Network(GATE, settings, {name: tensor.detach().clone() for name, tensor in weights.items()}, {})


def described_steady(knobs: Knobs) -> Network:
    """What a bundle keeps of a steady gate."""
    weights = {name: torch.tensor(float(getattr(knobs, name)), dtype=torch.float64) for name in STEADY_KNOBS}
    return Network(GATE, {STEADY: True}, weights, {})
