"""R7.1: the corrector, against a slow and obvious bisection."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.data import covalent_radii

from relaxion.errors import StructureError
from relaxion.structures import Move, Structures
from relaxion.structures.minimum_distance import LONGEST_STEP_ANGSTROM, Nearest, correct, first_touch


def image_vectors(atoms: Atoms, reach: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs i, j and vectors to all images of j in so many shells of cells, by brute force."""
    shells = np.array(list(itertools.product(*[range(-reach, reach + 1) if p else [0] for p in atoms.pbc])))
    number = len(atoms)
    i, j, k = np.meshgrid(range(number), range(number), range(len(shells)), indexing="ij")
    i, j, k = i.ravel(), j.ravel(), k.ravel()
    keep = ~((i == j) & (shells[k] == 0).all(axis=1))
    i, j, k = i[keep], j[keep], k[keep]
    return i, j, atoms.positions[j] - atoms.positions[i] + shells[k] @ np.asarray(atoms.cell)


def oracle(atoms: Atoms, displacements: np.ndarray, strain: np.ndarray, distance: float) -> float:
    """Bisection of 'no pair anywhere on the path 0..t is nearer than it may be'."""
    i, j, start = image_vectors(atoms, 5)
    change = start @ strain + displacements[j] - displacements[i]
    allowed = np.minimum(np.linalg.norm(start, axis=1), distance) - 1e-12
    squares = (change**2).sum(axis=1)
    nearest_at = np.where(squares > 0, -(start * change).sum(axis=1) / np.where(squares > 0, squares, 1), 0.0)

    def trespassing(t: float) -> np.ndarray:
        nearest = start + np.clip(nearest_at, 0, t)[:, None] * change
        return np.linalg.norm(nearest, axis=1) < allowed

    ever = trespassing(1.0)
    if not ever.any():
        return 1.0
    start, change, allowed, nearest_at = start[ever], change[ever], allowed[ever], nearest_at[ever]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if not trespassing(middle).any() else (low, middle)
    return low


def random_case(rng: np.random.Generator) -> tuple[Atoms, np.ndarray, np.ndarray, float]:
    number = int(rng.integers(1, 6))
    cell = np.diag(rng.uniform(1.3, 5.0, 3)) + rng.uniform(-0.4, 0.4, (3, 3))
    pbc = rng.random(3) < 0.8
    atoms = Atoms(f"H{number}", scaled_positions=rng.random((number, 3)) * 1.5 - 0.2, cell=cell, pbc=pbc)
    displacements = rng.normal(size=(number, 3)).clip(-2, 2) * rng.choice([0.01, 0.3, 1.0])
    strain = rng.normal(size=(3, 3)) * rng.choice([0.0, 0.03, 0.08])
    return atoms, displacements, (strain + strain.T) / 2, float(rng.uniform(0.5, 1.6))


def test_agrees_with_bisection() -> None:
    """Tiny cells, self-images, strain, collisions, pairs already near: 1200 random cases, 60 at a time."""
    rng = np.random.default_rng(7)
    shortened = 0
    for _ in range(20):
        cases = [random_case(rng) for _ in range(60)]
        distance = cases[0][3]
        structures = Structures.from_ase([atoms for atoms, _, _, _ in cases])
        move = Move(
            torch.from_numpy(np.concatenate([u for _, u, _, _ in cases])),
            torch.from_numpy(np.stack([e for _, _, e, _ in cases])),
        )
        correction = correct(structures, move, distance)
        expected = np.array([oracle(atoms, u, e, distance) for atoms, u, e, _ in cases])
        # a touch at a grazing angle is ill-conditioned in t, not in distance: √(1e-12)
        np.testing.assert_allclose(1 - correction.back_off.numpy(), expected, rtol=0, atol=3e-6)
        after = structures.moved(correction.executed)
        for (atoms, *_), moved in zip(cases, after.to_ase(), strict=True):
            before_d = np.linalg.norm(image_vectors(atoms, 3)[2], axis=1)
            after_d = np.linalg.norm(image_vectors(moved, 3)[2], axis=1)
            assert (after_d >= np.minimum(before_d, distance) - 1e-9).all()
        shortened += int((correction.back_off > 0).sum())
    assert 400 < shortened < 1100  # the cases exercise both answers


def pair(separation: float, pull: list[float], cell: float | None = None) -> tuple[Structures, Move]:
    atoms = Atoms("H2", positions=[[0, 0, 0], [separation, 0, 0]])
    if cell is not None:
        atoms.set_cell([cell] * 3)
        atoms.pbc = True
    structures = Structures.from_ase(atoms)
    displacements = torch.tensor([[0.0, 0, 0], pull], dtype=torch.float64)
    return structures, Move(displacements, torch.zeros(1, 3, 3, dtype=torch.float64))


