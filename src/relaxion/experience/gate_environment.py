"""One relaxation under guard as a control task: the action turns the gate's knobs, a step is one force call.

The metric is frozen; what is learned is how far to believe it, how far to go, and how much the newest secants count.
Observations and actions are short vectors, so that every agent for vectors can learn it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from ase import Atoms
from ase.filters import FrechetCellFilter
from gymnasium.spaces import Box
from numpy.typing import NDArray
from pydantic import Field

from relaxion.errors import StructureError
from relaxion.generators.starts import Starts
from relaxion.optimize.ase_interface import read_point
from relaxion.optimize.gate import N_KNOBS, knobs_from
from relaxion.optimize.guard import OBSERVATION, Guard, GuardSettings, MetricSource, hand_made_gate
from relaxion.optimize.point import Point
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.potentials.ase import PotentialCalculator
from relaxion.potentials.potential import Potential
from relaxion.settings import Settings

START_TRIES = 50
LARGEST_NUMBER = 10.0  # of an observation: all are logarithms, cosines and clipped ratios


class GateTaskSettings(Settings):
    """What a relaxation is for the gate."""

    lowest_tolerance_ev_per_angstrom: float = Field(default=0.01, gt=0)
    """Tolerances are drawn anew for each relaxation, evenly in the logarithm, from here …"""

    highest_tolerance_ev_per_angstrom: float = Field(default=0.05, gt=0)
    """… to here: the range that users ask for."""

    gate_max_force_calls: int = Field(default=100, ge=2)
    """Relaxations are cut after so many."""

    shaping: float = Field(default=1.0, ge=0)
    """Reward for each decade by which the largest force falls, beside -1 for every force call."""

    discount_factor: float = Field(default=0.99, ge=0, le=1)
    """γ of the agent; shaping by it leaves the best policy what it is (Ng et al. 1999)."""

    departure_penalty: float = Field(default=0.5, ge=0)
    """Weight in the policy's loss, in force calls, of the summed squares of the action: critics that know little must
    not drive the gate away from the hand-made rule. With 0 gates came out worse than the rule (docs/metals.md)."""

    gate_start_force_limit_ev_per_angstrom: float = Field(default=1e3, gt=0)
    """Starts with a larger force are drawn again."""


class GateEnvironment(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Reset draws a structure and asks for its forces; every step is one more force call."""

    def __init__(
        self,
        worlds: Sequence[tuple[Potential, Starts, float]],
        metrics: MetricSource,
        settings: GateTaskSettings | None = None,
        guard: GuardSettings | None = None,
    ) -> None:
        """`worlds`: potentials, their starts, and how often each is drawn."""
        self.worlds = [(PotentialCalculator(potential), starts) for potential, starts, _ in worlds]
        shares = np.array([share for *_, share in worlds], dtype=np.float64)
        self.shares = shares / shares.sum()
        self.settings = settings or GateTaskSettings()
        self.guard = Guard(QuasiNewtonSettings(), metrics, guard=guard)
        self.observation_space = Box(-LARGEST_NUMBER, LARGEST_NUMBER, (len(OBSERVATION),), np.float32)
        self.action_space = Box(-1.0, 1.0, (N_KNOBS,), np.float32)
        self.tolerance, self.calls = 0.05, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A new structure. Starts that need no relaxation, are wild or out of the metric's reach are drawn again."""
        super().reset(seed=seed, options=options)
        generator = torch.Generator().manual_seed(int(self.np_random.integers(2**31)))
        low, high = self.settings.lowest_tolerance_ev_per_angstrom, self.settings.highest_tolerance_ev_per_angstrom
        self.tolerance = float(np.exp(self.np_random.uniform(np.log(low), np.log(high))))
        self.guard.tolerance = self.tolerance
        for _ in range(START_TRIES):
            calculator, starts = self.worlds[int(self.np_random.choice(len(self.worlds), p=self.shares))]
            self._begin(calculator, starts, generator)
            if self._usable(self.point) and self._look(self.guard.judged(self.point)):
                return self.observation, {}
        raise StructureError(f"no start out of {START_TRIES} could be relaxed by the metric; look at its elements")

    def _begin(self, calculator: PotentialCalculator, starts: Starts, generator: torch.Generator) -> None:
        structures = starts.sample(generator, 1)
        atoms: Atoms = structures.to_ase()[0]
        atoms.calc = calculator
        self.target = FrechetCellFilter(atoms) if bool(structures.cell_free[0]) else atoms
        self.guard.reset()
        self.guard.disappointments = 0  # of the relaxation before
        self.calls, self.point = 1, read_point(self.target)

    def _usable(self, point: Point) -> bool:
        limit = self.settings.gate_start_force_limit_ev_per_angstrom
        return point.finite and self.tolerance < point.largest_force < limit

    def _look(self, base: Point) -> bool:
        """The metric at the base of the next step; False where there is none."""
        view = self.guard.view(base)
        if view is None:
            return False
        self.base, self.view = base, view
        self.observation = view.observation.clip(-LARGEST_NUMBER, LARGEST_NUMBER).astype(np.float32)
        return True

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move as knobs and guard say, and look at what was found."""
        before = self._decades(self.base)
        turned = knobs_from(np.asarray(action, dtype=np.float64), hand_made_gate(self.view.observation))
        proposal = self.guard.step_with(self.base, self.view, turned)
        self.guard.last = proposal
        self.target.set_positions(proposal.base.coordinates + proposal.step)
        self.point = read_point(self.target)
        self.calls += 1
        converged = self.point.finite and self.point.largest_force < self.tolerance
        base = self.guard.judged(self.point)
        if self.guard.lost:  # where the relaxer would call FIRE
            self.guard.reset()
            base = self.guard.judged(base)
        self._look(base)
        settings = self.settings
        gained = before - (0.0 if converged else settings.discount_factor) * self._decades(base)
        info = {"force_calls": self.calls, "converged": converged}
        return (
            self.observation,
            -1.0 + settings.shaping * gained,
            converged,
            not converged and self.calls >= settings.gate_max_force_calls,
            info,
        )

    def _decades(self, point: Point) -> float:
        """The potential of the shaping: decades above the tolerance."""
        return float(np.log10(max(point.largest_force, self.tolerance) / self.tolerance))
