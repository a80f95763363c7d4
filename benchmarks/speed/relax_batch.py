"""Throughput of `relaxion.relax_batch` against ASE's BFGS one by one, the same starts, one core.

    OMP_NUM_THREADS=1 python benchmarks/speed/relax_batch.py [--number 1000] [--seed 9000] [--batch-size 128]

The set is emt-bulk (random fcc alloys of 4 to 32 atoms), to 0.05 eV/Å. BFGS runs on ASE's own EMT calculator, without a
log; ours on our EMT, which agrees with it. Half of the structures go to BFGS before ours and half after, so that what
else the machine does hits both. Processor time; making the structures and loading packages are not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.emt import EMT
from ase.optimize import BFGS

from relaxion import potential, relax_batch
from relaxion.apps.comparison import find_set
from relaxion.batch import BATCH_SIZE

FMAX = 0.05  # eV/Å


def by_bfgs(starts: Sequence[Atoms]) -> list[int]:
    calls = []
    for start in starts:
        atoms = start.copy()
        atoms.calc = EMT()
        with BFGS(atoms, logfile=None) as optimizer:
            optimizer.run(fmax=FMAX, steps=500)
            calls.append(optimizer.nsteps + 1)
    return calls


def by_us(starts: Sequence[Atoms], policy: str | None, batch_size: int) -> list[int]:
    found = relax_batch(starts, potential("emt"), policy=policy, fmax=FMAX, batch_size=batch_size)
    assert all(relaxed.converged for relaxed in found)
    return [relaxed.force_calls for relaxed in found]


def timed(work: Callable[[], list[int]]) -> tuple[float, list[int]]:
    began = time.process_time()
    calls = work()
    return time.process_time() - began, calls


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    starts = find_set("emt-bulk").starts(arguments.number, arguments.seed)
    half = len(starts) // 2
    by_us(starts[:4], "metals", 4)  # loads what is loaded once
    by_bfgs(starts[:1])
    first = timed(lambda: by_bfgs(starts[:half]))
    ours = {
        name: timed(lambda policy=policy: by_us(starts, policy, arguments.batch_size))
        for name, policy in (("core", None), ("metals", "metals"))
    }
    second = timed(lambda: by_bfgs(starts[half:]))
    times = {"BFGS": (first[0] + second[0], first[1] + second[1]), **ours}
    return {
        name: {
            "milliseconds_per_structure": round(1000 * seconds / len(starts), 2),
            "force_calls": round(float(np.mean(calls)), 2),
            "times_the_throughput_of_bfgs": round(times["BFGS"][0] / seconds, 2),
        }
        for name, (seconds, calls) in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(arguments)
    print(f"| {arguments.number} EMT alloys, one core | ms per structure | force calls | throughput of BFGS |")
    print("|---|---|---|---|")
    for name, row in found.items():
        print("| " + " | ".join([name, *(str(value) for value in row.values())]) + " |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
