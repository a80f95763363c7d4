"""What counts: force calls of a plain loop that follows the policy, from the same starts every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxion.experience.environment import Environment, EnvironmentSettings
from relaxion.generators.starts import PerturbedStarts
from relaxion.potentials.potential import Potential
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.training.metric_data import first_state, relax


@dataclass(frozen=True, eq=False)
class PlainLoop:
    """Step by step to the tolerance, with no guard at all."""

    potential: Potential
    force_tolerance_ev_per_angstrom: float = 0.05
    trust_angstrom: float = 0.3
    max_force_calls: int = 100

    def calls(self, policy: Callable[[State], Move], starts: Structures) -> Tensor:
        """Force calls of each start, failures charged at the cap, (n_structures,) int64."""
        state = first_state(self.potential, starts)
        running = largest_force(starts, state.evaluation) > self.force_tolerance_ev_per_angstrom
        calls = torch.ones(starts.n_structures, dtype=torch.int64)
        if bool(running.any()):
            environment = Environment(self.potential, PerturbedStarts(starts), self._settings())
            found = relax(environment, policy, state.select(running))
            failed = found.outcomes != Outcome.CONVERGED
            calls[running] = torch.where(failed, self.max_force_calls, found.calls)
        return calls

    def _settings(self) -> EnvironmentSettings:
        return EnvironmentSettings(
            force_tolerance_ev_per_angstrom=self.force_tolerance_ev_per_angstrom,
            max_displacement_angstrom=self.trust_angstrom,
            max_force_calls=self.max_force_calls,
            stall_length_angstrom=0.0,
        )
