"""Shared by all tests: one torch thread, small structures, a potential that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ase import Atoms
from ase.build import bulk

from relaxion.physics.potential import Potential
from relaxion.structures import Evaluation, Structures
from relaxion.structures.structures import per_structure_sum

torch.set_num_threads(1)


class Springs(Potential):
    """Every atom on a spring to its own well: E = ½ Σ k |x - x0|². Its wells sit on multiples of 3 Å."""

    name = "springs"
    has_stress = False

    def __init__(self, stiffness: float = 1.0) -> None:
        super().__init__()
        self.stiffness = stiffness  # eV/Å²

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        assert not stresses
        away = structures.positions - 3.0 * torch.round(structures.positions / 3.0)
        energy = 0.5 * self.stiffness * (away**2).sum(dim=1)
        energies = per_structure_sum(energy, structures.structure_index, structures.n_structures)
        return Evaluation(energies, -self.stiffness * away, None)


@pytest.fixture
def springs() -> Springs:
    return Springs()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240501)


@pytest.fixture
def make_generator() -> Callable[[int], torch.Generator]:
    return lambda seed=0: torch.Generator().manual_seed(seed)


@pytest.fixture
def copper() -> Atoms:
    return bulk("Cu", cubic=True)


@pytest.fixture
def mixed_structures(copper: Atoms) -> Structures:
    """Different sizes and elements: 4, 1, 8 and 3 atoms; the last is a cluster without a cell."""
    gold = bulk("Au")
    alloy = bulk("Al", cubic=True).repeat((2, 1, 1))
    alloy.numbers[::3] = 28
    cluster = Atoms("Cu3", positions=[[0, 0, 0], [2.5, 0, 0], [1.2, 2.1, 0]])
    return Structures.from_ase([copper, gold, alloy, cluster])
