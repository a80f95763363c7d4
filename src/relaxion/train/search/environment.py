"""Hopping as a Gymnasium environment: an agent chooses the next hop among candidates, on a budget of force calls.

State: the minimum where the walker stands as a graph (elements, positions, cell), its energy above the best one so far,
the share of the calls that is left, and the candidates, trial structures that are not relaxed. Action: the number of a
candidate. Reward: by how much the best energy fell (eV), minus `call_cost_ev` for every force call. An episode ends
when the calls are spent; since the calls left are part of the state this is a true end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator

from relaxion.errors import SettingsError
from relaxion.potentials.base import Potential
from relaxion.search.choices import Draw, Hop, Mixture, PossibleHop, Walker
from relaxion.search.relaxing import TrialRelaxer, one_round
from relaxion.search.settings import SearchSettings
from relaxion.search.walk import Walk

Observation = dict[str, np.ndarray]


class _Agent(Mixture):
    """Takes the candidate that the agent named."""

    next: PossibleHop | None = None

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:  # noqa: ARG002
        return [self.next for _ in walkers]


class HopEnvironment(gymnasium.Env[Observation, int]):
    """One walker; all episodes have the same number of atoms."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium wants it

    def __init__(
        self,
        make_start: Callable[[np.random.Generator], Atoms],
        potential: str | BaseCalculator | Potential = "emt",
        *,
        n_atoms: int,
        candidates: int = 16,
        call_cost_ev: float = 0.001,
        settings: SearchSettings | None = None,
    ) -> None:
        """make_start: a start from a generator. candidates: hops to choose from. call_cost_ev: per force call."""
        self.settings = settings or SearchSettings(calls=200)
        self.make_start, self.n_candidates, self.call_cost_ev = make_start, candidates, call_cost_ev
        self.n_atoms = n_atoms
        self._relax = TrialRelaxer(potential, self.settings)
        self.action_space = gymnasium.spaces.Discrete(candidates)  # pyright: ignore[reportAttributeAccessIssue]
        spaces: Any = gymnasium.spaces.Dict(
            {
                "numbers": gymnasium.spaces.Box(0, 118, (n_atoms,), np.int64),
                "positions": _unbounded(n_atoms, 3),
                "cell": _unbounded(3, 3),
                "candidates": _unbounded(candidates, n_atoms, 3),
                "above_best_ev": gymnasium.spaces.Box(0, np.inf, (1,), np.float64),
                "calls_left": gymnasium.spaces.Box(0, 1, (1,), np.float64),
            }
        )
        self.observation_space = spaces
        self.walk: Walk | None = None
        self.last_hop: Hop | None = None
        self._drawn: list[PossibleHop] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        start = self.make_start(self.np_random)
        if len(start) != self.n_atoms:
            raise SettingsError(f"a start has {len(start)} atoms, the environment was made for {self.n_atoms}")
        self._agent = _Agent()
        self.walk = Walk(start, self.settings, self._agent)
        self.walk.skips_known = False  # the agent decides about every hop
        one_round([self.walk], self._relax)
        if not self.walk.walkers:
            raise SettingsError(f"no episode can begin: {self.walk.stopped}")
        self._draw()
        return self._observation(), {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        walk = self.walk
        if walk is None or walk.stopped:
            raise SettingsError("the episode is over; call reset first")
        best, calls = walk.best_ev, walk.calls
        self._agent.next = self._drawn[int(action) % len(self._drawn)]
        hops = one_round([walk], self._relax)[0]
        self.last_hop = hops[0] if hops else None
        reward = (best - walk.best_ev) - self.call_cost_ev * (walk.calls - calls)
        if not walk.stopped:
            self._draw()
        told = {"best_ev": walk.best_ev, "force_calls": walk.calls, "stopped": walk.stopped}
        return self._observation(), float(reward), bool(walk.stopped), False, told

    def _draw(self) -> None:
        assert self.walk is not None
        draws = (self.walk.draw.one(self.walk.walkers[0]) for _ in range(self.n_candidates))
        self._drawn = [candidate for candidate in draws if candidate is not None]
        if not self._drawn:
            self.walk.stopped = "no hop was found"

    def _observation(self) -> Observation:
        """Where fewer candidates were found than there are actions, they come again in turn."""
        assert self.walk is not None
        walker = self.walk.walkers[0]
        trials = [candidate.trial.positions for candidate in self._drawn] or [walker.atoms.positions]
        left = 1 - self.walk.calls / self.settings.calls
        return {
            "numbers": walker.atoms.numbers.astype(np.int64),
            "positions": walker.atoms.positions.copy(),
            "cell": walker.atoms.cell.array.copy(),
            "candidates": np.array([trials[number % len(trials)] for number in range(self.n_candidates)]),
            "above_best_ev": np.array([max(walker.energy_ev - self.walk.best_ev, 0.0)]),
            "calls_left": np.array([max(left, 0.0)]),
        }


def _unbounded(*shape: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float64)
