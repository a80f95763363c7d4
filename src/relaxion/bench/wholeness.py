"""Whether a structure is still one piece. Where atoms have flown apart forces vanish too; that is no relaxation."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.neighborlist import natural_cutoffs, neighbor_list
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

LINK = 3  # sums of covalent radii; generous: even Lennard-Jones "hydrogens" sit at 1.8, loose packings below 2.5


def pieces(atoms: Atoms) -> int:
    """Groups of atoms that are linked; 1 for a crystal, which has nowhere to fly to."""
    if atoms.pbc.all():
        return 1
    first, second = neighbor_list("ij", atoms, natural_cutoffs(atoms, mult=LINK))
    links = coo_array((np.ones(len(first)), (first, second)), shape=(len(atoms), len(atoms)))
    return int(connected_components(links, directed=False, return_labels=False))


def fell_apart(start: Atoms, end: Atoms) -> str | None:
    """A sentence if one piece has become several."""
    now = pieces(end)
    return f"the structure fell apart into {now} pieces" if now > 1 and pieces(start) == 1 else None
