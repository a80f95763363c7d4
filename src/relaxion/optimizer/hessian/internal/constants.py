"""Force constants by rule, for any non-metals.

R. Lindh, A. Bernhardsson, G. Karlström, P.-Å. Malmqvist, Chem. Phys. Lett. 241, 423 (1995): with g = exp[α(R² - r²)] of
each bond, a stretch has 0.45 g, a bend 0.15 g g, a torsion 0.005 g g g (atomic units). Wags are ours.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from importlib.resources import files
from weakref import WeakKeyDictionary

import numpy as np
from ase.data import chemical_symbols
from ase.units import Bohr, Hartree
from numpy.typing import NDArray

from relaxion.optimizer.hessian.internal.topology import Indices, Topology
from relaxion.optimizer.hessian.springs import Bonds
from relaxion.optimizer.point import Array, Geometry

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
    one, other = PERIODS[geometry.numbers[first]], PERIODS[geometry.numbers[second]]
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

TABLE = files("relaxion.optimizer.hessian.internal") / "factors.json"
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
    first, second, count = topology.links.first.tolist(), topology.links.second.tolist(), topology.n_bonds
    symbols = [chemical_symbols[number] for number in topology.made_at.numbers]
    neighbors = Counter(first[: 2 * count])
    kinds = [f"{symbol}{neighbors[atom]}" for atom, symbol in enumerate(symbols)]
    rings = ring_bonds(topology)

    def bond(link: int) -> Labels:
        ends = first[link], second[link]
        return "bond", _joined("bond", symbols, *ends), _joined("bond", kinds, *ends)

    def bend(one: int, other: int) -> Labels:
        center, ends = kinds[first[one]], sorted("H" if symbols[second[k]] == "H" else "X" for k in (one, other))
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
    parents, seen, used = dict[int, tuple[int, int]](), set[int](), set[int]()
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
