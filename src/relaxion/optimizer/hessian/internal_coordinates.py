"""Internal coordinates: their values, how they change with atoms and cell, and their force constants.

Bonds are in Å, bends and torsions in radians. A straight bend is the sum of its two unit vectors, u + v, along two
directions perpendicular to it: smooth through 180°. A wag is the triple product of the unit vectors to three
neighbours: 0 in the plane, smooth everywhere.

Force constants by rule, for any non-metals: R. Lindh, A. Bernhardsson, G. Karlström, P.-Å. Malmqvist, Chem. Phys.
Lett. 241, 423 (1995). With g = exp[α(R² - r²)] of each bond, a stretch has 0.45 g, a bend 0.15 g g, a torsion
0.005 g g g (atomic units). Wags are ours.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.resources import files
from weakref import WeakKeyDictionary

import numpy as np
import scipy.sparse
from ase.data import chemical_symbols
from ase.units import Bohr, Hartree
from numpy.typing import NDArray

from relaxion.optimizer.hessian.internal_topology import Indices, Topology
from relaxion.optimizer.hessian.springs import Bonds
from relaxion.optimizer.point import Array, Geometry

SHORTEST = 1e-9  # Å or squares of it; nothing is divided by less


@dataclass(frozen=True, eq=False)
class Values:
    """All coordinates of a topology at one geometry, with their derivatives by the vectors of their links."""

    q: Array  # (n_coordinates,) Å or radians
    rows: Indices  # (n_terms,) which coordinate
    links: Indices  # (n_terms,) by which link
    slopes: Array  # (n_terms, 3)
    vectors: Array  # (n_links, 3) Å

    def matrix(self, topology: Topology, geometry: Geometry) -> scipy.sparse.csr_array:
        """∂q/∂x, (n_coordinates, 3·n_rows); nothing where x may not change."""
        row = np.repeat(self.rows, 3)
        column = (3 * self.links[:, None] + np.arange(3)).ravel()
        shape = (len(self.q), 3 * len(self.vectors))
        by_links = scipy.sparse.csr_array((self.slopes.ravel(), (row, column)), shape=shape)
        return by_links @ changes_of(topology.links.first, topology.links.second, self.vectors, geometry)


def changes_of(first: Indices, second: Indices, vectors: Array, geometry: Geometry) -> scipy.sparse.csr_array:
    """How vectors between atoms change with the coordinates, (3·n_vectors, 3·n_rows): u_j - u_i + ε·r."""
    number = len(first)
    axes = np.arange(3)
    row = (3 * np.arange(number)[:, None] + axes).ravel()
    rows = [row, row]
    columns = [(3 * ends[:, None] + axes).ravel() for ends in (second, first)]
    data = [np.ones(3 * number), -np.ones(3 * number)]
    if geometry.cell_factor:
        rows.append(np.repeat(row, 3))
        columns.append(3 * geometry.n_atoms + np.tile(np.arange(9), number))
        data.append(np.repeat(vectors / geometry.cell_factor, 3, axis=0).ravel())
    place = np.concatenate(columns)
    weights = np.concatenate(data) * geometry.free.ravel()[place]
    return scipy.sparse.csr_array((weights, (np.concatenate(rows), place)), shape=(3 * number, geometry.free.size))


def values_at(topology: Topology, geometry: Geometry) -> Values:
    """Bonds, bends, straight bends, torsions and wags, in this order."""
    vectors = topology.links.vectors(geometry)
    found = [
        _bonds(vectors[: topology.n_bonds, None]),
        _bends(vectors[topology.bends]),
        _straight(vectors[topology.straight], topology.directions),
        _torsions(vectors[topology.torsions]),
        _wags(vectors[topology.wags]),
    ]
    by_links = [
        np.arange(topology.n_bonds)[:, None],
        topology.bends,
        np.repeat(topology.straight, 2, axis=0),
        topology.torsions,
        topology.wags,
    ]
    q = np.concatenate([values for values, _ in found])
    counts = np.repeat([links.shape[1] for links in by_links], [len(links) for links in by_links])
    return Values(
        q=q,
        rows=np.repeat(np.arange(len(q)), counts),
        links=np.concatenate([links.ravel() for links in by_links]),
        slopes=np.concatenate([slopes.reshape(-1, 3) for _, slopes in found]),
        vectors=vectors,
    )


def difference(topology: Topology, after: Array, before: Array) -> Array:
    """q after - q before; torsions go the short way round."""
    change = after - before
    start = topology.n_bonds + len(topology.bends) + 2 * len(topology.straight)
    turns = slice(start, start + len(topology.torsions))
    change[turns] = (change[turns] + np.pi) % (2 * np.pi) - np.pi
    return change


def _units(vectors: Array) -> tuple[Array, Array]:
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1), SHORTEST)
    return vectors / lengths[..., None], lengths


def _dot(first: Array, second: Array) -> Array:
    return np.einsum("...i,...i->...", first, second)


def _bonds(vectors: Array) -> tuple[Array, Array]:
    units, lengths = _units(vectors)
    return lengths[:, 0], units


def _bends(vectors: Array) -> tuple[Array, Array]:
    """θ between r and s: ∂θ/∂r = (cos θ r̂ - ŝ) / (r sin θ)."""
    units, lengths = _units(vectors)
    one = units[:, 0]
    other = units[:, 1]
    cosines = np.clip(_dot(one, other), -1.0, 1.0)
    sines = np.maximum(np.linalg.norm(np.cross(one, other), axis=1), 1e-6)
    slopes = (cosines[:, None, None] * units - units[:, ::-1]) / (lengths * sines[:, None])[:, :, None]
    return np.arctan2(sines, cosines), slopes


def _straight(vectors: Array, directions: Array) -> tuple[Array, Array]:
    """e·(r̂ + ŝ) for two directions e: ∂/∂r = (e - (e·r̂) r̂) / r."""
    units, lengths = _units(vectors)
    values = np.einsum("nki,nli->nk", directions, units)  # (n, 2)
    along = np.einsum("nki,nli->nkl", directions, units)
    slopes = directions[:, :, None, :] - along[..., None] * units[:, None]
    return values.ravel(), slopes / lengths[:, None, :, None]


def _torsions(vectors: Array) -> tuple[Array, Array]:
    """A. Blondel, M. Karplus, J. Comput. Chem. 17, 1132 (1996), by the links j→i, j→k, k→l."""
    f = vectors[:, 0]
    v = vectors[:, 1]
    h = vectors[:, 2]
    g = -v
    a = np.cross(f, g)
    b = np.cross(h, g)
    length = np.maximum(np.linalg.norm(g, axis=1), SHORTEST)
    a2 = np.maximum(_dot(a, a), SHORTEST)[:, None]
    b2 = np.maximum(_dot(b, b), SHORTEST)[:, None]
    angles = np.arctan2(_dot(np.cross(b, a), g) / length, _dot(a, b))
    by_f = -length[:, None] * a / a2
    by_h = length[:, None] * b / b2
    by_v = -(_dot(f, g) / length)[:, None] * a / a2 + (_dot(h, g) / length)[:, None] * b / b2
    return angles, np.stack([by_f, by_v, by_h], axis=1)


def _wags(vectors: Array) -> tuple[Array, Array]:
    """r̂·(ŝ × t̂): the derivative by a unit vector is the cross product of the others, without its part along it."""
    units, lengths = _units(vectors)
    crosses = np.cross(np.roll(units, -1, axis=1), np.roll(units, -2, axis=1))
    values = _dot(units, crosses)  # (n, 3), three times the same
    slopes = (crosses - values[..., None] * units) / lengths[..., None]
    return values[:, 0], slopes


LENGTHS = np.array([[1.35, 2.10, 2.53], [2.10, 2.87, 3.40], [2.53, 3.40, 3.40]]) * Bohr  # R by periods 1, 2, ≥ 3
DECAYS = np.array([[1.0, 0.3949, 0.3949], [0.3949, 0.28, 0.28], [0.3949, 0.28, 0.28]]) / Bohr**2  # α
PERIODS = np.searchsorted([2, 10], np.arange(119))  # 0, 1, 2 of the tables above, by atomic number
FARTHEST = 3.4  # Å; pairs that are not bonded have no stretch beyond
# force constants; Lindh's where nothing else is said
STRETCH = 0.45 * Hartree / Bohr**2  # eV/Å², times g
BEND = 0.15 * Hartree  # eV/rad², times g of both bonds
TORSION = 0.005 * Hartree  # eV/rad², times g of all three bonds
WAG = 0.02 * Hartree  # eV, times g of all three bonds
LARGEST_SHARE = 3.0  # g of a bond is at most this, however short
SMALLEST_SHARE = 0.25  # and at least this: a bond built too long is still a bond
MOLECULE_FLOOR = 0.1  # eV/Å², of every atom of a molecule against its place; more would hide torsions


def shares(geometry: Geometry, first: Indices, second: Indices, lengths: Array) -> Array:
    """Lindh's g of these pairs."""
    one = PERIODS[geometry.numbers[first]]
    other = PERIODS[geometry.numbers[second]]
    return np.exp(DECAYS[one, other] * (LENGTHS[one, other] ** 2 - lengths**2))


