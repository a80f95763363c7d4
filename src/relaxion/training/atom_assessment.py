"""How good is the policy on atoms? Fixed starts held apart, no noise, force calls beside BFGS and FIRE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relaxion.bench.baselines import ase_calls, read_baselines
from relaxion.errors import RunError
from relaxion.files import write_json
from relaxion.potentials.reward import largest_force
from relaxion.structures import Move, Outcome, State
from relaxion.training.assessment import DIVERGED, AssessmentStopped
from relaxion.training.assessment_record import Footage, RelaxationRecord, Relaxed, Shot
from relaxion.training.atom_task import SIDE_SEEDS, SIDES, AtomTask
from relaxion.training.run_folder import BASELINES
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
    record: RelaxationRecord | None = None  # start by start, with films

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
            write_json(file, {name: calls.as_plain() for name, calls in found.items()})
        self.baselines = read_baselines(file, COMPARED)

    def __call__(self, act: Callable[[State], Move], stop: Callable[[], bool] | None = None) -> AtomAssessed:
        """`stop` is asked before every step."""
        cap = self.environment.settings.max_force_calls
        returns = torch.zeros(self.n_starts, dtype=torch.float64)
        lengths = torch.zeros(self.n_starts, dtype=torch.int64)
        calls, outcomes = torch.full_like(lengths, cap), torch.zeros_like(lengths)
        state, running = self.starts, torch.arange(self.n_starts)
        footage = [Footage() for _ in range(self.n_starts)]
        _shoot(footage, running, state)
        while len(running):
            if stop is not None and stop():
                raise AssessmentStopped
            move = act(state)
            _check_finite(move, int(lengths.max()))
            transition = self.environment.step(state, move)
            returns[running] += transition.reward.double()
            lengths[running] += 1
            outcomes[running] = transition.outcome
            _shoot(footage, running, transition.next_state)
            converged = transition.outcome == Outcome.CONVERGED
            calls[running[converged]] = transition.next_state.calls[converged]
            state, running = transition.next_state.select(~transition.finished), running[~transition.finished]
        return AtomAssessed(returns, lengths, calls, outcomes, self.baselines, self._record(calls, outcomes, footage))

    def _record(self, calls: Tensor, outcomes: Tensor, footage: Sequence[Footage]) -> RelaxationRecord:
        settings, starts = self.environment.settings, self.starts.structures
        numbers = np.split(starts.atomic_numbers.numpy(), starts.counts.cumsum(0)[:-1].tolist())
        ends = [Outcome(outcome) for outcome in outcomes.tolist()]
        relaxed = [
            Relaxed(
                label="",
                numbers=numbers[place],
                periodic=bool(starts.periodic[place].any()),
                outcome=end.name.lower(),
                force_calls=int(calls[place]),
                energy_ev=footage[place].shots[-1].energy_ev if end == Outcome.CONVERGED else None,
                shots=footage[place].shots,
            )
            for place, end in enumerate(ends)
        ]
        return RelaxationRecord(settings.force_tolerance_ev_per_angstrom, settings.max_force_calls, relaxed)


def _shoot(footage: Sequence[Footage], places: Tensor, state: State) -> None:
    """One more shot of each structure under way."""
    structures, said = state.structures, state.evaluation
    positions = np.split(structures.positions.numpy().astype(np.float32), structures.counts.cumsum(0)[:-1].tolist())
    forces = largest_force(structures, said)
    columns = (places.tolist(), state.calls.tolist(), positions, structures.cells.numpy(), said.energies.tolist())
    for place, call, where, cell, energy, force in zip(*columns, forces.tolist(), strict=True):
        footage[place].add(Shot(call, where, cell.copy(), energy, force))


def _check_finite(move: Move, step: int) -> None:
    if not (torch.isfinite(move.displacements).all() and torch.isfinite(move.strains).all()):
        raise RunError(f"the policy's move in step {step} of an assessment is not finite; {DIVERGED}")
