"""Noise in units of the step the forces ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ase.build import bulk

from relaxion.errors import SettingsError
from relaxion.model.actions import ForceMoveActions
from relaxion.structures import Evaluation, Move, State, Structures

ACTIONS = ForceMoveActions(0.5, 0.1)


def state_with(sizes: list[float], cell_free: bool = False) -> State:
    """Structures of 500 atoms whose forces have these lengths."""
    crystal = bulk("Cu", cubic=True) * (5, 5, 5)
    structures = Structures.from_ase([crystal] * len(sizes), cell_free=cell_free)
    lengths = torch.tensor(sizes, dtype=torch.float64)[structures.structure_index]
    forces = torch.zeros_like(structures.positions)
    forces[:, 0] = lengths
    stresses = torch.zeros_like(structures.cells)
    evaluation = Evaluation(torch.zeros(len(sizes), dtype=torch.float64), forces, stresses)
    return State.without_past(structures, evaluation, 0.3)


def noise_of(state: State, scale: float, clip: float | None = None) -> torch.Tensor:
    still = Move.zero(state.structures)
    noisy = ACTIONS.perturb(still, scale, torch.Generator().manual_seed(0), clip, state)
    return noisy.displacements.view(state.n_structures, -1, 3)


def test_noise_shrinks_with_the_forces_of_its_structure_and_never_exceeds_the_bound() -> None:
    noise = noise_of(state_with([1.0, 0.01, 1e3]), 0.2)
    for part, unit in zip(noise, (1.0 / 5, 0.01 / 5, 0.5), strict=True):
        assert float(part.std()) == pytest.approx(0.2 * unit, rel=0.06)


def test_the_clip_cuts_lengths_in_the_same_unit() -> None:
    noise = noise_of(state_with([1.0, 0.01]), 0.2, clip=0.3)
    lengths = noise.norm(dim=2).amax(dim=1)
    assert lengths.tolist() == pytest.approx([0.3 / 5, 0.003 / 5], rel=1e-3)


def test_random_moves_fill_the_ball_and_spare_what_is_fixed() -> None:
    state = state_with([1.0, 0.01])
    movable = state.structures.movable.clone()
    movable[:7] = False
    fixed = replace(state, structures=replace(state.structures, movable=movable))
    move = ACTIONS.random(fixed, torch.Generator().manual_seed(0))
    lengths = move.displacements.norm(dim=1).view(2, -1)
    assert 0.18 < float(lengths[0].max()) <= 0.2
    assert 0.0018 < float(lengths[1].max()) <= 0.0021
    assert not move.displacements[:7].any()
    assert not move.strains.any()


def test_free_cells_are_strained_in_proportion() -> None:
    state = state_with([1.0, 0.01], cell_free=True)
    still, generator = Move.zero(state.structures), torch.Generator().manual_seed(0)
    sizes = torch.stack([ACTIONS.perturb(still, 0.2, generator, None, state).strain_sizes() for _ in range(200)])
    ratio = sizes.mean(dim=0)
    assert float(ratio[0] / ratio[1]) == pytest.approx(100, rel=0.15)
    assert float(ratio[0]) < 0.1


def test_without_states_there_is_no_unit() -> None:
    state = state_with([1.0])
    with pytest.raises(SettingsError, match="needs the states"):
        ACTIONS.perturb(Move.zero(state.structures), 0.1, torch.Generator())
