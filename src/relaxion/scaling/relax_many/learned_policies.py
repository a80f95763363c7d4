"""What a worker relaxes with while policies learn: the one it would choose, with the weights that came with a task."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path

from ase import Atoms

from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.optimize.choice import Chooser, Loaded, stepper_of
from relaxion.optimize.choice import new_stepper as stepper_with
from relaxion.optimize.learned import LearnedMetrics
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.scaling.relax_many.learning import read_fit

MOST_LOADED = 8


class LearnedPolicies:
    """`weights` before each structure; then it makes the stepper."""

    def __init__(self, chooser: Chooser, *, allow_unseen: bool) -> None:
        self._chooser, self._allow_unseen = chooser, allow_unseen
        self.weights: Mapping[str, str] = {}  # files by policy
        self._network = lru_cache(MOST_LOADED)(_network)

    def __call__(self, atoms: Atoms) -> tuple[str, Stepper]:
        decision = self._chooser.decide_for(atoms)
        loaded, file = decision.loaded, self.weights.get(decision.name)
        if loaded is None or file is None:
            chosen = stepper_of(decision, QuasiNewtonSettings(), allow_unseen=self._allow_unseen)
            return chosen.name, chosen.stepper
        source = LearnedMetrics(self._network(loaded, file), None if self._allow_unseen else loaded.elements)
        return decision.name, stepper_with(QuasiNewtonSettings(), metrics=source, rule=loaded.rule)


def _network(loaded: Loaded, file: str) -> MetricNetwork:
    assert isinstance(loaded.policy, MetricPolicy)  # others do not learn
    network = deepcopy(loaded.policy.network)
    network.load_state_dict(read_fit(Path(file)).part("network"))
    return network.requires_grad_(False)
