"""Every network for atoms answers alike in every frame, for every numbering, alone and among others (R6.1).

One list of networks, one list of structures, all in one batch. Whatever is random (forces, history, stress, moves,
weights) need not be physical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111
from ase.constraints import FixAtoms
from torch import Tensor, nn

from relaxion.model.actions import INFORMATION, MoveActions
from relaxion.model.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.stiffness import strain_matrices, strain_vectors
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.train.agents.atom_critics import AtomCategoricalCritic, AtomCritics

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


def images() -> list[Atoms]:
    """Rattled alloy, molecule-like cluster, slab with fixed atoms, single atom, two-atom cell, one-atom cell, lone atom
    in a cell too large for its images."""
    alloy = bulk("Al", cubic=True).repeat((2, 1, 1))
    alloy.numbers[::3] = 28
    alloy.rattle(0.1, seed=1)
    molecule = Atoms("CHOH", positions=[[0, 0, 0], [1.1, 0, 0.1], [-0.6, 1.1, 0], [-1.5, 0.9, 0.3]])
    slab = fcc111("Cu", (2, 1, 2), vacuum=4.0)
    slab.pbc = [True, True, False]
    slab.rattle(0.1, seed=2)
    slab.set_constraint(FixAtoms([0, 1]))
    pair = bulk("Fe", cubic=True)
    pair.rattle(0.2, seed=3)
    pair.numbers[0] = 13
    return [alloy, molecule, slab, Atoms("Au"), pair, bulk("Au"), Atoms("Pt", cell=[9.0] * 3, pbc=True)]


CELL_FREE = [True, False, False, False, True, True, False]


@dataclass(frozen=True)
class Case:
    """A state, a move to judge, and the noise of a draw."""

    state: State
    move: Move
    atom_noise: Tensor  # (n_atoms, 3)
    cell_noise: Tensor  # (n_structures, 6)


def make_case(seed: int = 0) -> Case:
    structures = Structures.from_ase(images(), cell_free=CELL_FREE)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float) -> Tensor:
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    n_atoms, n_structures = structures.n_atoms, structures.n_structures
    stress, strain = normal(n_structures, 3, 3, size=0.02), normal(n_structures, 3, 3, size=0.02)
    state = State(
        structures=structures,
        evaluation=Evaluation(normal(n_structures, size=1.0), normal(n_atoms, 3, size=2.0), stress + stress.mT),
        graph=None,
        last_move=Move(normal(n_atoms, 3, size=0.1), torch.zeros(n_structures, 3, 3, dtype=torch.float64)),
        last_forces=normal(n_atoms, 3, size=3.0),
        trust_radii=0.1 + normal(n_structures, size=0.1).abs(),
        calls=torch.arange(1, n_structures + 1),
    )
    move = Move(normal(n_atoms, 3, size=0.2), strain + strain.mT)
    return Case(state, move, normal(n_atoms, 3, size=1.0), normal(n_structures, 6, size=1.0))


@dataclass(frozen=True)
class Answer:
    """What a network says: numbers per structure, vectors per atom, matrices per structure."""

    scalars: Tensor | None = None
    vectors: Tensor | None = None
    matrices: Tensor | None = None

    def assert_close(self, other: Answer, tolerance: float) -> None:
        for name in ("scalars", "vectors", "matrices"):
            one, two = getattr(self, name), getattr(other, name)
            assert (one is None) == (two is None)
            if one is not None:
                scale = max(1.0, float(one.abs().max()))
                torch.testing.assert_close(one.double(), two.double(), rtol=0, atol=tolerance * scale)


def settings_of(backbone: str, informed: bool) -> AtomNetworkSettings:
    names = tuple(INFORMATION) if informed else ()
    return AtomNetworkSettings.read({"backbone": backbone, "channels": 6, "environment_information": names})


def policy(settings: AtomNetworkSettings, generator: torch.Generator) -> nn.Module:
    return AtomPolicy(MoveActions(), settings, generator)


def gaussian(settings: AtomNetworkSettings, generator: torch.Generator) -> nn.Module:
    return AtomGaussianPolicy(MoveActions(), settings, generator, penalty_weight=0.1)


def critics(settings: AtomNetworkSettings, generator: torch.Generator) -> nn.Module:
    return AtomCritics(settings, 2, generator)


def categorical(settings: AtomNetworkSettings, generator: torch.Generator) -> nn.Module:
    return AtomCategoricalCritic(settings, 5, generator)


def ask(network: nn.Module, case: Case) -> Answer:
    with torch.no_grad():
        if isinstance(network, AtomGaussianPolicy):
            noise = [n.to(network.observer.dtype) for n in (case.atom_noise, case.cell_noise)]
            move, log_densities, penalties = network.sample_with(case.state, *noise)
            scalars = torch.stack([log_densities, penalties, network.gate_factors(case.state)], dim=1)
            return Answer(scalars, move.displacements, move.strains)
        if isinstance(network, AtomPolicy):
            move = network(case.state)
            return Answer(network.gate_factors(case.state), move.displacements, move.strains)
        return Answer(network(case.state, case.move))


NETWORKS: dict[str, tuple[Callable[[AtomNetworkSettings, torch.Generator], nn.Module], str, bool]] = {
    f"{make.__name__} {backbone} {'informed' if informed else 'plain'}": (make, backbone, informed)
    for make in (policy, gaussian, critics, categorical)
    for backbone in ("light", "tensor_field")
    for informed in (False, True)
}

every_network = pytest.mark.parametrize("name", NETWORKS)
both_precisions = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def network_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    make, backbone, informed = NETWORKS[name]
    return make(settings_of(backbone, informed), torch.Generator().manual_seed(seed)).to(dtype)


def turned(case: Case, matrix: Tensor, shift: Tensor) -> Case:
    """x -> x·Qᵀ + shift, with all that turns along."""
    state, structures = case.state, case.state.structures
    assert state.evaluation.stresses is not None

    def two_sided(tensors: Tensor) -> Tensor:
        return matrix @ tensors @ matrix.T

    return Case(
        replace(
            state,
            structures=replace(
                structures,
                positions=structures.positions @ matrix.T + shift[structures.structure_index],
                cells=structures.cells @ matrix.T,
            ),
            evaluation=replace(
                state.evaluation,
                forces=state.evaluation.forces @ matrix.T,
                stresses=two_sided(state.evaluation.stresses),
            ),
            last_move=Move(state.last_move.displacements @ matrix.T, two_sided(state.last_move.strains)),
            last_forces=state.last_forces @ matrix.T,
        ),
        Move(case.move.displacements @ matrix.T, two_sided(case.move.strains)),
        case.atom_noise @ matrix.T,
        strain_vectors(two_sided(strain_matrices(case.cell_noise))),
    )


def orthogonal(seed: int, determinant: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrix, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    return matrix * torch.sign(torch.det(matrix)) * determinant


@both_precisions
@every_network
@pytest.mark.parametrize("determinant", [1.0, -1.0], ids=["rotation", "improper"])
def test_turning_and_mirroring(name: str, dtype: torch.dtype, determinant: float) -> None:
    for seed in range(2):
        case, network = make_case(seed), network_of(name, dtype, seed)
        matrix = orthogonal(seed + 5, determinant)
        plain = ask(network, case)
        moved = ask(network, turned(case, matrix, torch.zeros(7, 3, dtype=torch.float64)))
        expected = Answer(
            plain.scalars,
            None if plain.vectors is None else plain.vectors.double() @ matrix.T,
            None if plain.matrices is None else matrix @ plain.matrices.double() @ matrix.T,
        )
        expected.assert_close(moved, TOLERANCES[dtype])


@every_network
def test_inversion(name: str) -> None:
    case, network = make_case(), network_of(name)
    plain = ask(network, case)
    mirrored = ask(network, turned(case, -torch.eye(3, dtype=torch.float64), torch.zeros(7, 3, dtype=torch.float64)))
    replace(plain, vectors=None if plain.vectors is None else -plain.vectors).assert_close(mirrored, 1e-9)


@both_precisions
@every_network
def test_shifting(name: str, dtype: torch.dtype) -> None:
    case, network = make_case(), network_of(name, dtype)
    shift = 20 * torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ask(network, case).assert_close(
        ask(network, turned(case, torch.eye(3, dtype=torch.float64), shift)), TOLERANCES[dtype]
    )


@both_precisions
@every_network
def test_numbering(name: str, dtype: torch.dtype) -> None:
    case, network = make_case(), network_of(name, dtype)
    index = case.state.structures.structure_index
    keys = torch.rand(len(index), generator=torch.Generator().manual_seed(4))
    order = torch.argsort(index + keys)  # shuffles atoms within each structure
    assert not torch.equal(order, torch.arange(len(order)))
    plain, shuffled = ask(network, case), ask(network, reordered(case, order))
    expected = replace(plain, vectors=None if plain.vectors is None else plain.vectors[order])
    expected.assert_close(shuffled, TOLERANCES[dtype])


def reordered(case: Case, order: Tensor) -> Case:
    state, structures = case.state, case.state.structures
    return Case(
        replace(
            state,
            structures=replace(
                structures,
                positions=structures.positions[order],
                atomic_numbers=structures.atomic_numbers[order],
                movable=structures.movable[order],
            ),
            evaluation=replace(state.evaluation, forces=state.evaluation.forces[order]),
            last_move=replace(state.last_move, displacements=state.last_move.displacements[order]),
            last_forces=state.last_forces[order],
        ),
        replace(case.move, displacements=case.move.displacements[order]),
        case.atom_noise[order],
        case.cell_noise,
    )


@both_precisions
@every_network
def test_one_is_many(name: str, dtype: torch.dtype) -> None:
    case, network = make_case(), network_of(name, dtype)
    together = ask(network, case)
    alone = [ask(network, selected(case, number)) for number in range(7)]
    joined = [
        None if getattr(together, part) is None else torch.cat([getattr(answer, part) for answer in alone])
        for part in ("scalars", "vectors", "matrices")
    ]
    together.assert_close(Answer(*joined), TOLERANCES[dtype])


def selected(case: Case, number: int) -> Case:
    which, counts = torch.tensor([number]), case.state.structures.counts
    atoms = case.state.structures.structure_index == number
    return Case(
        case.state.select(which), case.move.select(counts, which), case.atom_noise[atoms], case.cell_noise[which]
    )


@both_precisions
@every_network
def test_repeated_cells(name: str, dtype: torch.dtype) -> None:
    """Displacements repeat, strains and values stay: both are those of the crystal, not of the cell drawn for it."""
    case, network = make_case(), network_of(name, dtype)
    for number in (0, 4, 5):
        one = selected(case, number)
        single, double = ask(network, one), ask(network, repeated(one))
        expected = replace(single, vectors=None if single.vectors is None else single.vectors.repeat(2, 1))
        if isinstance(network, AtomGaussianPolicy):  # densities grow with the atoms
            expected, double = replace(expected, scalars=None), replace(double, scalars=None)
        expected.assert_close(double, TOLERANCES[dtype])


def repeated(case: Case) -> Case:
    """Twice the cell along its first axis."""
    state, structures = case.state, case.state.structures
    shift = torch.cat([torch.zeros_like(structures.positions), structures.cells[0, :1].expand(structures.n_atoms, 3)])
    double = replace(
        structures,
        positions=structures.positions.repeat(2, 1) + shift,
        cells=structures.cells * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)[:, None],
        atomic_numbers=structures.atomic_numbers.repeat(2),
        structure_index=structures.structure_index.repeat(2),
        movable=structures.movable.repeat(2),
    )
    return Case(
        replace(
            state,
            structures=double,
            evaluation=replace(state.evaluation, forces=state.evaluation.forces.repeat(2, 1)),
            last_move=replace(state.last_move, displacements=state.last_move.displacements.repeat(2, 1)),
            last_forces=state.last_forces.repeat(2, 1),
        ),
        replace(case.move, displacements=case.move.displacements.repeat(2, 1)),
        case.atom_noise.repeat(2, 1),
        case.cell_noise,
    )


@every_network
def test_answers_are_neither_constant_nor_equal_for_other_states(name: str) -> None:
    """The tests above would pass for a network that says nothing."""
    network = network_of(name)
    one, other = ask(network, make_case(0)), ask(network, make_case(1))
    for part in ("scalars", "vectors", "matrices"):
        first, second = getattr(one, part), getattr(other, part)
        if first is not None and not (part == "scalars" and bool((first == 1).all())):  # no gate: exactly 1
            assert float((first - second).abs().max()) > 1e-3


@every_network
def test_precisions_agree(name: str) -> None:
    case, network = make_case(), network_of(name)
    ask(network, case).assert_close(ask(network.to(torch.float32), case), 2e-4)
    assert next(network.parameters()).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
