"""Kinds of moves: each takes a minimum to a trial structure, which is then relaxed.

A kind is a function `move(atoms, free, random)`. `atoms`: a minimum, not to be changed. `free`: numbers of the atoms
that may move. `random`: NumPy's generator, the only source of chance. It returns a new structure with the same atoms in
the same order, or None where it finds nothing to do. A kind of your own is named by `module:function`.

The first part is what moves ask about a structure: free atoms, bond lengths, neighbours, fragments. Lengths are
compared with the sum of two covalent radii times one factor per structure, the bond scale. With it the same rules hold
for metals, for molecules and for Lennard-Jones clusters in reduced units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.geometry import find_mic
from scipy.spatial.transform import Rotation

from relaxion.errors import SettingsError
from relaxion.settings import by_name, nearest

BONDED = 1.35  # bonds; nearest neighbours lie below it, second neighbours of close packings at 1.41
CONNECTED = 1.7  # bonds; an atom farther away than this from all others has left the structure
NEAREST = 0.6  # bonds; no trial has two atoms nearer than this
CROWDING_REACH = 0.6  # bonds; how fast the weight of a neighbour falls with its distance
ELEMENT_WEIGHT = 0.618  # by which neighbours of the next element count more, so that elements differ
IN_BOND_GRAPH = 1.3  # bonds; a trial after a swap has the bond graph of its minimum 6 times out of 7
SAME_LOOK = 0.01  # of the largest crowding; equal minima, relaxed twice, differ by half of it, different swaps by twice


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances of one structure; `vectors[i, j]` leads from atom i to the nearest image of atom j."""

    vectors: np.ndarray  # (n_atoms, n_atoms, 3) Å
    distances: np.ndarray  # (n_atoms, n_atoms) Å, infinite on the diagonal
    bonds: np.ndarray  # (n_atoms, n_atoms) Å, usual bond lengths in this structure
    scale: float  # usual bond length over the sum of covalent radii

    @classmethod
    def of(cls, atoms: Atoms, scale: float | None = None) -> Distances:
        """`scale`: of a structure measured before; None measures it here."""
        vectors, distances = _separations(atoms)
        radii = covalent_radii[atoms.numbers]
        sums = radii[:, None] + radii[None, :]
        if scale is None:
            nearest = (distances / sums).min(axis=1)
            scale = float(np.median(nearest)) if len(atoms) > 1 else 1.0
        return cls(vectors, distances, scale * sums, scale)

    @property
    def coordination(self) -> np.ndarray:
        """(n_atoms,) number of bonded neighbours."""
        return (self.distances < BONDED * self.bonds).sum(axis=1)

    @property
    def too_close(self) -> bool:
        return bool((self.distances < NEAREST * self.bonds).any())

    def look(self, numbers: np.ndarray) -> np.ndarray:
        """(n_atoms,) how crowded each atom is, sorted by element.

        Rotations, mirror images and the order of the atoms change nothing.
        """
        weights = 1 + ELEMENT_WEIGHT * np.unique(numbers, return_inverse=True)[1]
        crowding = np.exp(-self.distances / (CROWDING_REACH * self.bonds)) @ weights
        return crowding[np.lexsort((crowding, numbers))]

    def bond_graph(self, numbers: np.ndarray) -> bytes:
        """A digest of who is bonded to whom: equal for equal graphs of elements, after three rounds of refinement.

        Rotations, mirror images and the order of the atoms change nothing. Of no use where images of atoms matter.
        """
        bonded = self.distances < IN_BOND_GRAPH * self.bonds
        colours = [f"{number}" for number in numbers.tolist()]
        for _ in range(3):
            words = [
                f"{own}({' '.join(sorted(colours[j] for j in np.flatnonzero(row)))})"
                for own, row in zip(colours, bonded, strict=True)
            ]
            colours = [hashlib.blake2b(word.encode(), digest_size=8).hexdigest() for word in words]
        return hashlib.blake2b(" ".join(sorted(colours)).encode(), digest_size=16).digest()

    @property
    def n_fragments(self) -> int:
        """Connected pieces."""
        near = self.distances < CONNECTED * self.bonds
        left = set(range(len(near)))
        pieces = 0
        while left:
            pieces += 1
            waiting = [left.pop()]
            while waiting:
                found = left.intersection(np.flatnonzero(near[waiting.pop()]).tolist())
                left -= found
                waiting.extend(found)
        return pieces