def test_stops_at_the_distance_by_hand() -> None:
    structures, move = pair(2.0, [-1.5, 0, 0])
    correction = correct(structures, move, 1.0)
    assert float(correction.back_off) == pytest.approx(1 / 3, abs=1e-9)
    assert correction.executed.displacements[1].tolist() == pytest.approx([-1.0, 0, 0], abs=1e-9)


def test_atoms_do_not_pass_through_each_other() -> None:
    """The end of the step is far from any atom; the path is not."""
    structures, move = pair(2.0, [-3.9, 0, 0])
    assert float(correct(structures, move, 1.0).back_off) == pytest.approx(1 - 1 / 3.9, abs=1e-9)


@pytest.mark.parametrize("separation", [0.6, 1.0])
def test_a_pair_too_near_may_part_or_turn_but_not_close(separation: float) -> None:
    away, aside, closer = [0.4, 0, 0], [0.0, 0.4, 0], [-0.1, 0, 0]
    assert float(correct(*pair(separation, away), 1.0).back_off) == 0
    assert float(correct(*pair(separation, aside), 1.0).back_off) == 0
    assert float(correct(*pair(separation, closer), 1.0).back_off) == pytest.approx(1, abs=1e-9)


def test_rigid_shift_of_atoms_in_contact_is_free() -> None:
    structures, _ = pair(0.5, [0, 0, 0])
    shift = Move(torch.full((2, 3), 0.123456789, dtype=torch.float64), torch.zeros(1, 3, 3, dtype=torch.float64))
    assert float(correct(structures, shift, 1.0).back_off) == 0


def test_pairs_in_contact_may_turn_about_each_other(generator: torch.Generator) -> None:
    """Rounding makes r·w slightly negative for half of them; that must not block the move."""
    start = torch.randn((500, 3), generator=generator, dtype=torch.float64)
    change = 0.3 * torch.linalg.cross(start, torch.tensor([[0.3, -0.5, 0.8]], dtype=torch.float64))
    assert ((start * change).sum(dim=1) < 0).sum() > 50
    assert torch.equal(first_touch(start, change, 5.0), torch.ones(500, dtype=torch.float64))


def test_coincident_atoms_may_part() -> None:
    assert float(correct(*pair(0.0, [0.3, 0.1, 0]), 1.0).back_off) == 0


def test_moves_are_measured_without_wrapping() -> None:
    """An atom leaving the cell by 0.2 Å has moved -0.2 Å, not +2.88 Å."""
    structures, move = pair(0.1, [-0.2, 0, 0], cell=3.08)
    far = Structures.from_ase(Atoms("H2", positions=[[1.6, 1.6, 1.6], [0.1, 0, 0]], cell=[3.08] * 3, pbc=True))
    correction = correct(far, move, 0.7)
    after = far.moved(correction.executed)
    assert float(correction.back_off) == 0
    assert Move.between(far, after).displacements[1, 0] == pytest.approx(-0.2)
    assert after.positions[1, 0] == pytest.approx(-0.1)
    assert structures.n_atoms == 2


def test_own_image_stops_a_compression() -> None:
    """One atom in a cube of 2 Å, compressed by 40 % along x, minimum distance 1.6 Å: half of it is left."""
    structures = Structures.from_ase(Atoms("H", cell=[2, 2, 2], pbc=True), cell_free=True)
    strains = torch.zeros(1, 3, 3, dtype=torch.float64)
    strains[0, 0, 0] = -0.4
    correction = correct(structures, Move(torch.zeros_like(structures.positions), strains), 1.6)
    assert float(correction.back_off) == pytest.approx(0.5, abs=1e-9)
    assert structures.moved(correction.executed).cells[0, 0, 0] == pytest.approx(1.6, abs=1e-9)


def test_free_move_is_left_exactly_as_it_is(mixed_structures: Structures, generator: torch.Generator) -> None:
    noise = 0.05 * torch.randn(mixed_structures.positions.shape, generator=generator, dtype=torch.float64)
    correction = correct(mixed_structures, Move(noise, torch.zeros_like(mixed_structures.cells)), 0.7)
    assert torch.equal(correction.executed.displacements, noise)
    assert torch.equal(correction.back_off, torch.zeros(4, dtype=torch.float64))


def test_each_structure_has_its_own_back_off(mixed_structures: Structures, generator: torch.Generator) -> None:
    noise = torch.randn(mixed_structures.positions.shape, generator=generator, dtype=torch.float64)
    move = Move(noise, torch.zeros_like(mixed_structures.cells))
    together = correct(mixed_structures, move, 2.0)
    counts = mixed_structures.counts
    for number in range(4):
        which = torch.tensor([number])
        alone = correct(mixed_structures.select(which), move.select(counts, which), 2.0)
        assert together.back_off[number] == pytest.approx(float(alone.back_off), abs=1e-12)
    assert len(together.back_off.unique()) > 2


