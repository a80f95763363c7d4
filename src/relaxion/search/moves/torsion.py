"""A part of a molecule turns about a bond that joins it to the rest."""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from scipy.spatial.transform import Rotation

from relaxion.search.geometry import placed

BOND = 1.25  # sums of covalent radii
NONMETALS = frozenset((1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 52, 53))
SMALLEST = 0.5  # rad


def torsion(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """None where no bond is outside a ring and has more than an end on both sides."""
    sides = rotatable(atoms)
    may_move = set(free.tolist())
    sides = [side for side in sides if may_move.issuperset(side[2])]
    if not sides:
        return None
    still, turned, part = sides[int(random.integers(len(sides)))]
    positions = atoms.get_positions()
    axis = positions[turned] - positions[still]
    angle = random.uniform(SMALLEST, 2 * np.pi - SMALLEST)
    turn = Rotation.from_rotvec(angle * axis / np.linalg.norm(axis))
    positions[part] = turn.apply(positions[part] - positions[still]) + positions[still]
    return placed(atoms, positions)


def has_torsions(atoms: Atoms) -> bool:
    """Whether this is a molecule of nonmetals that can turn about a bond."""
    return not atoms.pbc.any() and NONMETALS.issuperset(atoms.numbers.tolist()) and bool(rotatable(atoms))


def rotatable(atoms: Atoms) -> list[tuple[int, int, list[int]]]:
    """Of each bond that can be turned: the atom that stays, the atom that turns, all atoms on its side."""
    bonds = _bonds(atoms)
    found = []
    for first in range(len(atoms)):
        for second in bonds[first]:
            side = _side(bonds, first, second)
            # the smaller side turns; None: the bond closes a ring
            if side is None or not 2 <= len(side) <= len(atoms) / 2 or len(bonds[first]) < 2:
                continue
            found.append((first, second, side))
    return found


def _bonds(atoms: Atoms) -> list[list[int]]:
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances()
    near = distances < BOND * (radii[:, None] + radii[None, :])
    np.fill_diagonal(near, val=False)
    return [np.flatnonzero(row).tolist() for row in near]


def _side(bonds: list[list[int]], still: int, turned: int) -> list[int] | None:
    """Atoms reached from `turned` without the bond to `still`; None where they lead back to it."""
    seen = {turned}
    waiting = [turned]
    while waiting:
        atom = waiting.pop()
        for other in bonds[atom]:
            if other == still and atom != turned:
                return None
            if other != still and other not in seen:
                seen.add(other)
                waiting.append(other)
    return sorted(seen)
