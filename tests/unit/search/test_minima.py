"""The same minimum is recognised however it is turned and however roughly it was relaxed; other ones are not."""

from __future__ import annotations

import numpy as np
from ase import Atoms

from relaxion.batch import relax_batch
from relaxion.search.geometry import Distances
from relaxion.search.minima import FINGERPRINT_TOLERANCE, Minima, bond_graph, difference, fingerprint
from relaxion.train.data.perturbations import displaced


def test_turned_mirrored_renumbered_and_shifted_is_the_same(cluster: Atoms) -> None:
    other = cluster.copy()
    other.rotate(40, (1, 2, 3))
    other.positions *= -1
    other.positions += 3
    other = other[np.random.default_rng(0).permutation(len(other))]
    assert difference(fingerprint(cluster), fingerprint(other)) < 1e-9


def test_a_cell_chosen_otherwise_is_the_same() -> None:
    from ase.build import bulk, make_supercell

    crystal = bulk("NiAl", "cesiumchloride", a=2.9) * (2, 1, 1)
    sheared = make_supercell(crystal, [[1, 1, 0], [0, 1, 0], [0, 0, 1]])
    assert difference(fingerprint(crystal), fingerprint(sheared)) < 1e-9


def test_rough_relaxations_of_one_minimum_are_one_and_a_swap_is_another(cluster: Atoms) -> None:
    random = np.random.default_rng(5)
    minimum = relax_batch([cluster], "emt", fmax=0.001)[0]
    again = relax_batch([displaced(minimum.atoms, random, 0.05) for _ in range(6)], "emt", fmax=0.05)
    minima = Minima()
    minima.add(minimum.atoms, minimum.energy_ev or 0.0, 1)
    for relaxed in again:
        assert minima.add(relaxed.atoms, relaxed.energy_ev or 0.0, 2) == (0, False)
        assert difference(fingerprint(minimum.atoms), fingerprint(relaxed.atoms)) < FINGERPRINT_TOLERANCE / 2
    assert minima.found[0].times_found == 7
    swapped = minimum.atoms.copy()
    nickel, palladium = np.flatnonzero(swapped.symbols == "Ni")[0], np.flatnonzero(swapped.symbols == "Pd")[0]
    swapped.positions[[nickel, palladium]] = swapped.positions[[palladium, nickel]]
    # equal energies alone do not make one minimum of two
    assert minima.add(swapped, minimum.energy_ev or 0.0, 3) == (1, True)
    assert [m.times_found for m in minima.by_energy()] == [7, 1]


def test_nearly_equal_orders_on_one_skeleton_are_two_minima_and_bond_graphs_tell_them(cluster: Atoms) -> None:
    minimum = relax_batch([cluster], "emt", fmax=0.001)[0].atoms
    turned = minimum[np.random.default_rng(1).permutation(len(minimum))]
    turned.rotate(70, (1, 1, 3))
    turned.positions *= -1
    assert bond_graph(turned) == bond_graph(minimum)
    close = []
    for nickel in np.flatnonzero(minimum.symbols == "Ni"):
        for palladium in np.flatnonzero(minimum.symbols == "Pd"):
            other = minimum.copy()
            other.positions[[nickel, palladium]] = other.positions[[palladium, nickel]]
            close.append((difference(fingerprint(minimum), fingerprint(other)), other))
    other = min(close, key=lambda pair: pair[0])[1]
    minima = Minima()
    minima.add(minimum, 0.0, 1)
    assert (minima.add(other, 0.0, 2)[1]) == (bond_graph(other) != bond_graph(minimum))
    assert minima.with_graph(bond_graph(turned)) == 0
    periodic = minimum.copy()
    periodic.pbc = True
    assert bond_graph(periodic) == b""


def test_fragments() -> None:
    pair = Atoms("Cu4", [[0, 0, 0], [2.5, 0, 0], [0, 2.5, 0], [20, 0, 0]])
    assert Distances.of(pair[:3]).n_fragments == 1
    assert Distances.of(pair, Distances.of(pair[:3]).scale).n_fragments == 2
