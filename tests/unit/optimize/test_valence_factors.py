"""Learned factors on force constants: which coordinate is of which kind, and what was never seen."""

import math

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule

from relaxion.optimizer.hessian import internal_coordinates as factors
from relaxion.optimizer.hessian.internal_coordinates import (
    LOGARITHMS,
    factors_of,
    labels_of,
    near_factors,
    ring_bonds,
    values_at,
)
from relaxion.optimizer.hessian.internal_topology import Topology, bonds_in, topology_of
from relaxion.optimizer.hessian.springs import bonds_of
from relaxion.optimizer.point import Geometry


def topology(atoms: Atoms) -> Topology:
    free = np.ones((len(atoms), 3), dtype=bool)
    place = Geometry(atoms.positions, np.zeros((3, 3)), np.zeros(3, dtype=bool), atoms.numbers.astype(np.int64), free)
    found = topology_of(place, bonds_in(place, bonds_of([place])[0], None))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "number"), [("C2H6", 0), ("C6H6", 6), ("bicyclobutane", 5), ("C5H8", 6), ("C4H4O", 5), ("2-butyne", 0)]
)
def test_bonds_of_rings(name, number):
    found = topology(molecule(name))
    assert len(ring_bonds(found)) == number
    assert all(1 not in found.made_at.numbers[[found.links.first[b], found.links.second[b]]] for b in ring_bonds(found))


def test_labels_go_from_the_general_to_the_special():
    labels = labels_of(found := topology(molecule("CH3CH2OH")))
    assert len(labels) == len(values_at(found, found.made_at).q)
    kinds = {each for row in labels for each in row}
    assert {"bond", "bond C-O", "bond C4-O2", "bend C4 HX", "torsion C4-C4", "torsion C4-O2", "bend O2 HX"} <= kinds
    assert ("torsion", "torsion C3-C3", "torsion C3-C3 ring") in labels_of(topology(molecule("C6H6")))


def test_factors_are_products_and_never_absurd(monkeypatch):
    assert all(math.isfinite(value) and abs(value) < 3 for value in LOGARITHMS.values())
    found = topology(molecule("CH3CH2OH"))
    assert (factors_of(found) > 0.03).all()
    assert (factors_of(found) < 10).all()
    monkeypatch.setattr(factors, "LOGARITHMS", {"bond": 0.5, "bond C-O": 0.25})
    by_hand = factors_of(again := topology(molecule("CH3CH2OH")))
    expected = [0.75 if "bond C-O" in row else 0.5 if "bond" in row else 0.0 for row in labels_of(again)]
    assert np.allclose(np.log(by_hand), expected)
    assert np.allclose(near_factors(found.made_at, bonds_of([found.made_at])[0]), 1.0)


def test_what_was_never_seen_has_the_general_factors():
    arsine = Atoms("AsH3", [[0, 0, 0], [1.25, 0, 0.8], [-0.6, 1.1, 0.8], [-0.6, -1.1, 0.8]])
    found = factors_of(topology(arsine))
    assert np.allclose(found[:3], math.exp(LOGARITHMS.get("bond", 0.0)))
