"""The structures of a file that the universal policy never saw, by the rule of `train/data/dataset.py`.

    python benchmarks/relaxation/held_apart.py MP_20_FILE /tmp/mp.extxyz --most-atoms 16 --number 40
    relaxion bench /tmp/mp.extxyz --calc chgnet --perturb rattle:0.12

Elements that were held out as a whole are left out unless --elements asks for them and nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase.io import write

from relaxion.train.data.dataset import ELEMENTS
from relaxion.train.data.kinds import KindSettings, file_structures

SEED = 9000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--most-atoms", type=int, default=16)
    parser.add_argument("--elements", action="store_true", help="only structures with an element never trained on")
    given = parser.parse_args()
    kind = KindSettings(
        make="file",
        files=(str(given.file),),
        engine="chgnet",
        number=1,
        smallest_n_atoms=2,
        largest_n_atoms=given.most_atoms,
    )
    unseen = [
        atoms
        for atoms in file_structures(kind, "assessment")
        if bool(ELEMENTS & set(atoms.get_chemical_symbols())) == given.elements
    ]
    chosen = np.random.default_rng(SEED).permutation(len(unseen))[: given.number]
    images = [unseen[place].copy() for place in sorted(chosen)]
    for atoms in images:
        atoms.info, atoms.calc = {}, None
    write(given.out, images)
    print(f"{len(images)} of {len(unseen)} unseen structures -> {given.out}")


if __name__ == "__main__":
    main()