def constants_of(topology: Topology, geometry: Geometry, vectors: Array) -> Array:
    """Of each coordinate in the order of `values_at`, eV/Å² or eV/rad²."""
    links = topology.links
    lengths = np.linalg.norm(vectors, axis=1)
    g = np.clip(shares(geometry, links.first, links.second, lengths), SMALLEST_SHARE, LARGEST_SHARE)
    g[2 * topology.n_bonds :] = 1.0  # axes longer than a bond
    return np.concatenate(
        [
            STRETCH * g[: topology.n_bonds],
            BEND * g[topology.bends].prod(axis=1),
            BEND * np.repeat(g[topology.straight].prod(axis=1), 2),
            TORSION * g[topology.torsions].prod(axis=1),
            WAG * g[topology.wags].prod(axis=1),
        ]
    )


Labels = tuple[str, ...]

TABLE = files("relaxion.optimizer.hessian") / "internal_factors.json"
LOGARITHMS: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))
NEAR = np.array(["near HH", "near HX", "near XX"])  # by how many of a pair are not hydrogen

_known = WeakKeyDictionary[Topology, Array]()  # labels take longer than all the rest of a model


def factors_of(topology: Topology) -> Array:
    """Of each coordinate in the order of `values_at`."""
    if topology not in _known:
        _known[topology] = np.array([_factor(labels) for labels in labels_of(topology)])
    return _known[topology]


