"""Properties of structures and moves that hold for all of them, drawn by hypothesis."""

from __future__ import annotations

import numpy as np
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxion
from relaxion.structures import Graph, Move, Structures
from relaxion.structures.minimum_distance import correct
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def random_images(counts: list[int], seed: int) -> list[Atoms]:
    rng = np.random.default_rng(seed)
    images = []
    for count in counts:
        cell = np.diag(rng.uniform(3.0, 5.0, 3)) + rng.uniform(-0.5, 0.5, (3, 3))
        atoms = Atoms(rng.choice([13, 28, 29, 79], count), rng.uniform(-6, 6, (count, 3)), cell=cell, pbc=True)
        atoms.set_constraint(FixAtoms(mask=rng.random(count) < 0.3))
        images.append(atoms)
    return images


def random_move(structures: Structures, seed: int, size: float = 0.3, strain: float = 0.05) -> Move:
    generator = torch.Generator().manual_seed(seed)
    displacements = torch.randn(structures.positions.shape, generator=generator, dtype=torch.float64)
    strains = torch.randn(structures.cells.shape, generator=generator, dtype=torch.float64)
    return Move(size * displacements, strain * (strains + strains.transpose(1, 2)) / 2)


@quick
@given(sizes, seeds)
def test_ase_and_back(counts: list[int], seed: int) -> None:
    images = random_images(counts, seed)
    again = Structures.from_ase(images).to_ase()
    for one, other in zip(images, again, strict=True):
        np.testing.assert_array_equal(one.positions, other.positions)
        np.testing.assert_array_equal(one.numbers, other.numbers)
        np.testing.assert_array_equal(np.asarray(one.cell), np.asarray(other.cell))
        movable = [Structures.from_ase(atoms).movable for atoms in (one, other)]
        assert torch.equal(*movable)
        assert int((~movable[0]).sum()) == len(one.constraints[0].index)


@quick
@given(sizes, seeds)
def test_move_is_read_back_from_where_it_led(counts: list[int], seed: int) -> None:
    structures = Structures.from_ase(random_images(counts, seed))
    move = random_move(structures, seed)
    found = Move.between(structures, structures.moved(move))
    torch.testing.assert_close(found.displacements, move.displacements, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.strains, move.strains, rtol=0, atol=1e-9)


@quick
@given(sizes, seeds, st.randoms(use_true_random=False))
def test_selecting_an_order_and_back(counts: list[int], seed: int, random) -> None:
    structures = Structures.from_ase(random_images(counts, seed))
    order = torch.tensor(random.sample(range(len(counts)), len(counts)))
    again = structures.select(order).select(torch.argsort(order))
    for name in ("positions", "cells", "atomic_numbers", "structure_index", "movable"):
        assert torch.equal(getattr(again, name), getattr(structures, name))


@quick
@given(sizes, seeds)
def test_correction_leaves_no_pair_too_near(counts: list[int], seed: int) -> None:
    structures = Structures.from_ase(random_images(counts, seed))
    before = Graph.of(structures, 1.2)
    nearest = float(before.vectors(structures).norm(dim=1).min()) if before.n_pairs else 1.2
    after = structures.moved(correct(structures, random_move(structures, seed, 1.0), 1.2).executed)
    # the nearest pair of all may not come nearer, nor may any other become nearer than it
    assert Graph.of(after, min(nearest, 1.2) - 1e-9).n_pairs == 0


@quick
@given(sizes, seeds)
def test_shortened_again_is_not_shortened_more(counts: list[int], seed: int) -> None:
    """What the corrector allows, it allows: the executed move is free (up to the slack of rounding)."""
    structures = Structures.from_ase(random_images(counts, seed))
    executed = correct(structures, random_move(structures, seed, 1.0), 1.2).executed
    assert float(correct(structures, executed, 1.2).back_off.max()) < 1e-9


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_a_step_turns_with_the_structure(seed: int) -> None:
    """Rotate and shift everything, step, rotate back: the same reward, outcome and place."""
    rng = np.random.default_rng(seed)
    rotation = torch.from_numpy(np.linalg.qr(rng.normal(size=(3, 3)))[0])
    pool = Structures.from_ase([Atoms("CuAu", [[0, 0, 0], [1.8, 1.8, 0]], cell=[3.6] * 3, pbc=True)] * 2)
    environment = Environment(
        relaxion.potential("emt"),
        PerturbedStarts(pool, [perturbation("rattle:0.2")]),
        EnvironmentSettings(n_structures=3, minimum_distance_angstrom=2.0, max_displacement_angstrom=0.4),
    )
    state = environment.reset(torch.Generator().manual_seed(seed))
    move = random_move(state.structures, seed)
    turned_structures = Structures(
        positions=state.structures.positions @ rotation + 1.234,
        cells=state.structures.cells @ rotation,
        periodic=state.structures.periodic,
        atomic_numbers=state.structures.atomic_numbers,
        structure_index=state.structures.structure_index,
        movable=state.structures.movable,
        cell_free=state.structures.cell_free,
    )
    turned = environment.begin(turned_structures)
    plain = environment.step(state, move)
    rotated = environment.step(turned, Move(move.displacements @ rotation, move.strains))
    torch.testing.assert_close(rotated.reward, plain.reward, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotated.back_off, plain.back_off, rtol=0, atol=1e-6)
    assert torch.equal(rotated.outcome, plain.outcome)
    torch.testing.assert_close(
        rotated.executed.displacements, plain.executed.displacements @ rotation, rtol=0, atol=1e-6
    )
