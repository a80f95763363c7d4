"""Both searches against a slow reference that knows nothing of either, and against each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111

from relaxion.errors import StructureError
from relaxion.structures import Graph, Structures
from relaxion.structures import state as neighbors
from relaxion.structures.state import Pairs

CUTOFF = 4.1


def cells_of_all_kinds() -> list[Atoms]:
    """Skewed, tiny, flat, partly periodic and without cell; some atoms outside of their cell."""
    generator = np.random.default_rng(3)
    images = []
    for count in (1, 2, 3, 6):
        cell = (9.0 * count) ** (1 / 3) * (np.eye(3) + generator.normal(0, 0.25, (3, 3)))
        positions = generator.normal(0, 6, (count, 3))
        images.append(Atoms("Cu" * count, positions=positions, cell=cell, pbc=True))
    flat = fcc111("Cu", (1, 1, 3))  # no third lattice vector
    leaning = Atoms("Cu2", positions=[[0, 0, 0], [9, 1, 1]], cell=[[3, 0, 0], [1, 3, 0.5], [0, 0, 0]], pbc=[1, 1, 0])
    wire = Atoms("Cu2", positions=[[0, 0, 0], [0.5, 0.2, 7]], cell=[0, 0, 2.5], pbc=[0, 0, 1])
    middle = Atoms("Cu2", positions=[[0, 0, 0], [0.2, 4, 0]], cell=[20, 3, 20], pbc=[0, 1, 0])
    return [
        *images,
        bulk("Cu", a=2.0),
        flat,
        leaning,
        wire,
        middle,
        Atoms("Cu"),
        Atoms("Cu3", generator.random((3, 3))),
    ]


def reference(atoms: Atoms, cutoff: float, reach: int = 9) -> set[tuple]:
    """(i, j, shift) of every directed pair, by trying everything."""
    ranges = [range(-reach, reach + 1) if periodic else (0,) for periodic in atoms.pbc]
    found = set()
    for shift in itertools.product(*ranges):
        apart = atoms.positions[None] + np.array(shift) @ atoms.cell - atoms.positions[:, None]
        for i, j in np.argwhere(np.linalg.norm(apart, axis=2) < cutoff):
            if i != j or any(shift):
                found.add((int(i), int(j), *shift))
    return found


def as_sets(pairs: Pairs, structures: Structures) -> list[set[tuple]]:
    """Directed pairs of each structure; fails if the search gives a pair twice."""
    starts = (structures.counts.cumsum(0) - structures.counts).tolist()
    rows = torch.cat([pairs.ends.T, pairs.shifts], dim=1).split(pairs.counts)
    sets = []
    for start, part in zip(starts, rows, strict=True):
        directed = [(i - start, j - start, *shift) for i, j, *shift in part.tolist()]
        directed += [(j, i, *(-step for step in shift)) for i, j, *shift in directed]
        assert len(set(directed)) == len(directed)
        sets.append(set(directed))
    return sets


@pytest.mark.parametrize("at_once", [True, False])
def test_finds_what_trying_everything_finds(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "FEWEST_AT_ONCE", 1 if at_once else 10_000)
    images = cells_of_all_kinds()
    structures = Structures.from_ase(images)
    pairs = Pairs.of(structures, CUTOFF)
    assert as_sets(pairs, structures) == [reference(atoms, CUTOFF) for atoms in images]
    shifted = torch.einsum(
        "ni,nij->nj", pairs.shifts.double(), structures.cells[structures.structure_index[pairs.ends[0]]]
    )
    expected = structures.positions[pairs.ends[1]] + shifted - structures.positions[pairs.ends[0]]
    torch.testing.assert_close(pairs.vectors, expected, rtol=0, atol=1e-12)


def test_both_ways_of_searching_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(neighbors._Candidates, "nearer_than", lambda *_: used.append("at once"))
    monkeypatch.setattr(neighbors, "_one_by_one", lambda *_: used.append("one by one"))
    small, large = bulk("Cu"), bulk("Cu") * (4, 4, 4)
    for images in ([small] * 8, [small] * 7, [large] * 8):
        Pairs.of(Structures.from_ase(images), CUTOFF)
    Pairs.of(Structures.from_ase([Atoms("Cu", cell=np.eye(3) * 0.06, pbc=True)] * 8), CUTOFF)  # 3e6 images
    assert used == ["at once", "one by one", "one by one", "one by one"]


def test_graph_has_every_pair_in_both_directions_and_in_order() -> None:
    images = cells_of_all_kinds()
    structures = Structures.from_ase(images)
    graph = Graph.of(structures, CUTOFF)
    assert graph.n_pairs == sum(len(reference(atoms, CUTOFF)) for atoms in images)
    assert (graph.pair_structure.diff() >= 0).all()
    assert torch.equal(graph.pair_structure, structures.structure_index[graph.neighbors])
    vectors = graph.vectors(structures)
    torch.testing.assert_close(vectors[::2], -vectors[1::2], rtol=0, atol=1e-12)
    assert vectors.norm(dim=1).max() < CUTOFF


def test_graph_follows_positions_with_a_gradient() -> None:
    structures = Structures.from_ase(bulk("Cu", cubic=True))
    graph = Graph.of(structures, CUTOFF)
    structures.positions.requires_grad_()
    (slope,) = torch.autograd.grad(graph.vectors(structures)[0].sum(), structures.positions)
    assert slope[graph.neighbors[0]].tolist() == [1, 1, 1]
    assert slope[graph.centers[0]].tolist() == [-1, -1, -1]


def test_no_atoms_no_pairs() -> None:
    nothing = Structures.from_ase(bulk("Cu")).select(torch.tensor([], dtype=torch.int64))
    assert Graph.of(nothing, CUTOFF).n_pairs == 0


@pytest.mark.parametrize("cutoff", [0.0, -1.0, float("nan")])
def test_cutoff_must_be_above_zero(cutoff: float) -> None:
    with pytest.raises(StructureError, match="above 0"):
        Graph.of(Structures.from_ase(bulk("Cu")), cutoff)


@pytest.mark.parametrize("number", [1, 20])
def test_flat_cells_are_refused(number: int) -> None:
    structures = Structures.from_ase([bulk("Cu")] * number)
    structures.cells[0, 2] = structures.cells[0, 0] + structures.cells[0, 1]
    structures.cells[0] = structures.cells[0].round()  # flat to the last digit
    with pytest.raises(StructureError, match="structure 0"):
        Graph.of(structures, CUTOFF)


@pytest.mark.parametrize("number", [1, 20])
def test_scattered_atoms_are_refused(number: int) -> None:
    # in vesin 0.6 one such structure ends the process
    far = Atoms("Cu2", positions=[[0, 0, 0], [0, 0, 1e6]])
    with pytest.raises(StructureError, match="structure 0 extends over"):
        Graph.of(Structures.from_ase([far] * number), CUTOFF)
