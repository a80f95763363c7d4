"""How good are metric, gate and guard together? Fixed starts of every kind, force calls beside core, BFGS and FIRE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.filters import FrechetCellFilter

from relaxion.bench.baselines import Calls, ase_calls, read_baselines
from relaxion.generators.metals import ADSORBATES, EAM_METALS, EMT_METALS, KINDS, MetalStarts
from relaxion.optimize.ase_interface import bare_atoms, read_point
from relaxion.optimize.point import Point
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.potentials import potential
from relaxion.potentials.ase import PotentialCalculator
from relaxion.structures import Structures
from relaxion.training.assessment import AssessmentStopped
from relaxion.training.assessment_record import Footage, RelaxationRecord, Relaxed, Shot
from relaxion.training.run_folder import BASELINES, write_json

FMAX = 0.05  # eV/Å
CAP = 200  # force calls
SEED = 8500  # of validation starts: neither trained on nor those of any benchmark
COMPARED = ("BFGS", "FIRE")

MakeChain = Callable[[], Stepper]
OnPoint = Callable[[int, Point], None]  # force calls so far, what the newest said


@dataclass(frozen=True)
class MetalsAssessed:
    """Force calls of each start, by kind; what did not converge is charged the cap."""

    force_calls: Mapping[str, np.ndarray]
    baselines: Mapping[str, float]
    record: RelaxationRecord | None = None  # start by start, kind after kind, with films

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
            "eval/force_calls_p95": float(np.quantile(calls, 0.95)),
            "eval/success_rate": self.success_rate,
        }
        own |= {f"eval/force_calls_{kind}": float(found.mean()) for kind, found in self.force_calls.items()}
        return own | {f"eval/force_calls_{name.lower()}": calls for name, calls in self.baselines.items()}


class MetalsAssessor:
    """The same `per_kind` starts of each kind every time, on EMT, and as many alloys on the EAM."""

    def __init__(self, per_kind: int) -> None:
        self.per_kind = per_kind
        self.baselines: dict[str, float] = {}

    @cached_property
    def starts(self) -> dict[str, tuple[PotentialCalculator, Structures]]:
        emt, eam = (PotentialCalculator(potential(name)) for name in ("emt", "eam"))
        found = {kind: (emt, self._sample(EMT_METALS, kind, 0.0, place)) for place, kind in enumerate(KINDS)}
        found["free_cell"] = emt, self._sample(EMT_METALS, "alloy", 1.0, 10)
        found["eam"] = eam, self._sample(EAM_METALS, "alloy", 0.4, 11)
        return found

    def _sample(self, elements: tuple[str, ...], kind: str, free: float, place: int) -> Structures:
        starts = MetalStarts(elements=elements, sizes=(4, 20), shares={kind: 1.0}, free_share=free)
        if elements == EMT_METALS:
            starts = replace(starts, adsorbates=ADSORBATES)
        return starts.sample(torch.Generator().manual_seed(SEED + place), self.per_kind)

    def compare(self, folder: Path) -> None:
        """Core, BFGS and FIRE once; a resumed run reads what they needed."""
        file = folder / BASELINES
        if not file.exists():
            write_json(file, self._compared())
        self.baselines = read_baselines(file)

    def _compared(self) -> dict[str, dict[str, Any]]:
        worlds = self.starts.values()
        found = {name: _joined([ase_calls(name, s, c.potential, FMAX, CAP) for c, s in worlds]) for name in COMPARED}
        core = self(lambda: Stepper(QuasiNewtonSettings())).record
        assert core is not None
        energies = tuple(one.energy_ev for one in core.relaxed)
        calls = tuple(one.force_calls for one in core.relaxed)
        found["core"] = Calls(calls, sum(energy is None for energy in energies), energies)
        return {name: calls.as_plain() for name, calls in found.items()}

    def __call__(self, make_chain: MakeChain, stop: Callable[[], bool] | None = None) -> MetalsAssessed:
        """One relaxation from each start; `stop` is asked before each."""
        found: dict[str, list[Relaxed]] = {}
        for kind, (calculator, starts) in self.starts.items():
            found[kind] = []
            for atoms, free in zip(starts.to_ase(), starts.cell_free.tolist(), strict=True):
                if stop is not None and stop():
                    raise AssessmentStopped
                atoms.calc = calculator
                found[kind].append(relaxed(kind, FrechetCellFilter(atoms) if free else atoms, make_chain()))
        calls = {kind: np.array([one.force_calls for one in ones]) for kind, ones in found.items()}
        record = RelaxationRecord(FMAX, CAP, [one for ones in found.values() for one in ones])
        return MetalsAssessed(calls, self.baselines, record)


def _joined(parts: Sequence[Calls]) -> Calls:
    calls = tuple(number for part in parts for number in part.force_calls)
    return Calls(calls, sum(part.failures for part in parts), tuple(e for part in parts for e in part.energies_ev))


def relaxed(
    label: str, target: Atoms | FrechetCellFilter, chain: Stepper, fmax: float = FMAX, cap: int = CAP
) -> Relaxed:
    """`force_calls` with what was seen on the way."""
    atoms, footage = bare_atoms(target), Footage()

    def shoot(call: int, point: Point) -> None:
        shot = Shot(call, atoms.positions.astype(np.float32), np.array(atoms.cell), point.energy, point.largest_force)
        footage.add(shot)

    calls = force_calls(target, chain, fmax, cap, shoot)
    last = footage.shots[-1]
    converged = last.fmax_ev_per_angstrom < fmax
    return Relaxed(
        label=label,
        numbers=atoms.numbers.copy(),
        periodic=bool(atoms.pbc.any()),
        outcome="converged" if converged else "step_limit",
        force_calls=calls,
        energy_ev=last.energy_ev if converged else None,
        shots=footage.shots,
    )


def force_calls(
    target: Atoms | FrechetCellFilter,
    chain: Stepper,
    fmax: float = FMAX,
    cap: int = CAP,
    on_point: OnPoint | None = None,
) -> int:
    """Until the largest force is below `fmax`, the first call included; `cap` where it takes longer."""
    for call in range(1, cap):
        point = read_point(target)
        if on_point is not None:
            on_point(call, point)
        if point.largest_force < fmax:
            return call
        proposal = chain.propose(point)
        target.set_positions(proposal.base.coordinates + proposal.step)
    return cap
