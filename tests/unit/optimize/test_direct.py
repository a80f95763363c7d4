"""A direct policy under guard: its move is the step, and everything else is as springs say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter

from relaxion import Outcome, Relaxer
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.optimizer.choice import new_stepper
from relaxion.optimizer.hessian.base import Base, Hessian, Models, Past, hessians_at
from relaxion.optimizer.hessian.learned import DirectMoves, states_at
from relaxion.optimizer.hessian.springs import SpringSettings, springs_at
from relaxion.optimizer.point import Point, read_point
from relaxion.optimizer.step import Stepper, propose
from relaxion.structures import Move, State


@pytest.fixture(scope="module")
def policy() -> AtomPolicy:
    settings = AtomNetworkSettings(channels=8, n_radial=4)
    return AtomPolicy(MoveActions(0.2, 0.05), settings, torch.Generator().manual_seed(1))


def alloy(seed: int = 4) -> Atoms:
    generator = np.random.default_rng(seed)
    atoms = bulk("Cu", a=3.7, cubic=True) * (2, 1, 1)
    atoms.symbols[[1, 6]] = "Au"
    atoms.positions += generator.normal(0, 0.1, atoms.positions.shape)
    atoms.calc = EMT()
    return atoms


def asked(source: DirectMoves, point: Point, past: Past | None = None) -> Hessian | None:
    return hessians_at([Base(point, past or Past())], [Models(policy=source)])[0].learned


def test_its_step_is_the_policys_move(policy: AtomPolicy) -> None:
    atoms = alloy()
    atoms.set_constraint(FixAtoms([3]))
    target = FrechetCellFilter(atoms, mask=[1, 1, 1, 0, 0, 0])
    point = read_point(target)
    assert point.geometry is not None
    stiffness = asked(DirectMoves(policy), point)
    assert stiffness is not None
    step = stiffness.solve(point.forces)
    with torch.no_grad():
        move = policy(states_at([point]))
    np.testing.assert_allclose(step[:8], move.displacements.double().numpy())
    assert np.array_equal(step[3], np.zeros(3))
    np.testing.assert_allclose(
        np.diag(step[8:]), point.geometry.cell_factor * np.diag(move.strains[0].numpy()), rtol=1e-6
    )
    assert np.count_nonzero(step[8:] - np.diag(np.diag(step[8:]))) == 0, "what the mask forbids stays"
    (springs,) = springs_at([point.geometry], SpringSettings())
    other = np.ones_like(step)
    np.testing.assert_array_equal(stiffness.solve(other), springs.solve(other))
    np.testing.assert_array_equal(stiffness.apply(other), springs.apply(other))


class Remembering(torch.nn.Module):
    """Keeps the states it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[State] = []

    def forward(self, state: State) -> Move:
        self.states.append(state)
        return Move(0.01 * state.evaluation.forces, torch.zeros((1, 3, 3), dtype=torch.float64))


def test_it_sees_the_point_before() -> None:
    policy, atoms = Remembering(), alloy()
    metrics = DirectMoves(policy)  # pyright: ignore[reportArgumentType]
    first = read_point(atoms)
    asked(metrics, first)
    atoms.positions[2, 0] += 0.1
    second, past = read_point(atoms), Past(2, first.coordinates, first.forces)
    asked(metrics, second, past)
    assert len(policy.states) == 2
    begin, later = policy.states
    assert begin.last_move.displacements.abs().max() == 0
    np.testing.assert_allclose(
        later.last_move.displacements.numpy(), second.coordinates - first.coordinates, atol=1e-15
    )
    np.testing.assert_array_equal(later.last_forces.numpy(), first.forces)
    assert [int(state.calls) for state in policy.states] == [1, 2]


def test_its_history_is_the_guards_so_a_reset_clears_it_and_a_restart_keeps_it() -> None:
    """Whatever was relaxed before, a state shows the base before or, at the start, none."""

    def chain_of(policy: Remembering) -> Stepper:
        return new_stepper(policy_model=DirectMoves(policy, trust=0.2))  # pyright: ignore[reportArgumentType]

    def advance(atoms: Atoms, chain: Stepper) -> None:
        (proposal,) = propose([chain], [read_point(atoms)])
        atoms.set_positions(proposal.base.coordinates + proposal.step)

    straight, again = Remembering(), Remembering()
    chain, atoms = chain_of(straight), alloy()
    for _ in range(3):
        advance(atoms, chain)
    resumed, moved = chain_of(again), atoms.copy()
    moved.calc = EMT()
    resumed.restore(json.loads(json.dumps(chain.snapshot(), default=np.ndarray.tolist)))
    advance(atoms, chain)
    advance(moved, resumed)
    expected, found = straight.states[-1], again.states[-1]
    assert float(expected.last_move.displacements.abs().max()) > 0
    torch.testing.assert_close(found.last_move.displacements, expected.last_move.displacements, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.last_forces, expected.last_forces, rtol=0, atol=1e-10)
    assert int(found.calls) == int(expected.calls) == 4
    assert float(found.trust_radii) == 0.2

    chain.reset()  # somebody moved the atoms
    advance(alloy(9), chain)
    assert float(straight.states[-1].last_move.displacements.abs().max()) == 0
    assert int(straight.states[-1].calls) == 1


def test_it_relaxes_from_a_file_and_the_guard_keeps_its_own_count(tmp_path, make_bundle, policy: AtomPolicy) -> None:
    """Untrained, so the guard has to step in; nothing fails for it."""
    file = make_bundle(tmp_path / "direct.safetensors", policy)
    for target in (alloy(), FrechetCellFilter(alloy())):
        opt = Relaxer(target, logfile=None, policy=file)
        assert opt.policy_used == "direct"
        assert opt.run(fmax=0.05, steps=200)
        assert opt.outcome is Outcome.CONVERGED
        made_by_others = [entry for entry in opt.history if entry.method not in ("start", "policy")]
        assert opt.fallback_used == len(made_by_others) > 0


def test_elements_it_does_not_know(policy: AtomPolicy) -> None:
    assert asked(DirectMoves(policy, elements=[29]), read_point(alloy())) is None
