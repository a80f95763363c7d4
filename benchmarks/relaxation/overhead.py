"""What an optimizer takes for itself per step, beside the force call, and how that grows with the number of atoms.

    OMP_NUM_THREADS=1 python benchmarks/relaxation/overhead.py [--policy auto] [--with BFGS,LBFGS] [--sizes 8,64,...]

Rattled fcc Cu–Au cells, EMT (batched). Processor time of the calculator is subtracted, step by step; the median of the
steps is shown. BFGS diagonalises a dense matrix of (3 n_atoms)² at every step: at 4 096 atoms that is 1.2 GB
and, by the cube, five minutes per step, at 10 000 atoms 7 GB and more than an hour; so it stops at 512 atoms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk

import relaxion
from relaxion.train.judge.runs import (
    Contestant,
    RelaxationTask,
    Stage,
    classical_contestants,
    our_contestants,
    policy_argument,
)

CELLS = {8: (2, 1, 1), 64: (4, 2, 2), 512: (8, 4, 4), 4096: (16, 8, 8), 10_000: (25, 10, 10)}  # of 4 atoms
LARGEST = {"BFGS": 512}  # atoms
STEPS = {8: 15, 64: 15, 512: 10, 4096: 5, 10_000: 5}
SEED = 9100


def crystal(size: int) -> Atoms:
    generator = np.random.default_rng([SEED, size])
    atoms = bulk("Cu", a=3.75, cubic=True) * CELLS[size]
    atoms.symbols[generator.random(size) < 0.3] = "Au"
    atoms.positions += generator.normal(0, 0.1, atoms.positions.shape)
    return atoms


def seconds_per_step(contestant: Contestant, size: int) -> float:
    """Median over the steps, the calculator's time subtracted."""
    task = RelaxationTask(crystal(size), relaxion.potential("emt"), fmax=1e-9, steps=STEPS[size], free_cell=False)
    stage = Stage(task, on_call=lambda *_: None)
    taken, before = [], (time.process_time(), stage.counter.busy_seconds)
    with contestant.build(stage.target) as optimizer:
        for _ in optimizer.irun(fmax=task.fmax, steps=task.steps):
            now = (time.process_time(), stage.counter.busy_seconds)
            taken.append((now[0] - before[0]) - (now[1] - before[1]))
            before = (time.process_time(), stage.counter.busy_seconds)
    return float(np.median(taken[1:]))  # the first yield comes before any step


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Of the number of atoms, fitted to all sizes from 512 on; below, a constant part rules."""
    large = [place for place, size in enumerate(sizes) if size >= 512]
    return float(np.polyfit(np.log([sizes[p] for p in large]), np.log([seconds[p] for p in large]), 1)[0])


def measure(contestants: list[Contestant], sizes: list[int], repeats: int) -> dict[str, dict[int, float]]:
    """In turn, so that other work on the machine meets all alike; the quickest of the repeats stands."""
    found: dict[str, dict[int, float]] = {contestant.name: {} for contestant in contestants}
    for size in sizes:
        for _ in range(repeats):
            for contestant in contestants:
                if size <= LARGEST.get(contestant.name, size):
                    seconds = seconds_per_step(contestant, size)
                    best = found[contestant.name].get(size, np.inf)
                    found[contestant.name][size] = min(seconds, best)
                    print(f"{contestant.name}, {size} atoms: {1000 * seconds:.3g} ms", file=sys.stderr, flush=True)
    return found


def show(found: dict[str, dict[int, float]], sizes: list[int]) -> None:
    print("| optimizer, ms per step | " + " | ".join(f"{size} atoms" for size in sizes) + " | exponent from 512 on |")
    print("|---" * (len(sizes) + 2) + "|")
    for name, row in found.items():
        cells = [f"{1000 * row[size]:.3g}" if size in row else "–" for size in sizes]
        large = [size for size in row if size >= 512]
        growth = f"{exponent(list(row), list(row.values())):.2f}" if len(large) > 1 else "–"
        print(f"| {name} | {' | '.join(cells)} | {growth} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="auto", help="of ours; none: the classical core alone")
    parser.add_argument("--with", dest="others", default="BFGS,LBFGS", help="ASE's optimizers beside ours")
    parser.add_argument("--sizes", default=",".join(map(str, CELLS)), help=f"of {list(CELLS)}")
    parser.add_argument("--repeats", type=int, default=3, help="the quickest stands")
    parser.add_argument("--json", type=Path, help="write all numbers here too, seconds")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    others = classical_contestants(options.others, without_gpmin=False, free_cell=False)
    found = measure([*our_contestants(policy_argument(options.policy)), *others], sizes, options.repeats)
    show(found, sizes)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
