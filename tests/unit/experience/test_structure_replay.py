"""Replay of structures: states once, transitions joined to their own states, n-step sums, both capacities, resume."""

import pytest
import torch

from relaxion.errors import SettingsError
from relaxion.potentials.registry import potential
from relaxion.structures import Move, Outcome, State, Structures
from relaxion.train.data import perturbations as perturb
from relaxion.train.data.alloys import fcc_alloys, pack
from relaxion.train.data.starts import PerturbedStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings
from relaxion.train.experience.structure_replay import NOBODY, StructureReplay, capacity_advice
from relaxion.train.experience.vectors import draw_without_replacement


def environment(n_structures=6, max_force_calls=5) -> Environment:
    generator = torch.Generator().manual_seed(0)
    alloys = [fcc_alloys(["Cu", "Au", "Pd"], 3, generator, n_atoms=size) for size in (2, 4, 5, 8)]
    minima = Structures.concatenate(alloys)
    starts = PerturbedStarts(minima, [perturb.perturbation("rattle:0.15")])
    settings = EnvironmentSettings(n_structures=n_structures, max_force_calls=max_force_calls, discount_factor=0.5)
    return Environment(potential("emt"), starts, settings)


def walk(world: Environment, replay: StructureReplay, steps: int, seed=1) -> list:
    """Random descent steps; everything that was added, kept as it was."""
    generator = torch.Generator().manual_seed(seed)
    state, kept = world.reset(generator), []
    for _ in range(steps):
        noise = 0.02 * torch.randn(state.structures.positions.shape, generator=generator, dtype=torch.float64)
        move = Move(0.03 * state.evaluation.forces + noise, torch.zeros_like(state.structures.cells))
        transition = world.step(state, move)
        replay.add(transition)
        kept.append(transition)
        state = world.renew(transition, generator)
    return kept


def replay_of(transitions=400, atoms=8000, n_steps=1, dtype=torch.float64) -> StructureReplay:
    return StructureReplay(transitions, atoms, generator=torch.Generator().manual_seed(3), n_steps=n_steps, dtype=dtype)


def same(first: State, second: State) -> bool:
    pairs = [
        (first.structures.positions, second.structures.positions),
        (first.structures.cells, second.structures.cells),
        (first.structures.periodic, second.structures.periodic),
        (first.structures.atomic_numbers, second.structures.atomic_numbers),
        (first.structures.structure_index, second.structures.structure_index),
        (first.structures.movable, second.structures.movable),
        (first.structures.cell_free, second.structures.cell_free),
        (first.evaluation.energies, second.evaluation.energies),
        (first.evaluation.forces, second.evaluation.forces),
        (first.evaluation.stresses, second.evaluation.stresses),
        (first.last_move.displacements, second.last_move.displacements),
        (first.last_move.strains, second.last_move.strains),
        (first.last_forces, second.last_forces),
        (first.trust_radii, second.trust_radii),
        (first.calls, second.calls),
    ]
    return all(torch.equal(one, other) for one, other in pairs)


def test_every_transition_joins_its_own_states_to_the_bit():
    replay = replay_of()
    kept = walk(environment(), replay, 20)
    assert len(replay) == 120
    for number, transition in enumerate(kept):
        batch = replay.assemble(torch.arange(6 * number, 6 * number + 6))
        assert same(batch.observations, transition.state)
        assert same(batch.next_observations, transition.next_state)
        assert torch.equal(batch.actions.displacements, transition.proposed.displacements)
        assert torch.equal(batch.actions.strains, transition.proposed.strains)
        assert torch.equal(batch.rewards, transition.reward)
        assert torch.equal(batch.discounts, transition.discount)


def test_each_state_is_stored_once():
    replay = replay_of()
    kept = walk(environment(), replay, 20)
    fresh_starts = 6 + sum(int(transition.finished.sum()) for transition in kept[:-1])
    assert replay.store.newest == 120 + fresh_starts
    assert fresh_starts > 12


def test_the_same_states_come_from_a_ring_that_has_gone_round():
    small, large = replay_of(60, 900), replay_of(4000, 80_000)
    world = environment()
    kept = walk(world, small, 60)
    walk(world, large, 60)
    assert small.newest == large.newest == 360
    assert 12 <= len(small) <= 60
    numbers = torch.arange(small.oldest, small.newest)
    ours, reference = small.assemble(numbers), large.assemble(numbers)
    assert same(ours.observations, reference.observations)
    assert same(ours.next_observations, reference.next_observations)
    assert torch.equal(ours.rewards, reference.rewards)
    assert same(small.assemble(numbers[-6:]).next_observations, kept[-1].next_state)


@pytest.mark.parametrize("atoms", [400, 700, 1500])
def test_the_atom_capacity_is_kept_whatever_the_sizes(atoms):
    replay = replay_of(10_000, atoms)
    walk(environment(max_force_calls=8), replay, 40)
    alive = torch.arange(replay.store.oldest, replay.store.newest)
    _, rows, _ = replay.store.rows(alive)
    assert len(rows) == len(rows.unique()) <= atoms
    assert int(rows.max()) < atoms


