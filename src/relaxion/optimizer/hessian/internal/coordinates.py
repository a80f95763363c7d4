"""Values of valence coordinates and how they change with atoms and cell.

Bonds are in Å, bends and torsions in radians. A straight bend is the sum of its two unit vectors, u + v, along two
directions perpendicular to it: smooth through 180°. A wag is the triple product of the unit vectors to three
neighbours: 0 in the plane, smooth everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from relaxion.optimizer.hessian.internal.topology import Indices, Topology
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
        row, column = np.repeat(self.rows, 3), (3 * self.links[:, None] + np.arange(3)).ravel()
        shape = (len(self.q), 3 * len(self.vectors))
        by_links = scipy.sparse.csr_array((self.slopes.ravel(), (row, column)), shape=shape)
        return by_links @ changes_of(topology.links.first, topology.links.second, self.vectors, geometry)


def changes_of(first: Indices, second: Indices, vectors: Array, geometry: Geometry) -> scipy.sparse.csr_array:
    """How vectors between atoms change with the coordinates, (3·n_vectors, 3·n_rows): u_j - u_i + ε·r."""
    number, axes = len(first), np.arange(3)
    row = (3 * np.arange(number)[:, None] + axes).ravel()
    rows, columns = [row, row], [(3 * ends[:, None] + axes).ravel() for ends in (second, first)]
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
    one, other = units[:, 0], units[:, 1]
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
    f, v, h = vectors[:, 0], vectors[:, 1], vectors[:, 2]
    g = -v
    a, b, length = np.cross(f, g), np.cross(h, g), np.maximum(np.linalg.norm(g, axis=1), SHORTEST)
    a2, b2 = np.maximum(_dot(a, a), SHORTEST)[:, None], np.maximum(_dot(b, b), SHORTEST)[:, None]
    angles = np.arctan2(_dot(np.cross(b, a), g) / length, _dot(a, b))
    by_f, by_h = -length[:, None] * a / a2, length[:, None] * b / b2
    by_v = -(_dot(f, g) / length)[:, None] * a / a2 + (_dot(h, g) / length)[:, None] * b / b2
    return angles, np.stack([by_f, by_v, by_h], axis=1)


def _wags(vectors: Array) -> tuple[Array, Array]:
    """r̂·(ŝ × t̂): the derivative by a unit vector is the cross product of the others, without its part along it."""
    units, lengths = _units(vectors)
    crosses = np.cross(np.roll(units, -1, axis=1), np.roll(units, -2, axis=1))
    values = _dot(units, crosses)  # (n, 3), three times the same
    slopes = (crosses - values[..., None] * units) / lengths[..., None]
    return values[:, 0], slopes


def dense(matrix: Any) -> Array:
    """A sparse matrix as an array."""
    return np.asarray(matrix.toarray())
