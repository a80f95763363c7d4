"""The stiffness: positive definite and downhill for any weights, the same in every frame and company (R6.1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_equivariance import (
    TOLERANCES,
    Answer,
    Case,
    both_precisions,
    make_case,
    orthogonal,
    reordered,
    repeated,
    selected,
    turned,
)

from relaxion.model.actions import INFORMATION, MoveActions
from relaxion.model.atom_policies import StiffnessGaussianPolicy, StiffnessPolicy
from relaxion.model.solve import solve
from relaxion.model.stiffness_network import StiffnessNetwork, StiffnessSettings, pulls_of

KINDS = {
    "plain": (StiffnessPolicy, {}),
    "gated": (StiffnessPolicy, {"environment_information": tuple(INFORMATION)}),
    "short-sighted": (StiffnessPolicy, {"looks_ahead": False, "sees_forces": False, "n_coordinates": 0}),
    "remembering": (StiffnessPolicy, {"sees_history": True}),
    "softening": (StiffnessPolicy, {"softens": True}),
    "gaussian": (StiffnessGaussianPolicy, {"environment_information": ("log_largest_force",)}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def policy_of(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> StiffnessPolicy:
    make, changes = KINDS[kind]
    chosen = StiffnessSettings.read({"channels": 6, "n_hidden": 8, "cutoff_angstrom": 4.5, **changes})
    policy = make(MoveActions(0.5, 0.1), chosen, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # far from the springs, where every part speaks
        for layer in (policy.network.to_springs, policy.network.to_floors.answer, policy.network.to_arms):
            layer.weight.mul_(5)
    return policy.to(dtype)


def ask(policy: StiffnessPolicy, case: Case) -> Answer:
    with torch.no_grad():
        if isinstance(policy, StiffnessGaussianPolicy):
            # three numbers per structure that do not turn: the diagonal of the cells' noise
            move, densities, _ = policy.sample_with(case.state, case.cell_noise[:, :3].to(policy.network.dtype))
            return Answer(densities, move.displacements, move.strains)
        move = policy(case.state)
    return Answer(policy.gate_factors(case.state).detach(), move.displacements, move.strains)


def with_noise_of(case: Case, other: Case) -> Case:
    """Noise of factors does not turn with the frame."""
    return replace(case, cell_noise=other.cell_noise)


@both_precisions
@every_kind
@pytest.mark.parametrize("determinant", [1.0, -1.0], ids=["rotation", "improper"])
def test_turning_and_mirroring(kind: str, dtype: torch.dtype, determinant: float) -> None:
    case, policy, matrix = make_case(), policy_of(kind, dtype), orthogonal(5, determinant)
    plain = ask(policy, case)
    moved = ask(policy, with_noise_of(turned(case, matrix, torch.zeros(7, 3, dtype=torch.float64)), case))
    assert plain.vectors is not None
    assert plain.matrices is not None
    expected = Answer(plain.scalars, plain.vectors.double() @ matrix.T, matrix @ plain.matrices.double() @ matrix.T)
    expected.assert_close(moved, TOLERANCES[dtype])


@both_precisions
@every_kind
def test_shifting(kind: str, dtype: torch.dtype) -> None:
    case, policy = make_case(), policy_of(kind, dtype)
    shift = 20 * torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ask(policy, case).assert_close(ask(policy, turned(case, torch.eye(3).double(), shift)), TOLERANCES[dtype])


@both_precisions
@every_kind
def test_numbering(kind: str, dtype: torch.dtype) -> None:
    case, policy = make_case(), policy_of(kind, dtype)
    index = case.state.structures.structure_index
    order = torch.argsort(index + torch.rand(len(index), generator=torch.Generator().manual_seed(4)))
    plain = ask(policy, case)
    assert plain.vectors is not None
    replace(plain, vectors=plain.vectors[order]).assert_close(ask(policy, reordered(case, order)), TOLERANCES[dtype])


@both_precisions
@every_kind
def test_one_is_many(kind: str, dtype: torch.dtype) -> None:
    case, policy = make_case(), policy_of(kind, dtype)
    alone = [ask(policy, selected(case, number)) for number in range(7)]
    joined = [torch.cat([getattr(a, part) for a in alone]) for part in ("scalars", "vectors", "matrices")]
    ask(policy, case).assert_close(Answer(*joined), TOLERANCES[dtype])


@both_precisions
@every_kind
def test_repeated_cells(kind: str, dtype: torch.dtype) -> None:
    case, policy = make_case(), policy_of(kind, dtype)
    for number in (0, 4, 5):
        one = selected(case, number)
        single, double = ask(policy, one), ask(policy, repeated(one))
        assert single.vectors is not None
        replace(single, vectors=single.vectors.repeat(2, 1)).assert_close(double, TOLERANCES[dtype])


@every_kind
def test_other_states_get_other_answers(kind: str) -> None:
    one, other = ask(policy_of(kind), make_case(0)), ask(policy_of(kind), make_case(1))
    for part in ("vectors", "matrices"):
        assert float((getattr(one, part) - getattr(other, part)).abs().max()) > 1e-3


@every_kind
def test_both_solvers_agree(kind: str) -> None:
    case, policy = make_case(), policy_of(kind)
    with torch.no_grad():
        stiffness, pulls = policy.network(case.state), pulls_of(case.state)
        by_factor, by_gradients = solve(stiffness, pulls, "dense"), solve(stiffness, pulls, "gradients")
    for part in ("atoms", "cells"):
        one, other = getattr(by_factor, part), getattr(by_gradients, part)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(one.abs().max()))
        assert float(one.abs().max()) > 1e-3


@settings(deadline=None, max_examples=25)
@given(seed=some.integers(0, 10**6), size=some.floats(0, 30), history=some.booleans(), single=some.booleans())
def test_positive_definite_and_downhill_for_any_weights(seed: int, size: float, history: bool, single: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = StiffnessSettings(channels=5, n_hidden=6, n_layers=1, cutoff_angstrom=4.0, sees_history=history)
    network = StiffnessNetwork(chosen, generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    network = network if single else network.double()
    state = make_case(seed).state
    with torch.no_grad():
        stiffness, pulls = network(state), pulls_of(state)
        matrices = stiffness.to(torch.float64).matrices
        answer = solve(stiffness, pulls)
    for matrix in matrices:
        torch.testing.assert_close(matrix, matrix.mT, rtol=1e-12, atol=1e-12 * float(matrix.abs().max()))
        assert float(torch.linalg.eigvalsh(matrix).amin()) > 0
    work, sizes = answer.dot(pulls, state.structures), pulls.dot(pulls, state.structures)
    assert bool((work[sizes > 0] > 0).all())
    assert bool(torch.isfinite(answer.atoms).all())
    assert bool(torch.isfinite(answer.cells).all())


def test_no_net_shift_where_forces_cancel() -> None:
    """Nothing in B holds a structure in space but the floor, which is the same for all of its atoms."""
    case, policy = make_case(), policy_of("plain")
    structures = case.state.structures
    number = 0  # a free crystal
    rows = structures.structure_index == number
    forces = case.state.evaluation.forces.clone()
    forces[rows] -= forces[rows].mean(dim=0)
    state = replace(case.state, evaluation=replace(case.state.evaluation, forces=forces))
    with torch.no_grad():
        answer = policy.newton(state)
    assert float(answer.atoms[rows].abs().max()) > 1e-3
    assert float(answer.atoms[rows].mean(dim=0).abs().max()) < 1e-12
