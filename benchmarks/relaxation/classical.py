"""Force calls of the classical core beside ASE's optimizers, counted inside the calculator.

    python benchmarks/relaxation/classical.py [--number 100] [--optimizers relaxion,BFGS] [--json FILE] [--check]

Every structure is relaxed by every optimizer from the same start to the same fmax. A relaxation that does not get
there within the cap is a failure and is charged the cap. GPMin factorises a dense matrix of calls × coordinates; it
gives up, and is charged the cap, when that has more than 4 000 rows, and it sits out the sets that start far from any
minimum, where it takes minutes per structure. `--check` exits with 1 unless the bar of the first set holds and nothing
of ours failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sets
import torch
from ase import Atoms
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS, FIRE2, LBFGS, BFGSLineSearch, GPMin

import relaxion
from relaxion.classical.chain import Classical
from relaxion.classical.quasi_newton import QuasiNewtonSettings
from relaxion.physics.ase import PotentialCalculator

FMAX = 0.05  # eV/Å
CAP = 300  # force calls
LARGEST_GPMIN = 4000  # rows of its matrix
BAR = 0.9  # of the force calls of the best ASE optimizer on the first set
ASE_OPTIMIZERS = (BFGS, LBFGS, BFGSLineSearch, FIRE2, GPMin)


class WithoutSprings(relaxion.Relaxer):
    """The same core on a plain multiple of 1: what the springs are worth."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._chain = Classical(QuasiNewtonSettings(largest_trust=self.maxstep, use_springs=False))


OURS = {"relaxion": relaxion.Relaxer, "relaxion without springs": WithoutSprings}
OPTIMIZERS = {**OURS, **{kind.__name__: kind for kind in ASE_OPTIMIZERS}}


class CapReachedError(Exception):
    """More force calls than allowed."""


class Counted:
    """Nobody can cheat: the calculator itself counts, and refuses to answer beyond the cap."""

    calls = 0

    def calculate(self, *args, **kwargs):
        if self.calls >= CAP:
            raise CapReachedError
        self.calls += 1
        super().calculate(*args, **kwargs)


class CountedEmt(Counted, EMT):
    """ASE's own EMT, counted."""


class CountedEam(Counted, PotentialCalculator):
    """The analytic alloy EAM, counted."""

    def __init__(self):
        super().__init__(relaxion.potential("eam"))


@dataclass(frozen=True)
class Task:
    """One set of starts and how they are to be relaxed."""

    title: str
    images: list[Atoms]
    calculator: type = CountedEmt
    cell: bool = False
    far: bool = False


def relax(kind: type, start: Atoms, task: Task) -> tuple[int, bool]:
    """Force calls spent, and whether the forces came below the tolerance."""
    atoms = start.copy()
    atoms.calc = calculator = task.calculator()
    options = {"policy": None} if kind in OURS.values() else {}
    target = FrechetCellFilter(atoms) if task.cell else atoms
    steps = min(CAP, LARGEST_GPMIN // (3 * len(atoms) + 1)) if kind is GPMin else CAP
    try:
        converged = kind(target, logfile=None, **options).run(fmax=FMAX, steps=steps)
    except (CapReachedError, RuntimeError):  # GPMin raises RuntimeError where it gives up
        converged = False
    return (calculator.calls, True) if converged else (CAP, False)


def measure(task: Task, names: list[str]) -> dict[str, dict]:
    """Numbers of the chosen optimizers on one set."""
    results = {}
    for name in names:
        kind = OPTIMIZERS[name]
        if task.far and kind is GPMin:
            continue
        begin = time.perf_counter()
        calls, converged = np.array([relax(kind, atoms, task) for atoms in task.images]).T
        print(f"{task.title}: {name}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        results[name] = {
            "mean_force_calls": float(calls.mean()),
            "median_force_calls": float(np.median(calls)),
            "p95_force_calls": float(np.percentile(calls, 95)),
            "worst_force_calls": int(calls.max()),
            "failures": int((converged == 0).sum()),
            "wall_time_seconds": time.perf_counter() - begin,
        }
    return results


def show(title: str, results: dict[str, dict]) -> float:
    """Print one table; return the ratio to the best ASE optimizer."""
    best = min((name for name in results if name not in OURS), key=lambda name: results[name]["mean_force_calls"])
    ratio = results["relaxion"]["mean_force_calls"] / results[best]["mean_force_calls"]
    print(f"\n### {title}\n\n| optimizer | mean | median | p95 | worst | failures |\n|---|---|---|---|---|---|")
    for name, row in sorted(results.items(), key=lambda item: item[1]["mean_force_calls"]):
        numbers = [f"{row[key]:.1f}" for key in ("mean_force_calls", "median_force_calls", "p95_force_calls")]
        print(f"| {name} | {' | '.join(numbers)} | {row['worst_force_calls']} | {row['failures']} |")
    print(f"\n{ratio:.2f} of the force calls of {best}, the best of ASE's on this set.", flush=True)
    return ratio


def tasks(number: int) -> list[Task]:
    half = number // 2
    return [
        Task("Random EMT alloys, 2–32 atoms, rattle 0.05–0.3 Å", sets.alloys(number, 9001)),
        Task("EMT alloys with free cell, rattle 0.05–0.15 Å, strain ±3 %", sets.strained_alloys(half, 9002), cell=True),
        Task("EMT slabs with an adsorbate", sets.slabs(half, 9003)),
        Task("EMT random clusters, 6–20 atoms", sets.clusters(half, 9004), far=True),
        Task("Al–Fe random packings, 2–16 atoms, analytic EAM", sets.packings(half, 9005), CountedEam, far=True),
        Task("Al–Fe random packings with free cell", sets.packings(half, 9005), CountedEam, cell=True, far=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100, help="structures of the first set; half of it in the others")
    parser.add_argument(
        "--optimizers", default=",".join(OPTIMIZERS), help="which; 'relaxion' and at least one of ASE's"
    )
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if the ratio of the first set is above {BAR}"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # ASE's own, about GPMin's defaults
    measured, ratios = {}, []
    for task in tasks(options.number):
        measured[task.title] = measure(task, options.optimizers.split(","))
        ratios.append(show(task.title, measured[task.title]))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    failures = sum(results["relaxion"]["failures"] for results in measured.values())
    return int(options.check and (ratios[0] > BAR or failures > 0))


if __name__ == "__main__":
    sys.exit(main())
