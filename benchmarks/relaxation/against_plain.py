"""The classical core beside plain curvature-scaled L-BFGS, on many starts of every cheap set (requirement R11.3).

    python benchmarks/relaxation/against_plain.py [--seed 8151] [--number 300]       # two minutes

Both are the core, one without its springs. Printed: mean force calls to 0.05 eV/Å of both, their ratio with its 95 %
interval, and how often the core ends lower or higher by more than 1 meV per atom.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from relaxion.apps.comparison import find_set
from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM, resampled

SETS = ("emt-bulk", "emt-large", "emt-bulk-cell", "emt-slabs", "emt-clusters", "mixed", "alfe", "alfe-cell", "lj38")
LARGE = {"emt-large": 5, "alfe-cell": 5, "lj38": 5}  # so many times fewer starts
CAP = 500


def relaxed(name: str, number: int, seed: int, *, springs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Force calls and energies per atom; a failure counts the most calls allowed."""
    own = find_set(name)
    settings = ClassicalSettings(use_springs=springs)
    batch = BatchRelaxer(
        own.make_potential(), BatchSettings(max_force_calls=CAP), lambda _: ("core", new_stepper(settings))
    )
    for place, atoms in enumerate(own.starts(number, seed)):
        batch.add(atoms, cell=own.free_cell, tag=place)
    calls, energies = np.full(number, float(CAP)), np.full(number, np.nan)
    while batch.n_running or batch.has_finished:
        for one in batch.advance():
            if one.converged and one.energy_ev is not None:
                calls[one.tag], energies[one.tag] = one.force_calls, one.energy_ev / len(one.atoms)
    return calls, energies


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=8151)
    parser.add_argument("--number", type=int, default=300, help="starts of a set; a fifth of the expensive ones")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| set | n | core | plain | core over plain | ends lower | higher | failures |")
    print("|---|---|---|---|---|---|---|---|")
    for name in SETS:
        number = given.number // LARGE.get(name, 1)
        (core, low), (plain, high) = (relaxed(name, number, given.seed, springs=springs) for springs in (True, False))
        gaps = low - high
        below, above = ((sign * gaps > SAME_MINIMUM_EV_PER_ATOM).mean() for sign in (-1, 1))
        failed = f"{int((core == CAP).sum())}, {int((plain == CAP).sum())}"
        ratio = resampled(core, plain)
        print(
            f"| `{name}` | {number} | {core.mean():.1f} | {plain.mean():.1f} | **{ratio.value:.2f}** "
            f"({ratio.low:.2f}–{ratio.high:.2f}) | {below:.0%} | {above:.0%} | {failed} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
