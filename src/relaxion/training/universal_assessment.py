"""How good is a metric under the guard? Live relaxations from starts of the store that were never trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from ase.filters import FrechetCellFilter

from relaxion.bench.baselines import ase_calls, read_baselines
from relaxion.collecting.store import Trajectory
from relaxion.optimize.stepper import Stepper
from relaxion.potentials import potential
from relaxion.potentials.ase import PotentialCalculator
from relaxion.structures import Structures
from relaxion.training.assessment import AssessmentStopped
from relaxion.training.metals_assessment import CAP, COMPARED, FMAX, MakeChain, force_calls
from relaxion.training.run_folder import BASELINES, write_json
from relaxion.training.stored_lessons import largest_forces


@dataclass(frozen=True)
class UniversalAssessed:
    """Force calls of each start, by kind; what did not converge is charged the cap."""

    force_calls: Mapping[str, np.ndarray]
    validation_errors: Mapping[str, float]
    baselines: Mapping[str, float]

    @cached_property
    def all_calls(self) -> np.ndarray:
        return np.concatenate(list(self.force_calls.values()))

    @property
    def success_rate(self) -> float:
        return float((self.all_calls < CAP).mean())

    def metrics(self) -> dict[str, float]:
        calls = self.all_calls
        own = {
            "eval/mean_reward": -float(calls.mean()),
            "eval/force_calls_mean": float(calls.mean()),
            "eval/force_calls_median": float(np.median(calls)),
            "eval/success_rate": self.success_rate,
        }
        own |= {f"eval/force_calls_{kind}": float(found.mean()) for kind, found in self.force_calls.items()}
        own |= {f"eval/relative_error_{name}": error for name, error in self.validation_errors.items()}
        return own | {f"eval/force_calls_{name.lower()}": calls for name, calls in self.baselines.items()}


class UniversalAssessor:
    """At most `per_kind` starts of each kind; the stored relaxation itself says what its collector needed."""

    def __init__(self, validation: Sequence[Trajectory], per_kind: int) -> None:
        by_kind: dict[str, list[Trajectory]] = {}
        for trajectory in sorted(validation, key=lambda t: t.key):
            by_kind.setdefault(trajectory.kind, []).append(trajectory)
        self.starts = {kind: found[:per_kind] for kind, found in sorted(by_kind.items())}
        self.baselines: dict[str, float] = {}
        self._calculators: dict[str, PotentialCalculator] = {}

    def compare(self, folder: Path) -> None:
        """BFGS, FIRE and who collected, once; a resumed run reads what they needed."""
        file = folder / BASELINES
        if not file.exists():
            write_json(file, self._compared())
        self.baselines = read_baselines(file)

    def _compared(self) -> dict[str, dict[str, float]]:
        every = [trajectory for found in self.starts.values() for trajectory in found]
        calls = {name: self.ase_calls(name) for name in COMPARED}
        calls["collector"] = np.array([stored_calls(trajectory) for trajectory in every])
        return {
            name: {
                "mean_force_calls": float(found.mean()),
                "median_force_calls": float(np.median(found)),
                "failures": int((found >= CAP).sum()),
            }
            for name, found in calls.items()
        }

    def ase_calls(self, name: str) -> np.ndarray:
        """What one of ASE's optimizers needs, start by start."""
        every = [trajectory for found in self.starts.values() for trajectory in found]
        found = [ase_calls(name, _start(t), self._calculator(t).potential, FMAX, CAP) for t in every]
        return np.array([calls for one in found for calls in one.force_calls])

    def calls(self, make_chain: MakeChain, stop: Callable[[], bool] | None = None) -> dict[str, np.ndarray]:
        """One relaxation from each start; `stop` is asked before each."""
        found = {}
        for kind, trajectories in self.starts.items():
            counted = []
            for trajectory in trajectories:
                if stop is not None and stop():
                    raise AssessmentStopped
                counted.append(self._relaxed(trajectory, make_chain()))
            found[kind] = np.array(counted)
        return found

    def _relaxed(self, trajectory: Trajectory, chain: Stepper) -> int:
        atoms = _start(trajectory).to_ase()[0]
        atoms.calc = self._calculator(trajectory)
        return force_calls(FrechetCellFilter(atoms) if trajectory.cell_free else atoms, chain)

    def _calculator(self, trajectory: Trajectory) -> PotentialCalculator:
        if trajectory.engine not in self._calculators:
            self._calculators[trajectory.engine] = PotentialCalculator(potential(trajectory.engine))
        return self._calculators[trajectory.engine]


def _start(trajectory: Trajectory) -> Structures:
    return trajectory.structures.select(torch.tensor([0]))


def stored_calls(trajectory: Trajectory) -> int:
    """Structures evaluated until the first below the tolerance; the cap where none was."""
    below = (largest_forces(trajectory) < FMAX).nonzero().flatten()
    return int(below[0]) + 1 if len(below) else CAP
