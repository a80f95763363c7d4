"""From the word a user gives (`policy=`) to the optimizer that relaxes: a policy under guard, or the classical core."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from ase.data import atomic_numbers as numbers_of

from relaxion.bundle import Network, PolicyBundle, uncovered
from relaxion.bundle.library import find_file, shipped_names
from relaxion.classical.chain import Classical
from relaxion.classical.direct import DirectMetrics
from relaxion.classical.guard import OBSERVATION, Gate, Guard, Knobs, MetricSource
from relaxion.classical.knobs import N_KNOBS, knobs_from
from relaxion.classical.learned_metric import LearnedMetrics
from relaxion.classical.point import Array
from relaxion.classical.quasi_newton import QuasiNewtonSettings
from relaxion.errors import PolicyError, SettingsError
from relaxion.networks.bundled import policy_of
from relaxion.networks.metric_policies import MetricPolicy
from relaxion.networks.roles import Policy
from relaxion.networks.vector import VectorPolicy
from relaxion.networks.vector_actions import BoxActions

logger = logging.getLogger(__name__)

CORE = "classical"  # what relaxes where no policy does
GATE = "gate"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A bundle with its networks made, shared by all relaxers of a process: nothing in it ever changes."""

    bundle: PolicyBundle
    policy: Policy
    gate: Gate | None

    def metrics(self, elements: Collection[int] | None) -> MetricSource:
        """What proposes; a direct policy remembers its last point, so every relaxer has its own."""
        if isinstance(self.policy, MetricPolicy):
            return LearnedMetrics(self.policy.network, elements)
        return DirectMetrics(self.policy, elements)


@dataclass(frozen=True)
class Chosen:
    """Who relaxes, by name, and its chain."""

    name: str
    chain: Classical


def chosen(
    policy: str | Path | None,
    atomic_numbers: Collection[int],
    settings: QuasiNewtonSettings,
    *,
    fallback: bool = True,
    allow_unseen: bool = False,
) -> Chosen:
    """The chain for `policy`: "auto", None (or "none") for the core, the name of a policy, or a bundle's path."""
    loaded = _asked_for(policy, atomic_numbers, allow_unseen=allow_unseen)
    if loaded is None:
        return Chosen(CORE, Classical(settings, fallback=fallback))
    elements = None if allow_unseen else [numbers_of[symbol] for symbol in loaded.bundle.card.elements]
    guard = Guard(settings, loaded.metrics(elements), loaded.gate)
    return Chosen(loaded.bundle.name, Classical(settings, fallback=fallback, quasi_newton=guard))


def _asked_for(policy: str | Path | None, atomic_numbers: Collection[int], *, allow_unseen: bool) -> Loaded | None:
    if policy is None or policy == "none":
        return None
    if policy == "auto":
        return _automatic(atomic_numbers)
    if not isinstance(policy, str | Path):
        raise SettingsError(f"policy is a name, a path, 'auto' or None, got {policy!r}")
    loaded = load(policy)
    if (missing := uncovered(loaded.bundle, atomic_numbers)) and not allow_unseen:
        logger.warning(
            "the policy %s was not trained on %s, so the classical core relaxes; allow_unseen=True (--allow-unseen) "
            "insists",
            loaded.bundle.name,
            ", ".join(missing),
        )
        return None
    return loaded


def _automatic(atomic_numbers: Collection[int]) -> Loaded | None:
    """The first shipped policy that was trained on all the elements."""
    for name in shipped_names():
        loaded = load(name)
        if not uncovered(loaded.bundle, atomic_numbers):
            return loaded
    logger.info("no shipped policy covers all elements: the classical core relaxes")
    return None


def load(name_or_path: str | Path) -> Loaded:
    """The bundle with its networks; read again only when its file has changed."""
    file = find_file(name_or_path)
    about = file.stat()
    return _load(file, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _load(file: Path, _changed: int, _size: int) -> Loaded:
    bundle = PolicyBundle.read(file)
    gate = bundle.networks.get(GATE)
    return Loaded(bundle, policy_of(bundle), None if gate is None else gate_of(gate, bundle.name))


def gate_of(network: Network, name: str) -> Gate:
    """The gate of a bundle, as a function from the guard's observation to its knobs."""
    if list(network.settings.get("observation", ())) != list(OBSERVATION):
        raise PolicyError(f"the gate of {name} sees other numbers than this relaxion's guard has; update relaxion")
    box = BoxActions(-torch.ones(N_KNOBS), torch.ones(N_KNOBS))
    try:
        module = VectorPolicy(len(OBSERVATION), box, network.settings["widths"], torch.Generator())
        module.load_state_dict(dict(network.weights))
    except (KeyError, TypeError, RuntimeError) as error:
        raise PolicyError(f"the gate of {name} cannot be rebuilt: {error}") from error
    return gate_from(module.eval().requires_grad_(False))


def gate_from(policy: Policy) -> Gate:
    """A vector policy that turns the knobs."""

    def gate(observation: Array) -> Knobs:
        with torch.no_grad():
            action = policy(torch.from_numpy(observation.astype(np.float32))[None])[0]
        return knobs_from(action.double().numpy())

    return gate


def described_gate(policy: VectorPolicy, widths: list[int]) -> Network:
    """What a bundle keeps of a gate."""
    settings = {"observation": list(OBSERVATION), "widths": widths}
    return Network(GATE, settings, {k: v.detach().clone() for k, v in policy.state_dict().items()}, {})
