"""What every potential owes: derivatives, symmetries, one = many, honest counting, clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc100
from ase.calculators.emt import EMT
from scipy.spatial.transform import Rotation
from torch import Tensor

from relaxion.errors import MissingElementError, StructureError
from relaxion.potentials import (
    AsePotential,
    Emt,
    LennardJones,
    Morse,
    PairGraphPotential,
    Potential,
    TabulatedEam,
    ZhouEam,
)
from relaxion.potentials.chgnet import Chgnet
from relaxion.potentials.eam import EamTables
from relaxion.structures import Evaluation, Graph, Move, Structures
from relaxion.structures.structures import per_structure_sum

STEP = 2e-5  # Å, or strain, of the finite differences


def tabulated(finnis_sinclair: bool) -> TabulatedEam:
    """Al–Cu with made-up functions; in the Finnis–Sinclair form the density also depends on the site."""
    spacing, n_points = 0.01, 550
    r = spacing * np.arange(n_points)
    tail = np.clip(1 - r / (spacing * n_points), 0, None) ** 3
    source, site = np.arange(1, 3)[:, None, None], np.arange(1, 3)[None, :, None]
    rho = 0.1 * np.arange(800)
    return TabulatedEam(
        EamTables(
            elements=["Al", "Cu"],
            density_spacing=0.1,
            distance_spacing=spacing,
            cutoff=spacing * n_points,
            embedding=-np.arange(1, 3)[:, None] * np.sqrt(rho + 0.2),
            densities=(8 + source + finnis_sinclair * site) * np.exp(-0.8 * r) * tail,
            pair_products=(40.0 + 5 * (source + site)) * np.exp(-1.4 * r) * tail,
        )
    )


class TapedMorse(PairGraphPotential):
    """A Morse pair by automatic differentiation: the contract also holds for potentials made this way."""

    name = "taped Morse"

    def cutoff_for(self, structures: Structures) -> float:  # noqa: ARG002
        return 6.0

    def energies_of(self, distances: Tensor, graph: Graph, structures: Structures) -> Tensor:
        decay = torch.exp(1.7 * (2.6 - distances))
        pairs = 0.5 * 0.4 * decay * (decay - 2) * (1 - (distances / 6.0) ** 2) ** 3
        return per_structure_sum(pairs, graph.pair_structure, structures.n_structures)


POTENTIALS: dict[str, Callable[[], Potential]] = {
    "emt": Emt,
    "eam zhou": ZhouEam,
    "eam alloy": lambda: tabulated(finnis_sinclair=False),
    "eam fs": lambda: tabulated(finnis_sinclair=True),
    "lj": lambda: LennardJones(sigma=2.3, epsilon=0.3, cutoff=6.1),
    "lj smooth": lambda: LennardJones(sigma=2.3, epsilon=0.3, smooth=True),
    "morse": lambda: Morse(r0=2.6, epsilon=0.4),
    "taped": TapedMorse,
    "ase": lambda: AsePotential(EMT()),
    "chgnet": lambda: Chgnet(torch.float64),  # in float32, as it is used: tests/unit/physics/test_chgnet.py
}
every_potential = pytest.mark.parametrize("name", POTENTIALS)


def alloys() -> list[Atoms]:
    """Al–Cu: a cell smaller than any cutoff, a skewed cell, a slab in vacuum, a cluster without cell."""
    small = Atoms("AlCu", positions=[[0, 0, 0], [1.2, 1.4, 1.9]], cell=np.diag([2.9, 3.0, 3.1]), pbc=True)
    skewed = Atoms(
        "Al2Cu3",
        scaled_positions=[[0, 0, 0], [0.5, 0.5, 0.1], [0.4, 0.1, 0.5], [0.0, 0.6, 0.5], [0.7, 0.8, 0.8]],
        cell=[[4.4, 0.2, -0.1], [0.7, 4.3, 0.3], [-0.4, 0.5, 4.6]],
        pbc=True,
    )
    slab = fcc100("Cu", (1, 2, 2), vacuum=5.0)
    slab.symbols[1] = "Al"
    cluster = Atoms("AlCu2", positions=[[0, 0, 0], [2.4, 0.2, 0.1], [0.9, 2.3, 0.4]])
    for seed, atoms in enumerate((skewed, slab)):
        atoms.rattle(0.08, seed=seed)
    return [small, skewed, slab, cluster]


def structures() -> Structures:
    return Structures.from_ase(alloys())


def stresses_of(evaluation: Evaluation) -> Tensor:
    assert evaluation.stresses is not None
    return evaluation.stresses


def ask(potential: Potential, batch: Structures) -> Evaluation:
    """With stresses: the adapter for ASE computes them only when asked."""
    return potential(batch, stresses=True)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest expected number."""
    limit = tolerance * float(expected.abs().max()) + 1e-13
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


