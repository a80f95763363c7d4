"""How good is the policy on atoms? Fixed starts held apart, no noise, force calls beside BFGS and FIRE."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from relaxion.errors import RunError
from relaxion.structures import Move, Outcome, State
from relaxion.training.assessment import DIVERGED, AssessmentStopped
from relaxion.training.atom_task import SIDE_SEEDS, SIDES, AtomTask
from relaxion.training.baselines import ase_calls
from relaxion.training.run_folder import BASELINES, write_json
from relaxion.training.seeds import named_generator

COMPARED = ("BFGS", "FIRE")


@dataclass(frozen=True)
class AtomAssessed:
    """One relaxation from each start. Those that did not converge are charged the cap."""

    returns: Tensor  # (n_starts,) float64, undiscounted
    lengths: Tensor  # (n_starts,) int64, steps
    force_calls: Tensor  # (n_starts,) int64
    outcomes: Tensor  # (n_starts,) int64, `Outcome`
    baselines: Mapping[str, float]  # mean force calls of ASE's optimizers, by name

    @property
    def mean(self) -> float:
        return float(self.returns.mean())

    @property
    def worst(self) -> float:
        return float(self.returns.min())

    @property
    def mean_force_calls(self) -> float:
        return float(self.force_calls.double().mean())

    @property
    def success_rate(self) -> float:
        return float((self.outcomes == Outcome.CONVERGED).double().mean())

    def metrics(self) -> dict[str, float]:
        calls = self.force_calls.double()
        own = {
            "eval/mean_reward": self.mean,
            "eval/worst_reward": self.worst,
            "eval/mean_ep_length": float(self.lengths.double().mean()),
            "eval/force_calls_mean": self.mean_force_calls,
            "eval/force_calls_median": float(calls.quantile(0.5)),
            "eval/force_calls_p95": float(calls.quantile(0.95)),
            "eval/success_rate": self.success_rate,
        }
        return own | {f"eval/force_calls_{name.lower()}": calls for name, calls in self.baselines.items()}


class AtomAssessor:
    """All starts at once on the batched potential; a relaxation that has ended is not evaluated again."""

    def __init__(self, task: AtomTask, n_starts: int) -> None:
        self.task, self.n_starts = task, n_starts
        self.side = task.settings.atoms.assess_on
        self.environment = task.environment(self.side)
        self.baselines: dict[str, float] = {}

    @cached_property
    def starts(self) -> State:
        """The same for every agent and seed."""
        seed = SIDE_SEEDS[SIDES.index(self.side)]
        return self.environment.reset(named_generator(seed, "assessment"), self.n_starts)

    def compare(self, folder: Path) -> None:
        """Let ASE's optimizers run once; a resumed run reads what they needed."""
        file = folder / BASELINES
        if not file.exists():
            settings = self.task.settings.environment
            fmax, cap = settings.force_tolerance_ev_per_angstrom, settings.max_force_calls
            found = {name: ase_calls(name, self.starts.structures, self.task.potential, fmax, cap) for name in COMPARED}
            values = {
                name: {"mean_force_calls": c.mean, "median_force_calls": c.median, "failures": c.failures}
                for name, c in found.items()
            }
            write_json(file, values)
        kept = json.loads(file.read_text())
        self.baselines = {name: float(kept[name]["mean_force_calls"]) for name in COMPARED}

    def __call__(self, act: Callable[[State], Move], stop: Callable[[], bool] | None = None) -> AtomAssessed:
        """`stop` is asked before every step."""
        cap = self.environment.settings.max_force_calls
        returns = torch.zeros(self.n_starts, dtype=torch.float64)
        lengths = torch.zeros(self.n_starts, dtype=torch.int64)
        calls, outcomes = torch.full_like(lengths, cap), torch.zeros_like(lengths)
        state, running = self.starts, torch.arange(self.n_starts)
        while len(running):
            if stop is not None and stop():
                raise AssessmentStopped
            move = act(state)
            _check_finite(move, int(lengths.max()))
            transition = self.environment.step(state, move)
            returns[running] += transition.reward.double()
            lengths[running] += 1
            outcomes[running] = transition.outcome
            converged = transition.outcome == Outcome.CONVERGED
            calls[running[converged]] = transition.next_state.calls[converged]
            state, running = transition.next_state.select(~transition.finished), running[~transition.finished]
        return AtomAssessed(returns, lengths, calls, outcomes, self.baselines)


def _check_finite(move: Move, step: int) -> None:
    if not (torch.isfinite(move.displacements).all() and torch.isfinite(move.strains).all()):
        raise RunError(f"the policy's move in step {step} of an assessment is not finite; {DIVERGED}")
