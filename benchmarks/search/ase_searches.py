"""ASE's own searches on the systems of a set: `python benchmarks/search/ase_searches.py SET NAME [NAME ...]`.

NAME: BasinHopping+BFGS, BasinHopping+FIRE, MinimaHopping. ASE's defaults but for fmax (0.05 eV/Å), the step (0.4 Å) and
the temperature (0.1 eV, as the others). Same starts, same budget and the same kind of file as `trial.py`, whose table
shows them. Every energy that the calculator returns counts as found at once, which favours ASE.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.emt import EMT
from ase.optimize import BFGS, FIRE
from ase.optimize.basin import BasinHopping
from ase.optimize.minimahopping import MinimaHopping

from relaxion.files import write_json
from relaxion.train.tasks.search import systems


class Spent(Exception):
    """The budget."""


class Counted(EMT):
    """Stops when the budget is spent."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget, self.made = budget, 0
        self.staircase: list[list[float]] = []

    def calculate(self, *values: Any, **options: Any) -> None:
        if self.made >= self.budget:
            raise Spent
        self.made += 1
        super().calculate(*values, **options)
        energy = float(self.results["energy"])
        if not self.staircase or energy < self.staircase[-1][1]:
            self.staircase.append([self.made, energy])


def run(name: str, start: Atoms, calls: int, seed: int) -> list[list[float]]:
    calculator = Counted(calls)
    start.calc = calculator
    np.random.seed(seed)  # noqa: NPY002 - ASE draws from the global generator
    try:
        if name == "MinimaHopping":
            MinimaHopping(start, fmax=0.05)(totalsteps=calls)
        else:
            kind = {"BFGS": BFGS, "FIRE": FIRE}[name.split("+")[1]]
            hopping = BasinHopping(start, temperature=0.1, dr=0.4, optimizer=kind, fmax=0.05, logfile=None)
            hopping.run(calls)
    except Spent:
        pass
    return calculator.staircase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["tuning", "unseen", "large"])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("runs/search/trial"))
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--searches", type=int, default=1)
    parser.add_argument("--seed", type=int, default=9000)
    told = parser.parse_args()
    for name in told.names:
        path = (told.folder / f"{told.set}-ASE {name}-{told.seed}.json").absolute()
        if path.exists():
            continue
        began = time.monotonic()
        records = []
        for number, (label, make_start) in enumerate(systems("metals", told.set).items()):
            for search in range(told.searches):
                start = make_start(np.random.default_rng([told.seed, number, search]))
                with tempfile.TemporaryDirectory() as folder:
                    steps = _inside(Path(folder), name, start, told.calls, 1000 * told.seed % 2**31 + search)
                records.append({"system": label, "atoms": len(start), "staircase": steps})
        plain = {"set": told.set, "arm": f"ASE {name}", "calls": told.calls, "seed": told.seed}
        write_json(path, {**plain, "seconds": time.monotonic() - began, "records": records})


def _inside(folder: Path, name: str, start: Atoms, calls: int, seed: int) -> list[list[float]]:
    """ASE writes its files where it runs."""
    import contextlib

    with contextlib.chdir(folder):
        return run(name, start, calls, seed)


if __name__ == "__main__":
    main()
