"""The gate's knobs as a vector from -1 to 1, the action of an agent, and a learned gate that turns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from relaxion.bundle import Network
from relaxion.classical.guard import OBSERVATION, Gate, Knobs
from relaxion.classical.point import Array
from relaxion.errors import PolicyError
from relaxion.networks.roles import Policy
from relaxion.networks.vector import VectorGaussianPolicy, VectorPolicy
from relaxion.networks.vector_actions import BoxActions

GATE = "gate"  # its role in a bundle
N_KNOBS = 4
LARGEST_LOG_SCALE = 0.7  # the step is at most doubled or halved
LARGEST_LOG_TRUST = 1.4  # the trust radius at most fourfold or a quarter
SMALLEST_FLOOR, LARGEST_FLOOR = 0.02, 2.0  # eV/Å²; the knob's lower half means none


def knobs_from(action: Array) -> Knobs:
    """Scale, trust, weight of the secants, floor. All zero: step and trust as they are, no secants, no floor."""
    scale, trust, weight, floor = np.clip(np.nan_to_num(action), -1.0, 1.0)
    return Knobs(
        log_scale=LARGEST_LOG_SCALE * float(scale),
        log_trust=LARGEST_LOG_TRUST * float(trust),
        secant_weight=max(0.0, float(weight)),
        floor=0.0 if floor <= 0 else float(SMALLEST_FLOOR * (LARGEST_FLOOR / SMALLEST_FLOOR) ** floor),
    )


def gate_of(network: Network, name: str) -> Gate:
    """The gate of a bundle, as a function from the guard's observation to its knobs."""
    if list(network.settings.get("observation", ())) != list(OBSERVATION):
        raise PolicyError(f"the gate of {name} sees other numbers than this relaxion's guard has; update relaxion")
    box = BoxActions(-torch.ones(N_KNOBS), torch.ones(N_KNOBS))
    kind = VectorGaussianPolicy if network.settings.get("stochastic") else VectorPolicy
    try:
        module = kind(len(OBSERVATION), box, network.settings["widths"], torch.Generator())
        module.load_state_dict(dict(network.weights))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"the gate of {name} cannot be rebuilt: {error}") from error
    return gate_from(module.eval().requires_grad_(False))


def gate_from(policy: Policy) -> Gate:
    """A vector policy that turns the knobs."""

    def gate(observation: Array) -> Knobs:
        with torch.no_grad():
            action = policy(torch.from_numpy(observation.astype(np.float32))[None])[0]
        return knobs_from(action.double().numpy())

    return gate


def described_gate(weights: Mapping[str, Tensor], widths: Sequence[int], *, stochastic: bool) -> Network:
    """What a bundle keeps of a gate."""
    settings = {"observation": list(OBSERVATION), "widths": list(widths), "stochastic": stochastic}
    return Network(GATE, settings, {name: tensor.detach().clone() for name, tensor in weights.items()}, {})
