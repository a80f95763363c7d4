"""Which atoms are bonded by valence, and the bends, torsions and so on that follow. Decided once, and again only when
bonds change.

Non-metals within 1.3 sums of covalent radii are bonded, and so is a metal that has nothing but non-metals around it
(Cr(CO)₆). Pieces that repeat along two or three directions (diamond, graphite, quartz) are no molecules, nor are heaps
of hydrogen; they keep springs, as metals do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from ase import Atoms
from numpy.typing import NDArray

from relaxion.optimizer.hessian.springs import Bonds, bonds_of
from relaxion.optimizer.point import Array, Geometry, geometry_of

Indices = NDArray[np.int64]

NON_METALS = np.zeros(119, dtype=bool)
NON_METALS[[1, *range(5, 10), *range(14, 18), *range(32, 36), 52, 53, 85]] = True  # no noble gas among them
BONDED = 1.3  # sums of covalent radii: nearer non-metals become bonded
BROKEN = 1.6  # and stay so up to here
MOST_NEIGHBORS = 6  # of one atom in a molecule; hydrogen has at most two
MOST_OF_HYDROGEN = 2
LINEAR = np.cos(np.radians(165))  # a bend beyond is described by two perpendicular ones
TOO_LINEAR = np.cos(np.radians(173))  # here an ordinary bend or torsion has become useless
NOT_LINEAR = np.cos(np.radians(145))  # and here the perpendicular ones
TURNED = 0.5  # largest cosine between a perpendicular bend's direction and its axis
LONGEST_AXIS = 12  # atoms in a straight chain that a torsion looks across
SMALLEST_GAP = 6.0  # Å between layers of atoms, at a surface
LARGEST_VOLUME = 25.0  # Å³ per atom of a molecular crystal; ice has 11, benzene 10


@dataclass(frozen=True, eq=False)
class Links:
    """Vectors between atoms through periodic images. Each bond is there twice, forth and back."""

    first: Indices  # (n_links,)
    second: Indices  # (n_links,)
    shifts: Indices  # (n_links, 3) cells

    def vectors(self, geometry: Geometry) -> Array:
        """From the first atom to the image of the second, (n_links, 3) Å."""
        apart = geometry.positions[self.second] - geometry.positions[self.first]
        return apart + self.shifts @ geometry.cell if geometry.periodic.any() else apart


@dataclass(frozen=True, eq=False)
class Topology:
    """The valence coordinates of a structure, as rows of numbers of links.

    Links of a bend and a wag start at the centre; those of a torsion lead from its axis: j→i, j→k, k→l. A torsion looks
    across straight chains, so its axis may be longer than a bond.
    """

    links: Links
    n_bonds: int  # links k and k + n_bonds are one bond
    bends: Indices  # (n_bends, 2)
    straight: Indices  # (n_straight, 2): bends near 180°
    directions: Array  # (n_straight, 2, 3): perpendicular to each straight bend when it was found
    torsions: Indices  # (n_torsions, 3)
    wags: Indices  # (n_wags, 3): out of the plane of three neighbours
    members: NDArray[np.bool_]  # (n_atoms,) in a molecule
    made_of: frozenset[tuple[int, ...]]  # atoms and shift of each bond, those outside molecules included
    made_at: Geometry


def bonds_in(geometry: Geometry, pairs: Bonds, known: Topology | None) -> set[tuple[int, ...]]:
    """Atoms and shifts of the valence bonds: those that are near, and those known that are not broken."""
    if NON_METALS[geometry.numbers].sum() < 2:
        return set()
    reduced = pairs.lengths / pairs.natural_lengths
    bonding = NON_METALS[geometry.numbers] | _centres(geometry, pairs, reduced)
    both = bonding[pairs.first] & bonding[pairs.second]
    rows = np.flatnonzero(both & (reduced < BROKEN))
    kept = _keys(geometry, pairs, rows)
    before = frozenset() if known is None else known.made_of
    bonds = {key for key, length in zip(kept, reduced[rows], strict=True) if length < BONDED or key in before}
    if not (bonding & ~NON_METALS[geometry.numbers]).any():
        return bonds
    # a cation between anions is bonded to all of them: then it is part of a crystal, and they are molecules without it
    finite = set[int]().union(*_pieces(bonds, geometry.n_atoms))
    metal = ~NON_METALS[geometry.numbers]
    return {bond for bond in bonds if bond[0] in finite or not (metal[bond[0]] or metal[bond[1]])}


def _centres(geometry: Geometry, pairs: Bonds, reduced: Array) -> NDArray[np.bool_]:
    """Metals at the centre of a complex: bonded to two to six non-metals, and to nothing else. (n_atoms,)"""
    metal = ~NON_METALS[geometry.numbers]
    near = reduced < BONDED
    ligands = np.zeros(geometry.n_atoms, dtype=np.int64)
    others = np.zeros(geometry.n_atoms, dtype=np.int64)
    for one, other in ((pairs.first, pairs.second), (pairs.second, pairs.first)):
        np.add.at(ligands, one[near], ~metal[other[near]])
        np.add.at(others, one[near], metal[other[near]])
    return metal & (ligands >= 2) & (ligands <= MOST_NEIGHBORS) & (others == 0)


def _keys(geometry: Geometry, pairs: Bonds, rows: Indices) -> list[tuple[int, ...]]:
    """(i, j, shift of j) with i ≤ j: the same name for a pair wherever it was found."""
    first = pairs.first[rows]
    second = pairs.second[rows]
    offsets = pairs.vectors[rows] - geometry.positions[second] + geometry.positions[first]
    lattice = geometry.cell * geometry.periodic[:, None]
    shifts = np.rint(offsets @ np.linalg.pinv(lattice)).astype(np.int64)
    turned = first > second
    turned |= (first == second) & (shifts @ [1 << 20, 1 << 10, 1] < 0)
    low = np.where(turned, second, first)
    high = np.where(turned, first, second)
    rows = np.column_stack([low, high, np.where(turned[:, None], -shifts, shifts)])
    return [tuple(row) for row in rows.tolist()]


def topology_of(geometry: Geometry, bonds: set[tuple[int, ...]]) -> Topology | None:
    """The coordinates that follow from the bonds; None where nothing is a molecule."""
    heavy = (geometry.numbers != 1) & NON_METALS[geometry.numbers]
    pieces = [piece for piece in _pieces(bonds, geometry.n_atoms) if heavy[list(piece)].any()]
    members = np.zeros(geometry.n_atoms, dtype=bool)
    for piece in pieces:
        members[list(piece)] = True
    chosen = sorted(bond for bond in bonds if members[bond[0]])
    if not chosen or not _sensible(chosen, geometry.numbers):
        return None
    return _Builder(geometry, chosen).topology(members, frozenset(bonds))


def _sensible(bonds: list[tuple[int, ...]], numbers: NDArray[np.int64]) -> bool:
    """Atoms crowded beyond any valence are no molecules: springs push them apart first."""
    ends = np.array([[bond[0], bond[1]] for bond in bonds]).ravel()
    counts = np.bincount(ends, minlength=len(numbers))
    return bool((counts <= np.where(numbers == 1, MOST_OF_HYDROGEN, MOST_NEIGHBORS)).all())


def _pieces(bonds: set[tuple[int, ...]], n_atoms: int) -> Iterator[set[int]]:
    """Connected atoms that repeat along one direction at most."""
    neighbors = defaultdict[int, list[tuple[int, tuple[int, ...]]]](list)
    for first, second, *shift in sorted(bonds):
        neighbors[first].append((second, tuple(shift)))
        neighbors[second].append((first, tuple(-part for part in shift)))
    seen = np.zeros(n_atoms, dtype=bool)
    for start in sorted(neighbors):
        if not seen[start]:
            cells, repeats = _walked(start, neighbors)
            seen[list(cells)] = True
            if not repeats or np.linalg.matrix_rank(np.array(sorted(repeats))) < 2:
                yield set(cells)


def _walked(
    start: int, neighbors: dict[int, list[tuple[int, tuple[int, ...]]]]
) -> tuple[dict[int, tuple[int, ...]], set[tuple[int, ...]]]:
    """The cell in which each connected atom is found from the start, and the cells after which the piece repeats."""
    cells = dict[int, tuple[int, ...]]({start: (0, 0, 0)})
    repeats = set[tuple[int, ...]]()
    waiting = deque([start])
    while waiting:
        atom = waiting.popleft()
        for other, shift in neighbors[atom]:
            cell = tuple(a + b for a, b in zip(cells[atom], shift, strict=True))
            if other not in cells:
                cells[other] = cell
                waiting.append(other)
            elif cells[other] != cell:
                repeats.add(tuple(a - b for a, b in zip(cell, cells[other], strict=True)))
    return cells, repeats


class _Builder:
    """Bends, torsions and wags from bonds and where the atoms are."""

    def __init__(self, geometry: Geometry, bonds: list[tuple[int, ...]]) -> None:
        table = np.array(bonds, dtype=np.int64)
        self.geometry = geometry
        self.n_bonds = len(bonds)
        self.first = [*table[:, 0].tolist(), *table[:, 1].tolist()]
        self.second = [*table[:, 1].tolist(), *table[:, 0].tolist()]
        self.shifts = [*map(tuple, table[:, 2:].tolist()), *map(tuple, (-table[:, 2:]).tolist())]
        self.leaving = defaultdict[int, list[int]](list)  # links from each atom
        for link, atom in enumerate(self.first):
            self.leaving[atom].append(link)
        vectors = self._links().vectors(geometry)
        self.units = vectors / np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)[:, None]

    def topology(self, members: NDArray[np.bool_], made_of: frozenset[tuple[int, ...]]) -> Topology:
        bent = list[tuple[int, int]]()
        straight = list[tuple[int, int]]()
        for links in self.leaving.values():
            for one, other in combinations(links, 2):
                (straight if self._cosine(one, other) < LINEAR else bent).append((one, other))
        self.on = self._straight_on(straight)
        torsions = self._torsions()  # adds links
        return Topology(
            links=self._links(),
            n_bonds=self.n_bonds,
            bends=_array(bent, 2),
            straight=_array(straight, 2),
            directions=self._directions(straight),
            torsions=_array(torsions, 3),
            wags=_array(self._wags(), 3),
            members=members,
            made_of=made_of,
            made_at=self.geometry,
        )

    def _links(self) -> Links:
        shifts = np.array(self.shifts, dtype=np.int64).reshape(-1, 3)
        return Links(np.array(self.first, dtype=np.int64), np.array(self.second, dtype=np.int64), shifts)

    def _cosine(self, one: int, other: int) -> float:
        return float(self.units[one] @ self.units[other])

    def _reverse(self, link: int) -> int:
        return link + self.n_bonds if link < self.n_bonds else link - self.n_bonds

    def _directions(self, straight: list[tuple[int, int]]) -> Array:
        """Two unit vectors perpendicular to each straight bend."""
        axes = np.array([self.units[one] - self.units[other] for one, other in straight]).reshape(-1, 3)
        axes /= np.maximum(np.linalg.norm(axes, axis=1), 1e-12)[:, None]
        helpers = np.eye(3)[np.abs(axes).argmin(axis=1)] if len(axes) else np.zeros((0, 3))
        one = np.cross(axes, helpers)
        one /= np.maximum(np.linalg.norm(one, axis=1), 1e-12)[:, None]
        return np.stack([one, np.cross(axes, one)], axis=1)

    def _straight_on(self, straight: list[tuple[int, int]]) -> dict[int, int]:
        """The link that goes on where another ends at an atom with two neighbours in a line."""
        pairs = [(one, other) for one, other in straight if len(self.leaving[self.first[one]]) == 2]
        on = {self._reverse(one): other for one, other in pairs}
        return on | {self._reverse(other): one for one, other in pairs}

    def _torsions(self) -> list[tuple[int, int, int]]:
        found = list[tuple[int, int, int]]()
        for axis, last in self._axes():
            one_side = [k for k in self.leaving[self.first[axis]] if self._apart(k, self.units[axis])]
            other_side = [k for k in self.leaving[self.second[last]] if self._apart(k, -self.units[last])]
            number = None
            for one, other in product(one_side, other_side):
                if number is None:
                    number = self._axis_link(axis, last)
                if not self._same_place(one, number, other):
                    found.append((one, number, other))
        return found

    def _apart(self, link: int, direction: Array) -> bool:
        """Whether a link leaves the axis at an angle: along it lies the axis itself, or nothing that could turn."""
        return abs(float(self.units[link] @ direction)) < -LINEAR

    def _axes(self) -> Iterator[tuple[int, int]]:
        """First and last link of every straight chain of bonds, once; most are one bond long."""
        seen = set[int]()
        for link in range(self.n_bonds):
            if link in seen:
                continue
            last = self._end(link)
            first = self._reverse(self._end(self._reverse(link)))
            here = first
            for _ in range(LONGEST_AXIS):
                seen.update((here, self._reverse(here)))
                if here == last:
                    yield first, last
                    break
                here = self.on.get(here, last)

    def _end(self, link: int) -> int:
        for _ in range(LONGEST_AXIS):
            if link not in self.on:
                break
            link = self.on[link]
        return link

    def _axis_link(self, first: int, last: int) -> int:
        """The link from the beginning of a chain to its end, a new one where it is longer than a bond."""
        if first == last:
            return first
        shift = np.array(self.shifts[first])
        here = first
        while here != last:
            here = self.on[here]
            shift = shift + self.shifts[here]
        self.first.append(self.first[first])
        self.second.append(self.second[last])
        self.shifts.append(tuple(shift.tolist()))
        return len(self.first) - 1

    def _same_place(self, one: int, axis: int, other: int) -> bool:
        """Rings of three: both ends are the same atom in the same cell."""
        if self.second[one] != self.second[other]:
            return False
        there = np.array(self.shifts[axis]) + self.shifts[other]
        return bool((there == self.shifts[one]).all())

    def _wags(self) -> list[tuple[int, int, int]]:
        return [(a, b, c) for a, b, c in (k for k in self.leaving.values() if len(k) == 3)]


def _array(rows: list[tuple[int, ...]], width: int) -> Indices:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def still_fits(topology: Topology, geometry: Geometry) -> bool:
    """Whether every bend is still of its kind; bonds are compared elsewhere."""
    vectors = topology.links.vectors(geometry)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)[:, None]
    bends = topology.bends
    straight = topology.straight
    torsions = topology.torsions
    cosines = np.einsum("ni,ni->n", units[bends[:, 0]], units[bends[:, 1]])
    axes = units[torsions[:, 1]]
    tilts = np.einsum("nki,ni->nk", units[torsions[:, [0, 2]]], axes)
    in_line = np.einsum("ni,ni->n", units[straight[:, 0]], units[straight[:, 1]])
    between = units[straight[:, 0]] - units[straight[:, 1]]
    turned = np.abs(np.einsum("nki,ni->nk", topology.directions, between)) / 2
    return bool(
        (cosines > TOO_LINEAR).all()
        and (np.abs(tilts) < -TOO_LINEAR).all()
        and (in_line < NOT_LINEAR).all()
        and (turned < TURNED).all()
    )


def in_vacuum(atoms: Atoms) -> bool:
    """Whether there is more room than a crystal has: a periodic box is often only what a code asks for."""
    return not atoms.pbc.all() or atoms.cell.volume > LARGEST_VOLUME * len(atoms)


def has_surface(atoms: Atoms) -> bool:
    """Whether some direction is not periodic, or has a gap between atoms that no crystal has."""
    inverse = np.linalg.pinv(atoms.cell.array)
    places = np.sort((atoms.positions @ inverse) % 1, axis=0)
    gaps = np.diff(places, axis=0, append=places[:1] + 1) / np.maximum(np.linalg.norm(inverse, axis=0), 1e-9)
    return not atoms.pbc.all() or bool((gaps > SMALLEST_GAP).any())


def molecular_share(atoms: Atoms) -> float:
    """Share of the atoms that belong to molecules, as the classical optimizer sees it: bonds decide, not `pbc`."""
    if NON_METALS[atoms.numbers].sum() < 2:
        return 0.0
    geometry = geometry_of(atoms, np.ones((len(atoms), 3), dtype=bool), 0.0)
    topology = topology_of(geometry, bonds_in(geometry, bonds_of([geometry])[0], None))
    return 0.0 if topology is None else float(topology.members.mean())