def test_runaway_atom_is_cut_and_counted() -> None:
    structures, move = pair(2.0, [1e6, 0, 0])
    correction = correct(structures, move, 1.0)
    assert correction.executed.displacements[1, 0] == pytest.approx(LONGEST_STEP_ANGSTROM)
    assert float(correction.back_off) == pytest.approx(1 - LONGEST_STEP_ANGSTROM / 1e6)


def test_resting_structures_have_no_back_off(mixed_structures: Structures) -> None:
    correction = correct(mixed_structures, Move.zero(mixed_structures), 3.0)
    assert torch.equal(correction.back_off, torch.zeros(4, dtype=torch.float64))


def test_move_that_is_not_finite_is_refused() -> None:
    structures, move = pair(2.0, [float("nan"), 0, 0])
    with pytest.raises(StructureError, match="not finite"):
        correct(structures, move, 1.0)


def test_wall_does_not_creep() -> None:
    """A thousand pushes against the same atom do not wear the distance down."""
    start = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    push = torch.tensor([[-0.3, 0.0, 0.0]], dtype=torch.float64)
    for _ in range(1000):
        start = start + first_touch(start, push, 1.0)[:, None] * push
    assert start[0, 0] > 1.0 - 1e-8


def test_equivariant_under_rotation(mixed_structures: Structures, generator: torch.Generator) -> None:
    noise = torch.randn(mixed_structures.positions.shape, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    turned = Structures(
        positions=mixed_structures.positions @ rotation,
        cells=mixed_structures.cells @ rotation,
        periodic=mixed_structures.periodic,
        atomic_numbers=mixed_structures.atomic_numbers,
        structure_index=mixed_structures.structure_index,
        movable=mixed_structures.movable,
        cell_free=mixed_structures.cell_free,
    )
    zero = torch.zeros_like(mixed_structures.cells)
    plain = correct(mixed_structures, Move(noise, zero), 2.0)
    rotated = correct(turned, Move(noise @ rotation, zero), 2.0)
    torch.testing.assert_close(rotated.back_off, plain.back_off, rtol=0, atol=1e-7)


def test_a_share_of_the_covalent_radii_holds_for_each_pair_by_itself() -> None:
    """Carbon comes nearer to hydrogen than to caesium; as the bisection says it with each pair's own distance."""
    atoms = Atoms("HCCs", positions=[[0, 0, 0], [2.0, 0, 0], [6.0, 0, 0]])
    structures = Structures.from_ase([atoms, atoms])
    displacements = torch.zeros((6, 3), dtype=torch.float64)
    displacements[1, 0], displacements[4, 0] = -1.9, 3.9  # to hydrogen in the first, to caesium in the second
    move = Move(displacements, torch.zeros(2, 3, 3, dtype=torch.float64))
    correction = correct(structures, move, Nearest(share_of_radii=0.55))
    hydrogen, carbon, caesium = covalent_radii[[1, 6, 55]]
    left = correction.executed.displacements[[1, 4], 0].tolist()
    assert left == pytest.approx([-(2.0 - 0.55 * (hydrogen + carbon)), 4.0 - 0.55 * (carbon + caesium)], abs=1e-9)
    both = correct(structures, move, Nearest(distance_angstrom=1.5, share_of_radii=0.55))
    assert both.executed.displacements[[1, 4], 0].tolist() == pytest.approx([-0.5, left[1]], abs=1e-9)


def test_far_movers_meet_large_atoms_under_the_rule_of_radii() -> None:
    """The search for pairs reaches as far as the largest atoms ask."""
    atoms = Atoms("Cs2", positions=[[0, 0, 0], [6.5, 0, 0]])
    move = Move(
        torch.tensor([[0.0, 0, 0], [-4.0, 0, 0]], dtype=torch.float64), torch.zeros(1, 3, 3, dtype=torch.float64)
    )
    left = 6.5 + float(
        correct(Structures.from_ase(atoms), move, Nearest(share_of_radii=0.9)).executed.displacements[1, 0]
    )
    assert left == pytest.approx(1.8 * covalent_radii[55], abs=1e-9)


def test_some_of_the_move_may_be_asked_for_in_any_case() -> None:
    correction = correct(*pair(1.0, [-0.5, 0, 0]), 1.0, smallest_share=0.1)
    assert float(correction.back_off) == pytest.approx(0.9)
    assert correction.executed.displacements[1, 0] == pytest.approx(-0.05)
