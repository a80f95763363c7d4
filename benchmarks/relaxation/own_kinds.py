"""How a policy does on fresh starts of the kinds that `universal` is taught: for choices, never for results.

    python benchmarks/relaxation/own_kinds.py universal my-policy.safetensors [--number 8]     # a minute or two each

Every policy and the classical core relax the same starts with CHGNet, to 0.05 eV/Å (seed 8400; at most 200 force
calls). Printed: mean calls, and the geometric mean and 95th percentile of calls over the core's.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from ase import Atoms

from relaxion.collecting.settings import CollectSettings
from relaxion.collecting.starts import file_structures
from relaxion.optimize.batch import relax_batch
from relaxion.potentials import potential
from relaxion.potentials.potential import Potential
from relaxion.training.kind_lessons import KindStarts
from relaxion.training.recipe import find, read_toml

SEED = 8400
FMAX, MOST_CALLS = 0.05, 200
ENGINE = "chgnet"


def starts(chgnet: Potential, number: int) -> list[tuple[Atoms, bool]]:
    """So many of each kind at hand, and whether their cell is free."""
    collection = CollectSettings.of(read_toml(find("universal-data")), {})
    kinds = {
        name: kind
        for name, kind in collection.kinds.items()
        if kind.share and kind.engine == ENGINE and (kind.make != "file" or file_structures(kind, collection.side))
    }
    found: list[tuple[Atoms, bool]] = []
    for place, name in enumerate(kinds):
        generator = torch.Generator().manual_seed(SEED + place)
        made = KindStarts(collection, name, chgnet).sample(generator, number)
        found += zip(made.to_ase(), made.cell_free.tolist(), strict=True)
    return found


def calls(policy: str | None, begun: list[tuple[Atoms, bool]], chgnet: Potential) -> np.ndarray:
    """Force calls from every start; the most allowed where it did not converge."""
    taken = np.zeros(len(begun))
    for free in (False, True):
        places = [place for place, (_, cell) in enumerate(begun) if cell == free]
        atoms = [begun[place][0] for place in places]
        relaxed = relax_batch(atoms, chgnet, policy, FMAX, free, MOST_CALLS, allow_unseen=True)
        taken[places] = [one.force_calls if one.converged else MOST_CALLS for one in relaxed]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policies", nargs="+", help="names or files")
    parser.add_argument("--number", type=int, default=8, help="starts of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chgnet = potential(ENGINE)
    begun = starts(chgnet, given.number)
    core = calls(None, begun, chgnet)
    print(
        f"| {len(begun)} starts | mean calls | of the core's | 95th percentile | not converged |\n|---|---|---|---|---|"
    )
    for name, own in [("core", core), *((name, calls(name, begun, chgnet)) for name in given.policies)]:
        ratios, failed = own / core, int((own == MOST_CALLS).sum())
        geometric, high = np.exp(np.log(ratios).mean()), np.quantile(ratios, 0.95)
        print(f"| {name} | {own.mean():.1f} | {geometric:.2f} | {high:.2f} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
