"""Force calls of the classical core beside ASE's optimizers, counted inside the calculator.

    python benchmarks/relaxation/classical.py [--number 200] [--json FILE] [--check]

Every structure is relaxed by every optimizer from the same start to the same fmax. A relaxation that does not get
there within the cap is a failure and is charged the cap. `--check` exits with 1 unless the bar of the first set holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sets
from ase import Atoms
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS, FIRE2, LBFGS, BFGSLineSearch, GPMin

import relaxion

FMAX = 0.05  # eV/Å
CAP = 300  # force calls
BAR = 0.9  # of the force calls of the best ASE optimizer on the first set
OPTIMIZERS = {
    "relaxion": relaxion.Relaxer,
    **{kind.__name__: kind for kind in (BFGS, LBFGS, BFGSLineSearch, FIRE2, GPMin)},
}


class CapReachedError(Exception):
    """More force calls than allowed."""


class CountingEMT(EMT):
    """Nobody can cheat: the calculator itself counts, and refuses to answer beyond the cap."""

    calls = 0

    def calculate(self, *args, **kwargs):
        if self.calls >= CAP:
            raise CapReachedError
        self.calls += 1
        super().calculate(*args, **kwargs)


def relax(kind: type, start: Atoms, wrap: Callable) -> tuple[int, bool]:
    """Force calls spent, and whether the forces came below the tolerance."""
    atoms = start.copy()
    atoms.calc = calculator = CountingEMT()
    options = {"policy": None} if kind is relaxion.Relaxer else {}
    try:
        converged = kind(wrap(atoms), logfile=None, **options).run(fmax=FMAX, steps=CAP)
    except CapReachedError:
        converged = False
    return (calculator.calls, True) if converged else (CAP, False)


def measure(images: list[Atoms], wrap: Callable, names: list[str]) -> dict[str, dict]:
    results = {}
    for name in names:
        begin = time.perf_counter()
        calls, converged = np.array([relax(OPTIMIZERS[name], atoms, wrap) for atoms in images]).T
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
    best = min((name for name in results if name != "relaxion"), key=lambda name: results[name]["mean_force_calls"])
    ratio = results["relaxion"]["mean_force_calls"] / results[best]["mean_force_calls"]
    print(f"\n### {title}\n\n| optimizer | mean | median | p95 | worst | failures |\n|---|---|---|---|---|---|")
    for name, row in sorted(results.items(), key=lambda item: item[1]["mean_force_calls"]):
        numbers = [f"{row[key]:.1f}" for key in ("mean_force_calls", "median_force_calls", "p95_force_calls")]
        print(f"| {name} | {' | '.join(numbers)} | {row['worst_force_calls']} | {row['failures']} |")
    print(f"\n{ratio:.2f} of the force calls of {best}, the best of ASE's on this set.", flush=True)
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=200, help="structures of the first set; half of it in the others")
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if the ratio of the first set is above {BAR}"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # ASE's own, about GPMin's defaults
    half, everybody = options.number // 2, list(OPTIMIZERS)
    runs = {
        "Random EMT alloys, 2–32 atoms, rattle 0.05–0.3 Å": (sets.alloys(options.number, 9001), lambda a: a, everybody),
        "The same with free cell, strain ±3 % (FrechetCellFilter)": (
            sets.strained_alloys(half, 9002),
            FrechetCellFilter,
            [name for name in everybody if name != "GPMin"],
        ),
        "Slabs with an adsorbate": (sets.slabs(half, 9003), lambda a: a, everybody),
        "Random clusters, 6–20 atoms": (sets.clusters(half, 9004), lambda a: a, everybody),
    }
    measured = {title: measure(*run) for title, run in runs.items()}
    ratios = [show(title, results) for title, results in measured.items()]
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    failures = sum(results["relaxion"]["failures"] for results in measured.values())
    return int(options.check and (ratios[0] > BAR or failures > 0))


if __name__ == "__main__":
    sys.exit(main())
