"""Force calls under controlled noise on EMT: what errors of DFT cost our optimizers and BFGS.

python benchmarks/noise/run.py [--number 8]      # about two minutes
"""

from __future__ import annotations

import argparse

import numpy as np
from ase.optimize import BFGS
from noisy import Noise, Noisy

from relaxion.apps.comparison import find_set, run_ase_optimizer, run_relaxer
from relaxion.optimizer import classical as quasi_newton
from relaxion.potentials import Emt
from relaxion.train.judge.runs import PolicyChoice, RelaxationTask

FMAX = 0.01  # eV/Å
MOST_CALLS = 200
NOISES = {
    "none": Noise(),
    "forces 1e-3 eV/Å": Noise(force=1e-3, stress=1e-5),
    "and energies 1e-4 eV": Noise(force=1e-3, stress=1e-5, energy=1e-4),
    "and energies 1e-3 eV": Noise(force=1e-3, stress=1e-5, energy=1e-3),
    "and energies 1e-2 eV": Noise(force=1e-3, stress=1e-5, energy=1e-2),
    "and jumps of 1e-2 eV under strain": Noise(force=1e-3, stress=1e-5, energy=1e-4, jump=1e-2),
    "and jumps of 1e-1 eV under strain": Noise(force=1e-3, stress=1e-5, energy=1e-4, jump=1e-1),
}


def measured(name: str, noise: Noise, method: str, number: int) -> tuple[float, int, int]:
    """Mean force calls, rejected points and relaxations that did not end."""
    calls, rejected, failed = [], 0, 0
    chosen = find_set(name)
    for seed, start in enumerate(chosen.starts(number, 9000)):
        task = RelaxationTask(start, Noisy(Emt(), noise, seed), FMAX, MOST_CALLS, chosen.free_cell)
        if method == "BFGS":
            run = run_ase_optimizer(BFGS, task, lambda *_: None)
        else:
            choice = PolicyChoice.of(method, start, allow_unseen=False)
            run = run_relaxer(task, choice, None, None, lambda *_: None)
        calls.append(run.force_calls)
        failed += not run.converged
        rejected += sum(not reading.accepted for reading in run.readings)
    return float(np.mean(calls)), rejected, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=8)
    parser.add_argument("--sets", nargs="+", default=["emt-bulk-cell", "emt-slabs", "emt-clusters"])
    parser.add_argument("--noises", nargs="+", default=list(NOISES), choices=list(NOISES), metavar="WORDS")
    parser.add_argument("--methods", nargs="+", default=["auto", "none", "BFGS"])
    parser.add_argument(
        "--certain", type=float, default=quasi_newton.CERTAIN_CHANGE, help="eV; 0: believe all energies"
    )
    arguments = parser.parse_args()
    quasi_newton.CERTAIN_CHANGE = arguments.certain
    print("| set | noise | method | mean force calls | rejected points | not converged |\n" + "|---" * 6 + "|")
    for name in arguments.sets:
        for words in arguments.noises:
            for method in arguments.methods:
                calls, rejected, failed = measured(name, NOISES[words], method, arguments.number)
                print(f"| {name} | {words} | {method} | {calls:.1f} | {rejected} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
