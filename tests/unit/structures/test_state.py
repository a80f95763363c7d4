"""Selecting and joining states: everything that belongs to a structure goes with it."""

from __future__ import annotations

import torch

from relaxion.structures import Evaluation, Graph, Move, State, Structures
from relaxion.structures.state import concatenate_graphs, select_graph
from relaxion.train.data.perturbations import rattle


def state_of(structures: Structures, generator: torch.Generator, stresses: bool = True) -> State:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    number, atoms = structures.n_structures, structures.n_atoms
    return State(
        structures=structures,
        evaluation=Evaluation(draw(number), draw(atoms, 3), draw(number, 3, 3) if stresses else None),
        graph=Graph.of(structures, 3.2),
        last_move=Move(draw(atoms, 3), draw(number, 3, 3)),
        last_forces=draw(atoms, 3),
        trust_radii=draw(number),
        calls=torch.arange(number),
    )


def tensors(state: State) -> list[torch.Tensor]:
    graph, structures, evaluation = state.graph, state.structures, state.evaluation
    assert graph is not None
    assert evaluation.stresses is not None
    return [
        structures.positions, structures.cells, structures.structure_index,
        evaluation.energies, evaluation.forces, evaluation.stresses,
        graph.centers, graph.neighbors, graph.shifts, graph.pair_structure,
        state.last_move.displacements, state.last_move.strains,
        state.last_forces, state.trust_radii, state.calls,
    ]  # fmt: skip


def assert_same(first: State, second: State) -> None:
    for one, other in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(one, other)


def test_parts_joined_again_are_the_whole(mixed_structures: Structures, generator: torch.Generator) -> None:
    state = state_of(rattle(mixed_structures, generator, size_angstrom=0.1), generator)
    parts = [state.select(torch.tensor([number])) for number in range(4)]
    assert_same(State.concatenate(parts), state)
    mask = torch.tensor([True, False, True, False])
    assert_same(state.select(mask), state.select(torch.tensor([0, 2])))


def test_selected_graph_is_the_graph_of_the_selected(mixed_structures: Structures, generator: torch.Generator) -> None:
    structures = rattle(mixed_structures, generator, size_angstrom=0.1)
    which = torch.tensor([2, 0, 2, 3])
    chosen = select_graph(Graph.of(structures, 4.0), structures.counts, which)
    fresh = Graph.of(structures.select(which), 4.0)
    for name in ("centers", "neighbors", "shifts", "pair_structure"):
        assert torch.equal(getattr(chosen, name), getattr(fresh, name))


def test_joined_graph_is_the_graph_of_the_joined(mixed_structures: Structures) -> None:
    parts = [mixed_structures.select(torch.tensor([0, 1])), mixed_structures.select(torch.tensor([2, 3]))]
    joined = concatenate_graphs([Graph.of(part, 3.0) for part in parts], parts)
    fresh = Graph.of(mixed_structures, 3.0)
    for name in ("centers", "neighbors", "shifts", "pair_structure"):
        assert torch.equal(getattr(joined, name), getattr(fresh, name))


def test_missing_stresses_become_zero_beside_given_ones(
    mixed_structures: Structures, generator: torch.Generator
) -> None:
    with_stress = state_of(mixed_structures, generator).evaluation
    without = state_of(mixed_structures, generator, stresses=False).evaluation
    joined = Evaluation.concatenate([without, with_stress])
    assert joined.stresses is not None
    assert torch.equal(joined.stresses[:4], torch.zeros(4, 3, 3, dtype=torch.float64))
    assert Evaluation.concatenate([without, without]).stresses is None


def test_bounded_move_keeps_its_direction(mixed_structures: Structures, generator: torch.Generator) -> None:
    noise = torch.randn(mixed_structures.positions.shape, generator=generator, dtype=torch.float64)
    strains = torch.randn((4, 3, 3), generator=generator, dtype=torch.float64)
    move = Move(noise, strains)
    bounded = move.bounded(mixed_structures, 0.2, 0.05)
    assert bounded.largest_displacements(mixed_structures).max() <= 0.2 + 1e-12
    assert bounded.strain_sizes().max() <= 0.05 + 1e-12
    ratio = bounded.displacements / noise
    for number in range(4):
        mine = ratio[mixed_structures.structure_index == number]
        torch.testing.assert_close(mine, torch.full_like(mine, float(mine[0, 0])))
        torch.testing.assert_close(bounded.strains[number] / strains[number], mine[0, 0].expand(3, 3))
    small = move.scaled(torch.full((4,), 1e-3, dtype=torch.float64), mixed_structures)
    assert torch.equal(small.bounded(mixed_structures, 0.2, 0.05).displacements, small.displacements)