def test_n_step_sums_follow_the_relaxation_and_stop_at_its_end():
    long, single = replay_of(n_steps=3), replay_of()
    world = environment(n_structures=4, max_force_calls=4)
    kept = walk(world, long, 15)
    walk(world, single, 15)
    gamma = 0.5
    for start in range(12):
        batch = long.assemble(torch.arange(4 * start, 4 * start + 4))
        for lane in range(4):
            reward, discount, last = 0.0, 1.0, start
            for step in range(start, start + 3):
                reward += discount * float(kept[step].reward[lane])
                discount *= float(kept[step].discount[lane])
                last = step
                if kept[step].finished[lane]:
                    break
            assert float(batch.rewards[lane]) == pytest.approx(reward, abs=1e-12)
            assert float(batch.discounts[lane]) == pytest.approx(discount, abs=1e-12)
            ended = kept[last].next_state.select(torch.tensor([lane]))
            found = batch.next_observations.select(torch.tensor([lane]))
            assert same(found, ended)
    assert {round(float(d), 6) for d in long.assemble(torch.arange(len(long))).discounts} >= {gamma**3, gamma}


def test_a_window_ends_where_the_newest_transition_is():
    replay = replay_of(n_steps=5)
    walk(environment(n_structures=3, max_force_calls=50), replay, 4)
    last = replay.assemble(torch.arange(9, 12))
    assert torch.equal(last.discounts[last.discounts > 0], torch.full_like(last.discounts[last.discounts > 0], 0.5))
    assert (replay.followers[9:12] == NOBODY).all()


def test_failures_of_the_potential_are_left_out(monkeypatch):
    replay, world = replay_of(), environment(n_structures=3)
    generator = torch.Generator().manual_seed(0)
    state = world.reset(generator)
    transition = world.step(state, Move.zero(state.structures))
    broken = transition.outcome.clone()
    broken[1] = int(Outcome.NON_FINITE)
    monkeypatch.setitem(transition.__dict__, "outcome", broken)
    replay.add(transition)
    assert len(replay) == 2
    assert same(replay.assemble(torch.tensor([0, 1])).observations, state.select(torch.tensor([0, 2])))


def test_a_batch_holds_different_transitions_and_is_decided_by_the_generator():
    first, second = replay_of(), replay_of()
    walk(environment(), first, 10)
    walk(environment(), second, 10)
    assert same(first.sample(32).observations, second.sample(32).observations)
    numbers = draw_without_replacement(len(first), 32, first.generator)
    assert len(numbers.unique()) == 32
    with pytest.raises(SettingsError, match="61 different transitions"):
        first.sample(61)


def test_restored_replay_goes_on_alike():
    world = environment()
    straight, stopped, resumed = replay_of(60, 900, 3), replay_of(60, 900, 3), replay_of(60, 900, 3)
    kept = walk(world, straight, 30)
    for transition in kept[:17]:
        stopped.add(transition)
    resumed.restore({name: tensor.clone() for name, tensor in stopped.snapshot().items()})
    for transition in kept[17:]:
        resumed.add(transition)
    numbers = torch.arange(straight.oldest, straight.newest)
    assert (resumed.oldest, resumed.newest) == (straight.oldest, straight.newest)
    assert same(resumed.assemble(numbers).next_observations, straight.assemble(numbers).next_observations)
    with pytest.raises(ValueError, match="expected 400"):
        replay_of().restore(stopped.snapshot())


def test_single_precision_is_the_rounded_double():
    replay = replay_of(dtype=torch.float32)
    kept = walk(environment(), replay, 3)
    batch = replay.assemble(torch.arange(6))
    assert batch.observations.structures.dtype == torch.float32
    assert torch.equal(batch.observations.structures.positions, kept[0].state.structures.positions.float())
    assert replay.store.newest < 2 * 18  # rounded states are recognised too


def test_too_little_room_for_one_step_is_an_error():
    world = environment()
    state = world.reset(torch.Generator().manual_seed(0))
    transition = world.step(state, Move.zero(state.structures))
    for replay in (replay_of(3, 8000), replay_of(400, 20)):
        with pytest.raises(SettingsError, match="cannot hold one step"):
            replay.add(transition)


def test_free_cells_and_packings():
    pool = pack(
        ("Al2Fe2", "Al3Fe1"),
        torch.Generator().manual_seed(0),
        volume_per_atom_angstrom3=14.0,
        minimum_distance_angstrom=1.8,
        cell_free=True,
    )
    starts = PerturbedStarts(pool)
    world = Environment(potential("eam"), starts, EnvironmentSettings(n_structures=4))
    replay = replay_of()
    generator = torch.Generator().manual_seed(0)
    state = world.reset(generator)
    strains = 0.01 * torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    transition = world.step(state, Move(torch.zeros_like(state.structures.positions), strains))
    replay.add(transition)
    batch = replay.assemble(torch.arange(4))
    assert torch.equal(batch.actions.strains, transition.proposed.strains)
    assert same(batch.next_observations, transition.next_state)


@pytest.mark.parametrize(
    ("capacity", "atoms", "word"), [(50, 4, "small"), (3000, 4, None), (1_000_000, 4, "large"), (100_000, 9, None)]
)
def test_advice(capacity, atoms, word):
    advice = capacity_advice(capacity, atoms)
    assert advice is None if word is None else word in str(advice)
