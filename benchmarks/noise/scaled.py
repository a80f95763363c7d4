"""Force calls where all energies are a multiple of what the policy learned from: a stiffer or a softer potential.

python benchmarks/noise/scaled.py [--number 8]      # under a minute; seed 8100, which is not of any assessment
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from relaxion.apps.comparison import find_set, run_relaxer
from relaxion.optimizer.safeguard import Safeguard
from relaxion.potentials import Emt, Potential
from relaxion.structures import Evaluation, Structures
from relaxion.train.judge.runs import PolicyChoice, RelaxationTask

FMAX = 0.05  # eV/Å
MOST_CALLS = 300
METHODS = {"auto": 1.5, "auto, never scaled": 1e9, "none": 1.5}  # and the factor from which on the Hessian is scaled


class Scaled(Potential):
    """EMT times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = Emt(), factor
        self.name, self.has_stress = f"{factor:g} times EMT", True

    @property
    def elements(self) -> frozenset[int] | None:
        return self.inner.elements

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        found, factor = self.inner.evaluate(structures, stresses), self.factor
        tensors = None if found.stresses is None else factor * found.stresses
        return replace(found, energies=factor * found.energies, forces=factor * found.forces, stresses=tensors)


def calls(name: str, factor: float, method: str, number: int) -> float:
    """On average; a failure counts as all calls allowed."""
    chosen, found = find_set(name), []
    Safeguard.another_scale = METHODS[method]
    for start in chosen.starts(number, 8100):
        choice = PolicyChoice.of(method.split(",")[0], start, allow_unseen=False)
        task = RelaxationTask(start, Scaled(factor), FMAX, MOST_CALLS, chosen.free_cell)
        run = run_relaxer(task, choice, None, None, lambda *_: None)
        found.append(run.force_calls if run.converged else MOST_CALLS)
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=8)
    parser.add_argument("--sets", nargs="+", default=["emt-bulk", "emt-bulk-cell", "emt-slabs"])
    arguments = parser.parse_args()
    print("| set | times EMT | " + " | ".join(METHODS) + " |\n" + "|---" * (2 + len(METHODS)) + "|")
    for name in arguments.sets:
        for factor in (0.5, 1.0, 2.0, 3.0):
            found = [f"{calls(name, factor, method, arguments.number):.1f}" for method in METHODS]
            print(f"| {name} | {factor:g} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
