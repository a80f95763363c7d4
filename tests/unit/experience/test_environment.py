"""R1.4, R7.5: the environment is pure, batched, honest about ends and calls."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms

from relaxion.errors import StructureError
from relaxion.potentials.base import AsePotential, Potential
from relaxion.structures import Evaluation, Move, Outcome, State, Structures
from relaxion.train.data.alloys import fcc_alloys
from relaxion.train.data.perturbations import perturbation
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings, Reward, Source, largest_force


class Wall(Potential):
    """Springs towards x = 0 that answer NaN beyond x = 5 Å."""

    name = "wall"
    has_stress = False

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        assert not stresses
        energies = torch.zeros(structures.n_structures, dtype=structures.dtype)
        energies.index_add_(0, structures.structure_index, 0.5 * (structures.positions**2).sum(dim=1))
        forces = torch.where(structures.positions[:, :1] > 5.0, torch.nan, -structures.positions)
        return Evaluation(energies, forces, None)


class Fixed:
    """Starts that are always the same."""

    def __init__(self, images: list[Atoms], **options: Any) -> None:
        self.structures = Structures.from_ase(images, **options)

    def sample(self, generator: torch.Generator, n_structures: int) -> Structures:  # noqa: ARG002
        return self.structures.select(torch.arange(n_structures) % self.structures.n_structures)


def tensors_of(thing: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return {path: thing}
    found: dict[str, torch.Tensor] = {}
    if is_dataclass(thing):
        for field in fields(thing):
            found |= tensors_of(getattr(thing, field.name), f"{path}.{field.name}")
    return found


def assert_same(first: Any, second: Any) -> None:
    one, other = tensors_of(first), tensors_of(second)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def single(x: float, y: float = 0.0) -> Atoms:
    """Two atoms, the second fixed and far away."""
    atoms = Atoms("Cu2", positions=[[x, y, 0], [0, 0, 40]])
    atoms.set_constraint(FixAtoms([1]))
    return atoms


def environment_of(potential: Potential, images: list[Atoms], **settings: Any) -> Environment:
    return Environment(potential, Fixed(images), EnvironmentSettings(**settings))


def pull(state: State, *rows: list[float]) -> Move:
    """The first atom of each structure moves, the others rest."""
    displacements = torch.zeros_like(state.structures.positions)
    starts = state.structures.counts.cumsum(0) - state.structures.counts
    displacements[starts] = torch.tensor(rows, dtype=torch.float64)
    return Move(displacements, torch.zeros_like(state.structures.cells))


@pytest.fixture
def alloys(generator: torch.Generator) -> Environment:
    pool = Structures.concatenate([fcc_alloys(["Cu", "Au", "Ni"], 6, generator, n_atoms=n) for n in (2, 4, 6)])
    starts = PerturbedStarts(pool, [perturbation("rattle:0.15")])
    settings = EnvironmentSettings(n_structures=6)
    return Environment(AsePotential(EMT()), starts, settings)


def steepest(state: State, rate: float = 0.02) -> Move:
    return Move(rate * state.evaluation.forces, torch.zeros_like(state.structures.cells))


def test_reset_is_decided_by_the_generator(alloys: Environment, make_generator) -> None:
    assert_same(alloys.reset(make_generator(5)), alloys.reset(make_generator(5)))
    other = alloys.reset(make_generator(6))
    assert not torch.equal(other.structures.cells, alloys.reset(make_generator(5)).structures.cells)


def test_first_state(alloys: Environment, generator: torch.Generator) -> None:
    state = alloys.reset(generator)
    assert state.n_structures == 6
    assert torch.equal(state.calls, torch.ones(6, dtype=torch.int64))
    assert torch.equal(state.last_forces, state.evaluation.forces)
    assert torch.equal(state.last_move.displacements, torch.zeros_like(state.structures.positions))
    assert torch.equal(state.trust_radii, torch.full((6,), 0.3, dtype=torch.float64))
    assert len(state.structures.counts.unique()) > 1


def test_step_is_pure(alloys: Environment, generator: torch.Generator) -> None:
    state = alloys.reset(generator)
    kept = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
    move = steepest(state)
    first, second = alloys.step(state, move), alloys.step(state, move)
    assert_same(first, second)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors_of(state).items())


def test_step_does_what_it_says(alloys: Environment, generator: torch.Generator) -> None:
    state = alloys.reset(generator)
    transition = alloys.step(state, steepest(state), Source.EXPERT)
    after = transition.next_state
    torch.testing.assert_close(
        after.structures.positions, state.structures.positions + transition.executed.displacements
    )
    torch.testing.assert_close(
        Move.between(state.structures, after.structures).displacements, after.last_move.displacements
    )
    assert_same(after.evaluation, alloys.potential(after.structures))
    assert torch.equal(after.last_forces, state.evaluation.forces)
    assert torch.equal(after.calls, state.calls + 1)
    assert torch.equal(transition.source, torch.full((6,), int(Source.EXPERT)))
    expected = torch.log10(
        largest_force(state.structures, state.evaluation) / largest_force(after.structures, after.evaluation)
    )
    torch.testing.assert_close(transition.reward, expected)


def test_steepest_descent_converges_and_renews(alloys: Environment, generator: torch.Generator) -> None:
    state = alloys.reset(generator)
    outcomes = []
    for _ in range(60):
        transition = alloys.step(state, steepest(state))
        outcomes.extend(transition.outcome[transition.finished].tolist())
        state = alloys.renew(transition, generator)
    assert outcomes.count(Outcome.CONVERGED) >= 3
    assert set(outcomes) <= {Outcome.CONVERGED, Outcome.STEP_LIMIT}


def test_renew_replaces_the_finished_and_keeps_the_rest(springs, make_generator) -> None:
    pool = Structures.from_ase([Atoms("Cu2", positions=[[0, 0, 0], [3, 0, 0]]), Atoms("Cu", positions=[[0, 3, 0]])])
    far = PerturbedStarts(pool, [lambda s, _: replace(s, positions=s.positions + 0.5)])
    environment = Environment(springs, far, EnvironmentSettings(n_structures=8))
    state = environment.reset(make_generator(1))
    rates = torch.tensor([1.0, 0.1] * 4, dtype=torch.float64)
    move = Move(state.evaluation.forces, torch.zeros_like(state.structures.cells)).scaled(rates, state.structures)
    settings = environment.settings.model_copy(update={"max_displacement_angstrom": 2.0})
    environment = Environment(springs, far, settings)
    transition = environment.step(state, move)
    assert transition.finished.tolist() == [True, False] * 4
    renewed = environment.renew(transition, make_generator(2))
    running = ~transition.finished
    assert_same(renewed.select(running), transition.next_state.select(running))
    assert renewed.calls.tolist() == [1, 2] * 4
    assert_same(renewed, environment.renew(transition, make_generator(2)))


def test_outcomes_side_by_side(make_generator) -> None:
    """One structure for each outcome, all in one step."""
    blocked = Atoms("Cu2", positions=[[0.9, 0, 0], [0.2, 0, 0]])
    images = [single(1.0), single(0.3), single(1.0), blocked, single(4.9)]
    environment = environment_of(Wall(), images, n_structures=5)
    state = environment.reset(make_generator(0))
    move = pull(state, [-0.2, 0, 0], [-0.3, 0, 0], [-1e-7, 0, 0], [-0.3, 0, 0], [0.4, 0, 0])
    transition = environment.step(state, move)
    expected = [Outcome.RUNNING, Outcome.CONVERGED, Outcome.STALLED, Outcome.BLOCKED, Outcome.NON_FINITE]
    assert transition.outcome.tolist() == expected
    # only convergence ends the bootstrap: giving up must never be cheaper than going on
    assert transition.discount.tolist() == [0.95, 0.0, 0.95, 0.95, 0.95]
    assert transition.back_off[3] == pytest.approx(1, abs=1e-6)
    assert transition.reward[3] == pytest.approx(-0.5, abs=1e-6)


def test_failure_of_the_potential_keeps_the_last_finite_state(make_generator) -> None:
    environment = environment_of(Wall(), [single(4.9), single(1.0)], n_structures=2)
    state = environment.reset(make_generator(0))
    calls = environment.potential.calls
    transition = environment.step(state, pull(state, [0.4, 0, 0], [-0.1, 0, 0]))
    after = transition.next_state
    assert all(torch.isfinite(t).all() for t in tensors_of(transition).values() if t.is_floating_point())
    assert torch.equal(after.structures.positions[:2], state.structures.positions[:2])
    assert torch.equal(after.evaluation.forces[:2], state.evaluation.forces[:2])
    assert after.calls.tolist() == [2, 2]
    assert environment.potential.calls == calls + 2
    assert transition.reward[0] == pytest.approx(-1.0)
    assert transition.executed.displacements[0, 0] == pytest.approx(0.4)  # what was tried, and what failed
    assert after.structures.positions[2, 0] == pytest.approx(0.9)


def test_step_limit(springs, make_generator) -> None:
    environment = environment_of(springs, [single(1.0)], n_structures=1, max_force_calls=4)
    state = environment.reset(make_generator(0))
    outcomes = []
    for _ in range(3):
        transition = environment.step(state, pull(state, [-0.01, 0, 0]))
        outcomes.append(int(transition.outcome[0]))
        state = transition.next_state
    assert outcomes == [Outcome.RUNNING, Outcome.RUNNING, Outcome.STEP_LIMIT]
    assert int(state.calls[0]) == 4 == springs.calls


def test_bound_acts_on_the_length_of_the_whole_move(springs, make_generator) -> None:
    atoms = Atoms("Cu2", positions=[[1.0, 0, 0], [0, 4.0, 30]])
    environment = environment_of(springs, [atoms], n_structures=1, max_displacement_angstrom=0.5)
    state = environment.reset(make_generator(0))
    wanted = torch.tensor([[3.0, 4.0, 0], [0, 1.0, 0]], dtype=torch.float64)
    transition = environment.step(state, Move(wanted, torch.zeros(1, 3, 3, dtype=torch.float64)))
    torch.testing.assert_close(transition.executed.displacements, wanted / 10)
    torch.testing.assert_close(transition.proposed.displacements, wanted)


def test_fixed_atoms_and_fixed_cells_stay(springs, make_generator) -> None:
    environment = environment_of(springs, [single(1.0)], n_structures=1)
    state = environment.reset(make_generator(0))
    move = Move(torch.full((2, 3), 0.1, dtype=torch.float64), torch.full((1, 3, 3), 0.1, dtype=torch.float64))
    transition = environment.step(state, move)
    assert torch.equal(transition.next_state.structures.positions[1], state.structures.positions[1])
    assert torch.equal(transition.proposed.displacements[1], torch.zeros(3, dtype=torch.float64))
    assert torch.equal(transition.proposed.strains, torch.zeros(1, 3, 3, dtype=torch.float64))


def strained_copper(cell_free: bool) -> Environment:
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell * 1.02, scale_atoms=True)
    starts = Fixed([atoms, atoms.repeat((1, 1, 2))], cell_free=cell_free)
    return Environment(AsePotential(EMT()), starts, EnvironmentSettings(n_structures=2))


def test_free_cell_relaxes_along_its_stress(make_generator) -> None:
    """A perfect crystal at a wrong volume has no forces on atoms: only the cell has something to do."""
    environment = strained_copper(cell_free=True)
    state = environment.reset(make_generator(0))
    volumes = [state.structures.volumes / state.structures.counts]
    for _ in range(12):
        stresses = state.evaluation.stresses
        assert stresses is not None
        strains = -stresses * (state.structures.volumes / state.structures.counts)[:, None, None] / 30
        transition = environment.step(state, Move(torch.zeros_like(state.structures.positions), strains))
        state = transition.next_state
        volumes.append(state.structures.volumes / state.structures.counts)
        if bool(transition.finished.all()):
            break
    assert transition.outcome.tolist() == [Outcome.CONVERGED] * 2
    assert transition.discount.tolist() == [0.0, 0.0]
    assert (volumes[-1] < volumes[0] * 0.98).all()
    expected = bulk("Cu").get_volume()
    np.testing.assert_allclose(volumes[-1].numpy(), expected, rtol=0.03)


def test_fixed_cell_of_a_perfect_crystal_has_nothing_to_relax(make_generator) -> None:
    with pytest.raises(StructureError, match="2 are relaxed already"):
        strained_copper(cell_free=False).reset(make_generator(0))


def test_strain_is_bounded(make_generator) -> None:
    environment = strained_copper(cell_free=True)
    state = environment.reset(make_generator(0))
    strains = torch.full((2, 3, 3), -0.3, dtype=torch.float64)
    transition = environment.step(state, Move(torch.zeros_like(state.structures.positions), strains))
    torch.testing.assert_close(transition.executed.strain_sizes(), torch.full((2,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(
        Move.between(state.structures, transition.next_state.structures).strains, transition.executed.strains
    )


def test_only_the_symmetric_part_of_a_strain_is_proposed_and_executed(make_generator) -> None:
    environment = strained_copper(cell_free=True)
    state = environment.reset(make_generator(0))
    raw = 0.01 * torch.randn(2, 3, 3, dtype=torch.float64, generator=make_generator(1))
    transition = environment.step(state, Move(torch.zeros_like(state.structures.positions), raw))
    assert torch.equal(transition.proposed.strains, (raw + raw.transpose(1, 2)) / 2)
    assert torch.equal(transition.executed.strains, transition.executed.strains.transpose(1, 2))
    done = Move.between(state.structures, transition.next_state.structures).strains
    torch.testing.assert_close(done, done.transpose(1, 2))
    assert done.norm() > 0.01


def test_wild_starts_are_drawn_again(make_generator) -> None:
    """Half of the draws are NaN: none of them gets through, and every evaluation is counted."""

    class Sometimes:
        def sample(self, generator: torch.Generator, n_structures: int) -> Structures:
            good = torch.rand(n_structures, generator=generator) < 0.5
            return Structures.from_ase([single(1.0 if ok else 6.0) for ok in good.tolist()])

    environment = Environment(Wall(), Sometimes(), EnvironmentSettings(n_structures=50))
    state = environment.reset(make_generator(0))
    assert (state.structures.positions[::2, 0] == 1.0).all()
    assert environment.potential.calls > 75
    with pytest.raises(StructureError, match=r"50 of 50 starts.*not finite"):
        environment_of(Wall(), [single(6.0)], n_structures=50).reset(make_generator(0))


def test_force_limit_of_starts(springs, make_generator, monkeypatch) -> None:
    monkeypatch.setattr("relaxion.train.experience.environment.LARGEST_START_FORCE", 0.5)
    with pytest.raises(StructureError, match=r"above 0\.5 eV/Å"):
        environment_of(springs, [single(1.0)]).reset(make_generator(0))


def test_two_thousand_structures_at_once(springs, make_generator) -> None:
    pool = Structures.from_ase([Atoms(f"Cu{n}", positions=[[3 * k, 0, 0] for k in range(n)]) for n in (2, 3, 5)])
    starts = PerturbedStarts(pool, [perturbation("rattle:0.3")])
    environment = Environment(springs, starts, EnvironmentSettings(n_structures=2000, discount_factor=0.9))
    generator = make_generator(4)
    state = environment.reset(generator)
    transition = environment.step(state, Move(0.7 * state.evaluation.forces, torch.zeros_like(state.structures.cells)))
    state = environment.renew(transition, generator)
    assert transition.n_structures == state.n_structures == 2000
    assert torch.isfinite(transition.reward).all()
    assert transition.reward.mean() == pytest.approx(-np.log10(0.3), abs=0.05)
    # one structure alone gives the same as in company
    which = torch.tensor([123])
    alone = environment.step(
        transition.state.select(which), transition.proposed.select(transition.state.structures.counts, which)
    )
    assert_same(alone, transition.select(which))


def test_moves_may_come_in_float32(alloys: Environment, generator: torch.Generator) -> None:
    state = alloys.reset(generator)
    move = steepest(state).to(torch.float32)
    transition = alloys.step(state, move)
    assert transition.next_state.structures.positions.dtype == torch.float64
    assert_same(transition, alloys.step(state, move.to(torch.float64)))


def test_source_may_differ_per_structure(springs, make_generator) -> None:
    environment = environment_of(springs, [single(1.0), single(1.2)], n_structures=2)
    state = environment.reset(make_generator(0))
    sources = torch.tensor([int(Source.RANDOM), int(Source.EXPERT)])
    transition = environment.step(state, pull(state, [-0.1, 0, 0], [-0.1, 0, 0]), sources)
    assert torch.equal(transition.source, sources)


def test_reward_is_a_choice(springs, make_generator) -> None:
    reward = Reward({"step": 1.0})
    environment = Environment(springs, Fixed([single(1.0)]), EnvironmentSettings(n_structures=1), reward)
    state = environment.reset(make_generator(0))
    assert environment.step(state, pull(state, [-0.1, 0, 0])).reward.tolist() == [-1.0]


def test_alloys_are_close_to_their_equilibrium_volume(generator: torch.Generator) -> None:
    coppers = fcc_alloys(["Cu"], 2, generator, n_atoms=12)
    assert coppers.counts.tolist() == [12, 12]
    assert (coppers.volumes / 12).tolist() == pytest.approx([11.8, 11.8], abs=0.2)
