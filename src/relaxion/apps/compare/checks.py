"""What is refused, or worth a word, before a structure is relaxed."""

from __future__ import annotations

import math

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from ase.neighborlist import neighbor_list

from relaxion.errors import MissingStressError, StructureError
from relaxion.potentials.base import Potential
from relaxion.structures import Structures
from relaxion.structures.structures import check_atoms
from relaxion.train.data.perturbations import rattle

FOR_FUN = ("H", "C", "N", "O")  # ASE gives EMT parameters for them under the heading "just for fun"
CLOSEST_ANGSTROM = 0.3  # no bond is nearly as short (H2: 0.74 Å); nearer, every potential answers nonsense


def check_structure(atoms: Atoms, potential: Potential, *, free_cell: bool) -> None:
    """Refuse, before any force call, what cannot be relaxed."""
    check_atoms(atoms)
    check_overlaps(atoms)
    potential.check_elements(Structures.from_ase(_without_constraints(atoms)))
    if not free_cell:
        return
    if not atoms.pbc.all():
        raise StructureError(
            f"the structure is periodic along {int(atoms.pbc.sum())} of 3 axes, so it has no cell to relax; "
            "keep the cell fixed"
        )
    if not potential.has_stress:
        raise MissingStressError(
            f"the calculator {potential.name} gives no stress, which a free cell needs; keep the cell fixed, or take "
            "another calculator, such as emt"
        )


def check_overlaps(atoms: Atoms, closest: float = CLOSEST_ANGSTROM) -> None:
    """Refuse atoms (or images of one atom) nearer than `closest`, Å."""
    first, second, distances = neighbor_list("ijd", atoms, closest)
    if len(distances) == 0:
        return
    nearest_pair = int(np.argmin(distances))
    i, j = sorted((int(first[nearest_pair]), int(second[nearest_pair])))
    who = f"atoms {i} and {j} ({atoms.symbols[i]}, {atoms.symbols[j]}) are"
    if i == j:
        who = f"atom {i} ({atoms.symbols[i]}) and its own periodic image are"
    raise StructureError(
        f"{who} {distances[nearest_pair]:.3g} Å apart, below {closest} Å; "
        "remove one of them or correct the positions, the cell or its unit (Å)"
    )


def rattled(atoms: Atoms, size_angstrom: float, seed: int) -> Atoms:
    """Moved at random by `size_angstrom` along each axis; constraints hold. The seed alone decides, not the order."""
    if size_angstrom == 0:
        return atoms
    only_fixed = _without_constraints(atoms)
    only_fixed.set_constraint([c for c in atoms.constraints if isinstance(c, FixAtoms)])
    generator = torch.Generator().manual_seed(seed)
    moved = rattle(Structures.from_ase(only_fixed), generator, size_angstrom=size_angstrom)
    result = atoms.copy()
    result.set_positions(moved.positions.numpy())
    return result


def occupancy_note(atoms: Atoms) -> str | None:
    """ASE reads a partly occupied site as its most frequent element: worth a word."""
    sites = atoms.info.get("occupancy")
    if not isinstance(sites, dict):
        return None
    shared = [site for site, shares in sites.items() if not math.isclose(max(shares.values()), 1.0, abs_tol=1e-3)]
    if not shared:
        return None
    return f"{len(shared)} sites are partly occupied; each was taken as its most frequent element"


def emt_note(atoms: Atoms, calculator: str) -> str | None:
    """EMT answers for light elements too, but nobody should believe it."""
    light = [symbol for symbol in FOR_FUN if symbol in atoms.symbols]
    if calculator != "emt" or not light:
        return None
    return (
        f"EMT is made for metals; its parameters for {', '.join(light)} are not meant for real use (says ASE), so do "
        "not trust the result; 'relaxion calculators' lists others"
    )


def _without_constraints(atoms: Atoms) -> Atoms:
    bare = atoms.copy()
    bare.set_constraint()
    return bare
