"""Bounds by length, densities of what is squashed, moves as actions."""

from __future__ import annotations

import math

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms

from relaxion.errors import SettingsError
from relaxion.model.actions import MoveActions, uniform_in_ball
from relaxion.model.atom_policies import gaussian_log_density, log_volume_change, squashed
from relaxion.model.stiffness import strain_matrices, strain_vectors, symmetric_outer
from relaxion.structures import Evaluation, Move, State, Structures


def state_of(structures: Structures) -> State:
    evaluation = Evaluation(
        torch.zeros(structures.n_structures), torch.zeros_like(structures.positions), torch.zeros_like(structures.cells)
    )
    return State.without_past(structures, evaluation, 1.0)


@pytest.mark.parametrize("components", [3, 6])
@pytest.mark.parametrize("length", [1e-9, 1e-4, 0.1, 1.0, 4.0])
def test_volume_change_is_the_determinant(components: int, length: float, generator: torch.Generator) -> None:
    vector = torch.randn(components, generator=generator, dtype=torch.float64)
    vector = length * vector / vector.norm()
    jacobian = torch.autograd.functional.jacobian(squashed, vector)
    assert float(log_volume_change(vector)) == pytest.approx(float(torch.logdet(jacobian)), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_volume_change_of_long_vectors_is_exact(dtype: torch.dtype) -> None:
    """1 - tanh² has no digits left there; -28.6 at 15 along, 2 log(1/15) across."""
    for length in (15.0, 80.0, 1e4):
        vector = torch.tensor([0.0, length, 0.0], dtype=dtype)
        exact = 2 * (math.log(2) - length) - 2 * math.log(length)
        assert float(log_volume_change(vector)) == pytest.approx(exact, rel=1e-6)


def test_gradients_stay_finite_from_zero_to_very_long() -> None:
    for length in (0.0, 1e-12, 1e-3, 1.0, 30.0, 1e6):
        vector = torch.tensor([length, 0.0, 0.0], requires_grad=True)
        (log_volume_change(vector) + squashed(vector).sum()).backward()
        assert vector.grad is not None
        assert bool(torch.isfinite(vector.grad).all())


def test_slope_at_zero_is_one() -> None:
    jacobian = torch.autograd.functional.jacobian(squashed, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(jacobian, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-9)


def test_density_of_the_squashed_gaussian_integrates_to_one() -> None:
    """Over the unit ball, with the mean off its centre: ∫ 2π ρ² p dρ dcosθ."""
    mean, deviation = torch.tensor([0.0, 0.0, 0.7], dtype=torch.float64), 0.6
    radii = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    cosines = (torch.arange(400, dtype=torch.float64) + 0.5) / 200 - 1
    rho, cosine = torch.meshgrid(radii, cosines, indexing="ij")
    before = torch.atanh(rho)  # length before squashing
    vectors = torch.stack([before * torch.sqrt(1 - cosine**2), torch.zeros_like(rho), before * cosine], dim=-1)
    noise = (vectors - mean) / deviation
    logs = gaussian_log_density(noise, torch.full_like(rho, math.log(deviation))) - log_volume_change(vectors)
    total = (2 * math.pi * rho**2 * logs.exp()).sum() / 4000 / 200
    assert float(total) == pytest.approx(1.0, abs=1e-4)


def test_strains_as_six_numbers_keep_their_norm(generator: torch.Generator) -> None:
    vectors = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    matrices = strain_matrices(vectors)
    assert torch.equal(matrices, matrices.mT)
    torch.testing.assert_close(matrices.flatten(1).norm(dim=1), vectors.norm(dim=1))
    torch.testing.assert_close(strain_vectors(matrices), vectors)


def test_symmetric_outer_by_hand() -> None:
    product = symmetric_outer(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.0, 1.0, 3.0]))
    torch.testing.assert_close(product, torch.tensor([[0.0, 0.5, 1.5], [0.5, 2.0, 3.0], [1.5, 3.0, 0.0]]))


def test_bounds_act_on_lengths() -> None:
    actions = MoveActions(max_displacement_angstrom=0.5, max_strain=0.1)
    strains = torch.stack([torch.eye(3), 0.01 * torch.eye(3)])
    move = actions.bound(Move(torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]]), strains))
    torch.testing.assert_close(move.displacements, torch.tensor([[0.3, 0.4, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(move.strain_sizes(), torch.tensor([0.1, 0.01 * 3**0.5]))
    torch.testing.assert_close(move.strains[0], 0.1 / 3**0.5 * torch.eye(3))


def test_noise_is_isotropic_in_units_of_the_bounds_and_cut_by_length(generator: torch.Generator) -> None:
    actions = MoveActions(max_displacement_angstrom=0.5, max_strain=0.1)
    still = Move(torch.zeros(40_000, 3), torch.zeros(40_000, 3, 3))
    noisy = actions.perturb(still, 0.2, generator)
    torch.testing.assert_close(noisy.displacements.std(dim=0), torch.full((3,), 0.1), rtol=0.02, atol=0)
    torch.testing.assert_close(strain_vectors(noisy.strains).std(dim=0), torch.full((6,), 0.02), rtol=0.02, atol=0)
    cut = actions.perturb(still, 0.2, generator, clip=0.3)
    assert float(cut.displacements.norm(dim=1).max()) == pytest.approx(0.15, rel=1e-5)
    assert float(cut.strain_sizes().max()) == pytest.approx(0.03, rel=1e-5)
    assert torch.equal(actions.perturb(still, torch.tensor(0.0), generator).displacements, still.displacements)


def test_random_moves_fill_the_ball(generator: torch.Generator) -> None:
    for components in (3, 6):
        radii = uniform_in_ball(50_000, components, generator, torch.float64).norm(dim=1)
        assert float(radii.max()) <= 1 + 1e-12
        shares = (radii**components).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        torch.testing.assert_close(shares, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), rtol=0, atol=0.01)


def test_only_what_may_move_is_drawn_and_counted(generator: torch.Generator) -> None:
    fixed = bulk("Cu", cubic=True)
    fixed.set_constraint(FixAtoms([0, 2]))
    structures = Structures.from_ase([fixed, Atoms("H"), bulk("Al")], cell_free=[False, False, True])
    actions, state = MoveActions(0.4, 0.05), state_of(structures)
    assert actions.dimensions(state).tolist() == [6.0, 3.0, 9.0]
    move = actions.random(state, generator)
    assert (move.displacements.norm(dim=1) > 0).tolist() == structures.movable.tolist()
    assert (move.strain_sizes() > 0).tolist() == [False, False, True]
    assert float(move.displacements.norm(dim=1).max()) <= 0.4


@pytest.mark.parametrize("bounds", [(0.0, 0.1), (0.5, -1.0), (float("inf"), 0.1), (0.5, float("nan"))])
def test_senseless_bounds_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(SettingsError, match="above 0"):
        MoveActions(*bounds)


def test_one_scale_for_all(generator: torch.Generator) -> None:
    with pytest.raises(SettingsError, match="one scale"):
        MoveActions().perturb(Move(torch.zeros(2, 3), torch.zeros(1, 3, 3)), torch.ones(2, 1), generator)