def _separations(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    vectors = atoms.positions[None, :, :] - atoms.positions[:, None, :]
    if atoms.pbc.any():
        flat, lengths = find_mic(vectors.reshape(-1, 3), atoms.cell, atoms.pbc)  # pyright: ignore[reportArgumentType]
        vectors = flat.reshape(vectors.shape)
        distances = lengths.reshape(vectors.shape[:2])
    else:
        distances = np.linalg.norm(vectors, axis=2)
    distances = distances.copy()
    np.fill_diagonal(distances, np.inf)
    return vectors, distances


def alike(look: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Whether a look is that of one of the other structures."""
    if not len(others):
        return False
    return bool((np.abs(np.array(others) - look).max(axis=1) < SAME_LOOK * np.abs(look).max()).any())


def free_atoms(atoms: Atoms) -> np.ndarray:
    """Numbers of the atoms that constraints let move along every axis; hops move only these."""
    free = np.ones(len(atoms), dtype=bool)
    for axis in np.eye(3):
        moved = atoms.positions + 0.01 * axis
        for constraint in atoms.constraints:
            if hasattr(constraint, "adjust_positions"):
                constraint.adjust_positions(atoms, moved)
        free &= np.abs(moved - atoms.positions) @ axis > 1e-6
    return np.flatnonzero(free)


def placed(atoms: Atoms, positions: np.ndarray) -> Atoms:
    """A copy with these positions (Å), as far as the constraints allow."""
    moved = atoms.copy()
    moved.calc = None
    moved.set_positions(positions)
    return moved


def random_rotation_axis(random: np.random.Generator) -> np.ndarray:
    """A unit vector, uniform over the sphere."""
    vector = random.normal(size=3)
    return vector / np.linalg.norm(vector)


Move: TypeAlias = Callable[[Atoms, np.ndarray, np.random.Generator], Atoms | None]

FEWEST_PERMUTED = 3
MOST_PERMUTED = 6
PLACES_TRIED = 40
LOOSENESS = 2.0  # neighbours; an atom with two neighbours less is chosen e times as often
ROOM = 0.85  # bonds; a place with an atom nearer than this is taken
SMALLEST_TWIST = 0.3  # rad
RATTLE_WIDTH = 0.16  # bonds, along each axis: 0.4 Å in copper
LARGEST_STRAIN = 0.2  # of a component of the strain
STRAIN_RATTLE = 0.05  # Å, so that symmetry does not hold the atoms
BOND_REACH = 1.25  # sums of covalent radii
NONMETALS = frozenset((1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 52, 53))
SMALLEST_TORSION = 0.5  # rad


def swap(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """Two atoms of different elements change places: the order of the elements, on the same skeleton.

    None where all free atoms are of one element.
    """
    if len(free) < 2:
        return None
    first = int(free[random.integers(len(free))])
    others = free[atoms.numbers[free] != atoms.numbers[first]]
    if not len(others):
        return None
    second = int(others[random.integers(len(others))])
    positions = atoms.get_positions()
    positions[[first, second]] = positions[[second, first]]
    return placed(atoms, positions)


def permute(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """Three to six atoms change places at once: what single swaps would have to go uphill for.

    None where fewer than three atoms are free, or the draw leaves every element where it was.
    """
    if len(free) < FEWEST_PERMUTED:
        return None
    number = int(random.integers(FEWEST_PERMUTED, min(MOST_PERMUTED, len(free)) + 1))
    chosen = random.choice(free, number, replace=False)
    order = random.permutation(chosen)
    if np.array_equal(atoms.numbers[chosen], atoms.numbers[order]):
        return None
    positions = atoms.get_positions()
    positions[chosen] = positions[order]
    return placed(atoms, positions)


def relocate(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """A weakly bound atom leaves its place for another one, where it touches three others: hollows of a surface.

    None where no place with room is found, as inside a dense crystal.
    """
    if not len(free) or len(atoms) < 4:
        return None
    geometry = Distances.of(atoms)
    weights = np.exp(-geometry.coordination[free] / LOOSENESS)
    mover = int(random.choice(free, p=weights / weights.sum()))
    for anchor, place in zip(*_places(geometry, mover, random), strict=True):
        if _has_room(atoms, geometry, mover, int(anchor), place):
            positions = atoms.get_positions()
            positions[mover] = positions[anchor] + place
            return placed(atoms, positions)
    return None


def _places(geometry: Distances, mover: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Atoms, and from each of them the way to a point one bond away from it and from two of its neighbours, Å."""
    bonded = geometry.distances < BONDED * geometry.bonds
    bonded[:, mover] = False
    anchors = random.integers(len(bonded) - 1, size=PLACES_TRIED)
    anchors += anchors >= mover
    anchors = anchors[bonded[anchors].sum(axis=1) >= 2]
    lots = np.where(bonded[anchors], random.random((len(anchors), len(bonded))), 2.0)
    pairs = np.argsort(lots, axis=1)[:, :2]
    first = geometry.vectors[anchors, pairs[:, 0]]
    second = geometry.vectors[anchors, pairs[:, 1]]
    normal = np.cross(first, second)
    square = (normal**2).sum(axis=1)
    # the place is a·first + b·second ± height·normal; its products with both follow from the three distances
    to_anchor = geometry.bonds[mover, anchors] ** 2
    own = (first**2).sum(axis=1)
    other = (second**2).sum(axis=1)
    both = (first * second).sum(axis=1)
    along_first = (to_anchor - geometry.bonds[mover, pairs[:, 0]] ** 2 + own) / 2
    along_second = (to_anchor - geometry.bonds[mover, pairs[:, 1]] ** 2 + other) / 2
    safe = np.maximum(square, 1e-6)
    of_first = (along_first * other - along_second * both) / safe
    of_second = (along_second * own - along_first * both) / safe
    in_plane = of_first[:, None] * first + of_second[:, None] * second
    height_square = to_anchor - (in_plane**2).sum(axis=1)
    fits = (square > 1e-6) & (height_square > 0)
    heights = np.sqrt(height_square[fits] / square[fits]) * random.choice((-1.0, 1.0), fits.sum())
    return anchors[fits], in_plane[fits] + heights[:, None] * normal[fits]


def _has_room(atoms: Atoms, geometry: Distances, mover: int, anchor: int, place: np.ndarray) -> bool:
    """Whether no other atom is near, and the place is not the one that was left."""
    to_others = geometry.vectors[anchor] - place
    if atoms.pbc.any():
        to_others = find_mic(to_others, atoms.cell, atoms.pbc)[0]  # pyright: ignore[reportArgumentType]
    distances = np.linalg.norm(to_others, axis=1)
    return bool((distances > ROOM * geometry.bonds[mover]).all())


def twist(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """One half of a cluster is turned against the other, about the normal of the cut.

    None for periodic structures, which have no halves, and where fixed atoms hold the structure.
    """
    if atoms.pbc.any() or len(free) < len(atoms) or len(atoms) < 4:
        return None
    axis = random_rotation_axis(random)
    positions = atoms.get_positions()
    centre = positions.mean(axis=0)
    heights = (positions - centre) @ axis
    cut = random.uniform(*np.quantile(heights, [0.25, 0.75]))
    upper = heights > cut
    if not 0 < upper.sum() < len(atoms):
        return None
    angle = random.uniform(SMALLEST_TWIST, 2 * np.pi - SMALLEST_TWIST)
    turn = Rotation.from_rotvec(angle * axis)
    positions[upper] = turn.apply(positions[upper] - centre) + centre
    return placed(atoms, positions)


def slip(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """One part of a crystal slides over the other, along a lattice plane.

    None where the structure is not periodic along all axes, or an atom is fixed.
    """
    if not atoms.pbc.all() or len(free) < len(atoms) or len(atoms) < 2:
        return None
    axis = int(random.integers(3))
    fractions = atoms.get_scaled_positions()
    low, high = np.sort(random.uniform(size=2))
    chosen = (fractions[:, axis] > low) & (fractions[:, axis] <= high)
    if not 0 < chosen.sum() < len(atoms):
        return None
    shift = random.uniform(size=3)
    shift[axis] = 0.0
    positions = atoms.get_positions()
    positions[chosen] += shift @ atoms.cell.array
    return placed(atoms, positions)


def rattle(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """All free atoms by a Gaussian step: the move of plain basin hopping.

    Every free atom by RATTLE_WIDTH of a bond along each axis.
    """
    if not len(free):
        return None
    bond = float(np.median(Distances.of(atoms).bonds))
    positions = atoms.get_positions()
    positions[free] += random.normal(0, RATTLE_WIDTH * bond, (len(free), 3))
    return placed(atoms, positions)


def strain(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """The cell is stretched and sheared, the atoms with it and a little about their places.

    None where the structure is not periodic along all axes.
    """
    if not atoms.pbc.all():
        return None
    noise = random.uniform(-LARGEST_STRAIN, LARGEST_STRAIN, (3, 3))
    symmetric = (noise + noise.T) / 2
    moved = atoms.copy()
    moved.calc = None
    moved.set_cell(moved.cell.array @ (np.eye(3) + symmetric), scale_atoms=True)
    positions = moved.get_positions()
    positions[free] += random.normal(0, STRAIN_RATTLE, (len(free), 3))
    moved.set_positions(positions)
    return moved


def torsion(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms | None:
    """A part of a molecule turns about a bond that joins it to the rest.

    None where no bond is outside a ring and has more than an end on both sides.
    """
    sides = rotatable(atoms)
    may_move = set(free.tolist())
    sides = [side for side in sides if may_move.issuperset(side[2])]
    if not sides:
        return None
    still, turned, part = sides[int(random.integers(len(sides)))]
    positions = atoms.get_positions()
    axis = positions[turned] - positions[still]
    angle = random.uniform(SMALLEST_TORSION, 2 * np.pi - SMALLEST_TORSION)
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
    near = distances < BOND_REACH * (radii[:, None] + radii[None, :])
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


MOVES: dict[str, Move] = {
    "swap": swap,
    "permute": permute,
    "relocate": relocate,
    "twist": twist,
    "slip": slip,
    "rattle": rattle,
    "strain": strain,
    "torsion": torsion,
}
SEVERAL = "several"  # moves of different kinds in one hop


def move_named(name: str) -> Move:
    """One of ours, or `module:function`."""
    if name in MOVES:
        return MOVES[name]
    if ":" not in name:
        raise SettingsError(f"unknown kind of move '{name}': {nearest(name, MOVES)}, or module:function for your own")
    found = by_name(name, "move")
    if not callable(found):
        raise SettingsError(f"the move '{name}' is a {type(found).__name__}; give a function (atoms, free, random)")
    return cast(Move, found)


def usual_moves(atoms: Atoms, free: Sequence[int] | np.ndarray, *, cell: bool) -> dict[str, float]:
    """Kinds that fit this structure, with the share of each in the fixed mixture (docs/search.md)."""
    several = len(set(atoms.numbers[free].tolist())) > 1
    whole = len(free) == len(atoms)
    if has_torsions(atoms):
        return {"torsion": 0.8, "rattle": 0.2}
    if atoms.pbc.all():
        shares = {"slip": 0.25 if whole else 0.0, "relocate": 0.15, "rattle": 0.2, "strain": 0.15 if cell else 0.0}
        shares["swap"] = 0.4 if several else 0.0
    elif atoms.pbc.any() or not whole:
        shares = {"relocate": 0.6, "rattle": 0.1, "swap": 0.3 if several else 0.0}
    else:
        shares = {"relocate": 0.35, "twist": 0.15, "rattle": 0.0 if several else 0.1, "swap": 0.5 if several else 0.0}
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items() if share}
