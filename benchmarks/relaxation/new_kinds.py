"""How policies do on fresh starts of every kind that `metals` can be taught: for choices, never for results.

    python benchmarks/relaxation/new_kinds.py metals my-policy.safetensors [--number 40]     # about a minute each

Every policy and the classical core relax the same starts of each kind, with EMT and with EAM, to 0.05 eV/Å (seed 8200;
at most 200 force calls). Printed: mean calls, and the geometric mean of the last policy's calls over the first one's.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from own_kinds import MOST_CALLS, calls

from relaxion.generators.starts import KINDS, MetalStarts
from relaxion.training.lessons.metals import MetalsSettings
from relaxion.training.metric import MetricRunSettings
from relaxion.training.recipe import find, settings_from_recipe

SEED = 8200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policies", nargs="+", help="names or files")
    parser.add_argument("--number", type=int, default=40, help="starts of each kind")
    parser.add_argument("--kinds", nargs="+", help="only these")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = settings_from_recipe(find("metals"), None, {f"{kind}_share": 1.0 for kind in KINDS})
    assert isinstance(settings, MetricRunSettings)
    assert isinstance(settings.lessons, MetalsSettings)
    print(f"| kind | atoms | core | {' | '.join(given.policies)} | last of first | not converged |")
    print("|---" * (5 + len(given.policies)) + "|")
    for place, source in enumerate(settings.lessons.sources()):
        assert isinstance(source.starts, MetalStarts)
        [kind] = source.starts.shares
        if given.kinds and kind not in given.kinds:
            continue
        made = source.starts.sample(torch.Generator().manual_seed(SEED + place), given.number)
        begun = list(zip(made.to_ase(), made.cell_free.tolist(), strict=True))
        taken = [calls(policy, begun, source.potential) for policy in (None, *given.policies)]
        ratio = np.exp(np.log(taken[-1] / taken[1]).mean())
        means = " | ".join(f"{own.mean():.1f}" for own in taken)
        failed = ", ".join(str(int((own == MOST_CALLS).sum())) for own in taken)
        size = float(made.counts.double().mean())
        print(f"| {kind}, {source.potential.name} | {size:.0f} | {means} | {ratio:.2f} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
