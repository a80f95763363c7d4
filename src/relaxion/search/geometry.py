"""What kinds of moves and the list of minima ask about a structure: free atoms, bond lengths, neighbours, fragments.

Lengths are compared with the sum of two covalent radii times one factor per structure, the bond scale. With it the same
rules hold for metals, for molecules and for Lennard-Jones clusters in reduced units.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.geometry import find_mic

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


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two looks are those of one structure."""
    return bool(np.abs(one - other).max() < SAME_LOOK * np.abs(one).max())


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
