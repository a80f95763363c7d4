"""How policies do on fresh starts of every kind that `metals` can be taught: for choices, never for results.

    python benchmarks/relaxation/new_kinds.py metals my-policy.safetensors [--number 40]     # about a minute each

Every policy and the classical core relax the same starts of each kind, with EMT and with EAM, to 0.05 eV/Å (seed 8200;
at most 200 force calls). Printed: mean calls, and the geometric mean of the last policy's calls over the first one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from ase import Atoms
from own_kinds import MOST_CALLS, calls

from relaxion.potentials.base import Potential
from relaxion.train.data.starts import KINDS, MetalStarts
from relaxion.train.supervised.sources import MetalsSettings
from relaxion.train.tasks.settings import find, settings_from_recipe
from relaxion.train.tasks.stiffness import StiffnessRunSettings

SEED = 8200


@dataclass(frozen=True)
class Kind:
    """Starts of one kind, and whether their cells are free."""

    name: str
    potential: Potential
    begun: list[tuple[Atoms, bool]]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.potential.name}"


def all_kinds(number: int, only: Collection[str] | None = None) -> Iterator[Kind]:
    """So many starts of each kind, with EMT and with EAM."""
    settings = settings_from_recipe(find("metals"), None, {"metal_starts": "+".join(KINDS)})
    assert isinstance(settings, StiffnessRunSettings)
    assert isinstance(settings.fit, MetalsSettings)
    for place, source in enumerate(settings.fit.sources()):
        assert isinstance(source.starts, MetalStarts)
        [name] = source.starts.shares
        if not only or name in only:
            made = source.starts.sample(torch.Generator().manual_seed(SEED + place), number)
            yield Kind(name, source.potential, list(zip(made.to_ase(), made.cell_free.tolist(), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policies", nargs="+", help="names or files")
    parser.add_argument("--number", type=int, default=40, help="starts of each kind")
    parser.add_argument("--kinds", nargs="+", help="only these")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| kind | atoms | core | {' | '.join(given.policies)} | last of first | not converged |")
    print("|---" * (5 + len(given.policies)) + "|")
    for kind in all_kinds(given.number, given.kinds):
        taken = [calls(policy, kind.begun, kind.potential) for policy in (None, *given.policies)]
        ratio = np.exp(np.log(taken[-1] / taken[1]).mean())
        means = " | ".join(f"{own.mean():.1f}" for own in taken)
        failed = ", ".join(str(int((own == MOST_CALLS).sum())) for own in taken)
        size = np.mean([len(atoms) for atoms, _ in kind.begun])
        print(f"| {kind.title} | {size:.0f} | {means} | {ratio:.2f} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