def near_factors(geometry: Geometry, near: Bonds) -> Array:
    """Of pairs of non-metals that are not bonded."""
    each = {label: _factor((label,)) for label in NEAR.tolist()}
    return np.array([each[label] for label in near_labels(geometry, near).tolist()])


def near_labels(geometry: Geometry, near: Bonds) -> NDArray[np.str_]:
    heavy = (geometry.numbers != 1).astype(int)
    return NEAR[heavy[near.first] + heavy[near.second]]


def _factor(labels: Labels) -> float:
    return float(np.exp(sum(LOGARITHMS.get(label, 0.0) for label in labels)))


def labels_of(topology: Topology) -> list[Labels]:
    """Of each coordinate, from the general to the special."""
    first = topology.links.first.tolist()
    second = topology.links.second.tolist()
    count = topology.n_bonds
    symbols = [chemical_symbols[number] for number in topology.made_at.numbers]
    neighbors = Counter(first[: 2 * count])
    kinds = [f"{symbol}{neighbors[atom]}" for atom, symbol in enumerate(symbols)]
    rings = ring_bonds(topology)

    def bond(link: int) -> Labels:
        ends = first[link], second[link]
        return "bond", _joined("bond", symbols, *ends), _joined("bond", kinds, *ends)

    def bend(one: int, other: int) -> Labels:
        center = kinds[first[one]]
        ends = sorted("H" if symbols[second[k]] == "H" else "X" for k in (one, other))
        return "bend", f"bend {center}", f"bend {center} {''.join(ends)}"

    def torsion(axis: int) -> Labels:
        label = _joined("torsion", kinds, first[axis], second[axis])
        return ("torsion", label, f"{label} ring") if axis % count in rings and axis < 2 * count else ("torsion", label)

    return [
        *(bond(link) for link in range(count)),
        *(bend(one, other) for one, other in topology.bends.tolist()),
        *(("straight", f"straight {kinds[first[one]]}") for one, _ in topology.straight.tolist() for _ in range(2)),
        *(torsion(axis) for _, axis, _ in topology.torsions.tolist()),
        *(("wag", f"wag {kinds[first[row[0]]]}") for row in topology.wags.tolist()),
    ]


def _joined(what: str, names: list[str], first: int, second: int) -> str:
    return f"{what} {'-'.join(sorted((names[first], names[second])))}"


def ring_bonds(topology: Topology) -> set[int]:
    """Bonds that are part of a ring: those that close one, and those on the way between their ends in a tree."""
    count = topology.n_bonds
    ends = list(zip(topology.links.first[:count].tolist(), topology.links.second[:count].tolist(), strict=True))
    parents, closing = _tree(ends)
    found = set[int]()
    for bond in closing:
        found.add(bond)
        one, other = (_way_up(end, parents) for end in ends[bond])
        found.update(set(one) ^ set(other))
    return found


def _tree(ends: list[tuple[int, int]]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Of each atom its parent and the bond to it (roots have none), and the bonds that are not in the tree."""
    at = defaultdict[int, list[tuple[int, int]]](list)
    for bond, (first, second) in enumerate(ends):
        at[first].append((second, bond))
        at[second].append((first, bond))
    parents = dict[int, tuple[int, int]]()
    seen = set[int]()
    used = set[int]()
    for root in at:
        waiting = [] if root in seen else [root]
        seen.add(root)
        while waiting:
            atom = waiting.pop()
            for other, bond in at[atom]:
                if other not in seen:
                    seen.add(other)
                    used.add(bond)
                    parents[other] = atom, bond
                    waiting.append(other)
    return parents, [bond for bond in range(len(ends)) if bond not in used]


def _way_up(atom: int, parents: dict[int, tuple[int, int]]) -> list[int]:
    """The bonds from an atom to its root."""
    way = list[int]()
    while atom in parents:
        atom, bond = parents[atom]
        way.append(bond)
    return way