@every_potential
def test_forces_are_minus_the_slope_of_the_energy(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    for number in range(start.n_structures):
        one = start.select(torch.tensor([number]))
        shifts = STEP * torch.eye(one.n_atoms * 3, dtype=torch.float64).view(-1, one.n_atoms, 3)
        moved = [replace(one, positions=one.positions + sign * shift) for shift in shifts for sign in (1, -1)]
        energies = potential(Structures.concatenate(moved)).energies.view(-1, 2)
        expected = -(energies[:, 0] - energies[:, 1]) / (2 * STEP)
        assert expected.abs().max() > 0.1, "a test structure without forces tests nothing"
        assert_near(potential(one).forces.flatten(), expected, 1e-6)


@every_potential
def test_stresses_are_the_slope_of_the_energy(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    found = stresses_of(potential(start, stresses=True))
    still = torch.zeros_like(start.positions)
    expected = torch.zeros_like(found)
    for i in range(3):
        for j in range(3):
            strain = torch.zeros((start.n_structures, 3, 3), dtype=torch.float64)
            strain[:, i, j] += STEP / 2
            strain[:, j, i] += STEP / 2
            energies = [potential(start.moved(Move(still, sign * strain))).energies for sign in (1, -1)]
            expected[:, i, j] = (energies[0] - energies[1]) / (2 * STEP)
    solid = start.volumes > 0
    expected = expected[solid] / start.volumes[solid, None, None]
    assert expected.abs().amax(dim=(1, 2)).min() > 1e-3
    assert_near(found[solid], expected, 1e-6)
    assert not found[~solid].any()


@every_potential
def test_translation_changes_nothing(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    before = potential(start)
    after = potential(replace(start, positions=start.positions + torch.tensor([0.31, -1.7, 12.0])))
    assert_near(after.energies, before.energies, 1e-11)
    assert_near(after.forces, before.forces, 1e-10)


@every_potential
def test_another_image_of_an_atom_changes_nothing(name: str) -> None:
    potential, start = POTENTIALS[name](), structures().select(torch.tensor([0, 1]))
    before = ask(potential, start)
    positions = start.positions.clone()
    positions[1] += 2 * start.cells[0, 0] - start.cells[0, 2]
    positions[4] -= 3 * start.cells[1, 1]
    after = ask(potential, replace(start, positions=positions))
    assert_near(after.energies, before.energies, 1e-11)
    assert_near(after.forces, before.forces, 1e-10)
    assert_near(stresses_of(after), stresses_of(before), 1e-10)


@every_potential
def test_rotation_turns_the_answer(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    turn = torch.from_numpy(Rotation.from_euler("xyz", [0.4, -1.1, 2.0]).as_matrix())
    before = ask(potential, start)
    after = ask(potential, replace(start, positions=start.positions @ turn.T, cells=start.cells @ turn.T))
    assert_near(after.energies, before.energies, 1e-11)
    assert_near(after.forces, before.forces @ turn.T, 1e-10)
    assert_near(stresses_of(after), turn @ stresses_of(before) @ turn.T, 1e-10)


@every_potential
def test_order_of_atoms_does_not_matter(name: str) -> None:
    potential = POTENTIALS[name]()
    atoms = alloys()[1]
    order = [3, 0, 4, 2, 1]
    before = ask(potential, Structures.from_ase(atoms))
    after = ask(potential, Structures.from_ase(atoms[order]))
    assert_near(after.energies, before.energies, 1e-12)
    assert_near(after.forces, before.forces[order], 1e-11)
    assert_near(stresses_of(after), stresses_of(before), 1e-11)


@every_potential
def test_supercell_has_twice_the_energy(name: str) -> None:
    potential = POTENTIALS[name]()
    for atoms, repeat in zip(alloys()[:2], ((1, 2, 1), (2, 1, 1)), strict=True):
        before = ask(potential, Structures.from_ase(atoms))
        after = ask(potential, Structures.from_ase(atoms.repeat(repeat)))
        assert_near(after.energies, 2 * before.energies, 1e-11)
        assert_near(after.forces, before.forces.repeat(2, 1), 1e-10)
        assert_near(stresses_of(after), stresses_of(before), 1e-10)


@every_potential
def test_many_at_once_equals_one_by_one(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    together = ask(potential, start)
    singles = [ask(potential, start.select(torch.tensor([number]))) for number in range(start.n_structures)]
    assert_near(together.energies, torch.cat([single.energies for single in singles]), 1e-12)
    assert_near(together.forces, torch.cat([single.forces for single in singles]), 1e-12)
    assert_near(stresses_of(together), torch.cat([stresses_of(single) for single in singles]), 1e-12)


@every_potential
def test_a_sick_structure_does_not_infect_its_neighbours(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    expected = ask(potential, start)
    positions = start.positions.clone()
    positions[1] = positions[0] + torch.tensor([0.0, 0.0, 1e-9], dtype=torch.float64)
    found = ask(potential, replace(start, positions=positions))
    assert_near(found.energies[1:], expected.energies[1:], 1e-12)
    assert_near(found.forces[2:], expected.forces[2:], 1e-12)
    assert_near(stresses_of(found)[1:], stresses_of(expected)[1:], 1e-12)


@every_potential
def test_every_structure_counts_once(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    assert potential.calls == 0
    potential(start)
    assert potential.calls == 4
    potential(start.select(torch.tensor([1])), stresses=False)
    potential(start)  # the same structures again are new calls
    assert potential.calls == 9


@every_potential
def test_stresses_only_when_wanted(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    assert potential(start, stresses=False).stresses is None
    assert potential(start, stresses=True).stresses is not None


@every_potential
def test_isolated_atoms(name: str) -> None:
    potential = POTENTIALS[name]()
    alone = [Atoms("Al"), Atoms("Cu", cell=np.eye(3) * 40, pbc=True)]
    evaluation = ask(potential, Structures.from_ase(alone))
    assert torch.isfinite(evaluation.energies).all()
    assert not evaluation.forces.any()
    assert not stresses_of(evaluation).any()
    together = ask(potential, Structures.from_ase([alone[0], alloys()[0], alone[1]]))
    assert_near(together.energies[[0, 2]], evaluation.energies, 1e-12)
    assert together.forces[1:3].abs().max() > 0.1


@every_potential
def test_float32_structures(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    exact, rough = ask(potential, start), ask(potential, start.to(torch.float32))
    for fine, coarse in (
        (exact.energies, rough.energies),
        (exact.forces, rough.forces),
        (stresses_of(exact), stresses_of(rough)),
    ):
        assert coarse.dtype == torch.float32
        assert_near(coarse.to(torch.float64), fine, 2e-5)


@every_potential
def test_input_is_left_alone_and_the_answer_carries_no_graph(name: str) -> None:
    potential, start = POTENTIALS[name](), structures()
    positions = start.positions.clone()
    tracked = replace(start, positions=start.positions.clone().requires_grad_())
    evaluation = ask(potential, tracked)
    assert torch.equal(tracked.positions.detach(), positions)
    assert not evaluation.energies.requires_grad
    assert not evaluation.forces.requires_grad
    assert not stresses_of(evaluation).requires_grad


@pytest.mark.parametrize("name", ["emt", "eam zhou", "eam alloy", "eam fs"])
def test_missing_element_is_named(name: str) -> None:
    potential = POTENTIALS[name]()
    with pytest.raises(MissingElementError, match=r"no parameters for Na, U; .*Al.*Cu"):
        potential(Structures.from_ase([Atoms("Al"), Atoms("NaUAl", positions=np.eye(3) * 3)]))
    assert potential.calls == 0


@pytest.mark.parametrize("name", ["emt", "eam zhou", "eam fs", "lj", "morse", "taped", "chgnet"])
def test_scattered_or_lost_atoms_are_refused(name: str) -> None:
    # without the refusal the first one ends the process with a signal inside of the neighbour search
    potential = POTENTIALS[name]()
    far = Structures.from_ase(Atoms("Al2", positions=[[0, 0, 0], [0, 0, 1e8]]))
    with pytest.raises(StructureError, match=r"structure 0 extends over 1e\+08 Å"):
        potential(far)
    lost = replace(far, positions=far.positions * float("nan"))
    with pytest.raises(StructureError, match="not finite"):
        potential(lost)
    drifted = Atoms("Al2", positions=[[0, 0, 0], [1.9, 1.9, 9e4]], cell=[4, 4, 4], pbc=True)
    assert torch.isfinite(potential(Structures.from_ase(drifted)).energies).all()
