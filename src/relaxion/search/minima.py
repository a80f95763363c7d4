"""The distinct minima found so far. Two ends are one minimum where energy and distances agree.

Distances are compared as smeared histograms, one per pair of elements: they do not change with rotations, mirror
images, the order of atoms or the choice of the cell. Histograms of two orders of the elements on one skeleton differ as
little as those of two rough relaxations, so that clusters must have the same bond graph too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ase import Atoms

from relaxion.search.geometry import Distances
from relaxion.structures import Structures
from relaxion.structures.state import Pairs

ENERGY_TOLERANCE = 0.001  # eV per atom; relaxations to 0.05 eV/Å end within about half of it
FINGERPRINT_TOLERANCE = 0.05  # of the histograms' norm; measured in tests/unit/search/test_minima.py
SURELY_ONE = 0.012  # below it also where one pair of atoms counts as bonded only once; other orders differ by 0.018 on
REACH = 2.6  # usual bonds
SMEARING = 0.06  # usual bonds
N_BINS = 80


@dataclass(frozen=True, eq=False)
class Minimum:
    """One of them, as it was found first."""

    atoms: Atoms
    energy_ev: float  # enthalpy where there is a pressure
    found_at_call: int  # for the first time
    times_found: int = 1


class Minima:
    """Grows by `add`; numbers of minima are in the order of their first finding and never change."""

    def __init__(self) -> None:
        self.found: list[Minimum] = []
        self._fingerprints: dict[int, np.ndarray] = {}
        self._graphs: dict[bytes, int] = {}  # number of the lowest minimum with such a bond graph
        self._graphs_of: list[bytes] = []

    def __len__(self) -> int:
        return len(self.found)

    def by_energy(self) -> list[Minimum]:
        return sorted(self.found, key=lambda minimum: minimum.energy_ev)

    def add(self, atoms: Atoms, energy_ev: float, call: int) -> tuple[int, bool]:
        """The number of the minimum that these relaxed atoms are, and whether it is new."""
        tolerance = ENERGY_TOLERANCE * len(atoms)
        rivals = [n for n, other in enumerate(self.found) if abs(other.energy_ev - energy_ev) < tolerance]
        own = fingerprint(atoms) if rivals else None
        graph = bond_graph(atoms)
        for number in sorted(rivals, key=lambda n: abs(self.found[n].energy_ev - energy_ev)):
            if own is not None and self._is_one(own, graph, number):
                # the representative and its fingerprint stay: they must not drift from find to find
                known = self.found[number]
                self.found[number] = replace(known, times_found=known.times_found + 1)
                return number, False
        self.found.append(Minimum(atoms, energy_ev, call))
        if own is not None:
            self._fingerprints[len(self.found) - 1] = own
        return len(self.found) - 1, True

    def _is_one(self, own: np.ndarray, graph: bytes, number: int) -> bool:
        unlike = difference(own, self._fingerprint(number))
        return unlike < SURELY_ONE or (unlike < FINGERPRINT_TOLERANCE and graph == self._all_graphs()[number])

    def with_graph(self, graph: bytes) -> int | None:
        """The number of a minimum with this bond graph."""
        self._all_graphs()
        return self._graphs.get(graph)

    def _all_graphs(self) -> list[bytes]:
        for number in range(len(self._graphs_of), len(self.found)):
            graph = bond_graph(self.found[number].atoms)
            self._graphs_of.append(graph)
            known = self._graphs.get(graph)
            if known is None or self.found[number].energy_ev < self.found[known].energy_ev:
                self._graphs[graph] = number
        return self._graphs_of

    def _fingerprint(self, number: int) -> np.ndarray:
        if number not in self._fingerprints:
            self._fingerprints[number] = fingerprint(self.found[number].atoms)
        return self._fingerprints[number]


def bond_graph(atoms: Atoms) -> bytes:
    """As `Distances.bond_graph`; empty, thus equal for all, where the structure is periodic."""
    return b"" if atoms.pbc.any() else Distances.of(atoms).bond_graph(atoms.numbers)


def fingerprint(atoms: Atoms) -> np.ndarray:
    """(n_pairs_of_elements · N_BINS,) smeared numbers of neighbours by distance."""
    bond = float(np.median(Distances.of(atoms).bonds))
    plain = atoms.copy()
    plain.set_constraint()
    pairs = Pairs.of(Structures.from_ase([plain]), REACH * bond)
    lengths = pairs.vectors.norm(dim=1).numpy() / bond
    elements, kinds = np.unique(atoms.numbers, return_inverse=True)
    ends = np.sort(kinds[pairs.ends.numpy()], axis=0)
    pair_kinds = ends[0] * len(elements) + ends[1]
    centres = np.linspace(0.4, REACH, N_BINS)
    # pairs fade out towards the reach, so that none appears or vanishes at once
    fading = 0.5 * (1 + np.cos(np.pi * np.minimum(lengths / REACH, 1.0)))
    smeared = np.exp(-0.5 * ((lengths[:, None] - centres) / SMEARING) ** 2) * fading[:, None]
    histograms = np.zeros((len(elements) ** 2, N_BINS))
    np.add.at(histograms, pair_kinds, smeared)
    return histograms.ravel()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """0: equal; relative to the norm of the two."""
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)), 1e-12)
    return float(np.linalg.norm(one - other)) / size
