"""Lessons from finished relaxations, and learning from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk

import relaxion
from relaxion.errors import SettingsError
from relaxion.experience.environment import Environment, EnvironmentSettings, rollout
from relaxion.generators.alloys import EAM_METALS
from relaxion.generators.slabs import ADSORBATES
from relaxion.generators.starts import KINDS, MetalStarts
from relaxion.networks.metric.network import MetricSettings
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.metric.teacher import Lessons, relative_errors, way_to
from relaxion.networks.move_actions import MoveActions
from relaxion.structures import Move, Outcome, Structures
from relaxion.training.lessons.live import (
    Imitation,
    LiveExamples,
    LiveLessonSettings,
    Source,
    finished_by_core,
    lessons_of,
)

SETTINGS = MetricSettings(channels=8, n_hidden=8, n_layers=1, cutoff_angstrom=4.0)
TINY = MetalStarts(elements=("Cu", "Ni"), sizes=(2, 4), rattle_angstrom=(0.05, 0.15))


def policy_of(seed: int = 0) -> MetricPolicy:
    return MetricPolicy(MoveActions(0.3, 0.05), SETTINGS, torch.Generator().manual_seed(seed))


def world(**settings) -> Environment:
    chosen = EnvironmentSettings(stall_length_angstrom=0, max_displacement_angstrom=0.3, **settings)
    return Environment(relaxion.potential("emt"), TINY, chosen)


def learner_of(n_updates: int = 6, updates_per_gathering: int = 3) -> Imitation:
    chosen = LiveLessonSettings(
        lesson_updates=n_updates,
        lessons_per_update=16,
        lesson_starts=8,
        lesson_gatherings_before=2,
        lesson_updates_per_gathering=updates_per_gathering,
        lesson_gatherings_kept=3,
        lesson_tolerance_ev_per_angstrom=2e-3,
    )
    policy, generator = policy_of(), torch.Generator().manual_seed(1)
    source = Source(relaxion.potential("emt"), TINY)
    return Imitation(policy, LiveExamples(policy, [source], chosen, generator), chosen, generator)


def test_the_way_leads_to_the_minimum_but_for_turns_and_shifts() -> None:
    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1, seed=1)
    structures = Structures.from_ase([crystal], cell_free=True)
    generator = torch.Generator().manual_seed(2)
    strain = 0.03 * torch.randn(1, 3, 3, generator=generator, dtype=torch.float64)
    planted = Move(0.1 * torch.randn(4, 3, generator=generator, dtype=torch.float64), (strain + strain.mT) / 2)
    minimum = structures.moved(planted)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    turn = turn * torch.sign(torch.det(turn))
    turned = Structures(
        minimum.positions @ turn + 5.0,
        minimum.cells @ turn,
        minimum.periodic,
        minimum.atomic_numbers,
        minimum.structure_index,
        minimum.movable,
        minimum.cell_free,
    )
    way = way_to(turned, structures)
    torch.testing.assert_close(way.strains, planted.strains)
    torch.testing.assert_close(way.displacements, planted.displacements - planted.displacements.mean(dim=0))


def test_lessons_end_where_their_relaxations_ended() -> None:
    environment = world(force_tolerance_ev_per_angstrom=1e-3, max_force_calls=60)
    emt, before = environment.potential, environment.potential.calls
    found = rollout(environment, policy_of(), environment.begin(TINY.sample(torch.Generator().manual_seed(3), 6)))
    assert bool((found.outcomes == Outcome.CONVERGED).all())
    assert int(found.calls.sum()) == emt.calls - before
    assert torch.equal(found.lengths, found.calls - 1)
    lessons = lessons_of(found, smallest_force=0.02, farthest=1.0)
    assert lessons is not None
    assert lessons.number > 12
    arrived = emt(lessons.state.structures.moved(lessons.goal))
    assert float(arrived.forces.norm(dim=1).max()) < 2e-3
    assert float(lessons.state.evaluation.forces.norm(dim=1).max()) > 0.5


def test_a_rollout_that_takes_too_long_is_cut() -> None:
    environment = world(force_tolerance_ev_per_angstrom=1e-6, max_force_calls=3)
    found = rollout(environment, policy_of(), environment.begin(TINY.sample(torch.Generator().manual_seed(3), 4)))
    assert found.outcomes.tolist() == [Outcome.STEP_LIMIT] * 4
    assert found.calls.tolist() == [3] * 4


def test_starts_are_of_every_kind_and_repeat() -> None:
    starts = MetalStarts(elements=EAM_METALS, sizes=(4, 10), shares=dict.fromkeys(KINDS, 1.0), largest_defect=20)
    one, two = [starts.sample(torch.Generator().manual_seed(5), 40) for _ in range(2)]
    assert torch.equal(one.positions, two.positions)
    assert 0 < int(one.cell_free.sum()) < 40
    assert not bool(one.periodic.all())
    assert not bool(one.movable.all())
    assert bool((one.periodic.all(dim=1) | ~one.cell_free).all())
    forces = relaxion.potential("eam")(one).forces
    assert bool(torch.isfinite(forces).all())
    with pytest.raises(SettingsError, match="did you mean 'cluster'"):
        MetalStarts(shares={"clusters": 1.0})


def test_sizes_are_kept_and_reached_by_every_kind() -> None:
    """Atoms on top of slabs not counted; a random packing may have as many atoms as the largest structure."""
    own = {"slab": (12, 3), "surface": (12, 3), "step": (11, 3), "vacancy": (8, 0), "defect": (17, 0)}
    own |= {"boundary": (16, 0), "particle": (14, 0)}
    for kind in KINDS:
        starts = MetalStarts(sizes=(4, 9), shares={kind: 1.0}, largest_slab=12, largest_defect=17, largest_particle=14)
        counts = starts.sample(torch.Generator().manual_seed(2), 60).counts
        largest, on_top = own.get(kind, (9, 0))
        assert int(counts.min()) >= 4
        assert largest <= int(counts.max()) <= largest + on_top, kind
    with pytest.raises(SettingsError, match="no slab of 30 to 31 atoms"):
        MetalStarts(sizes=(30, 31), shares={"slab": 1.0}).sample(torch.Generator(), 1)


def test_several_adsorbates_sit_on_slabs_and_none_inside() -> None:
    starts = MetalStarts(sizes=(4, 16), shares={"slab": 1.0}, adsorbates=ADSORBATES, largest_slab=27)
    light = 0
    for atoms in starts.sample(torch.Generator().manual_seed(3), 60).to_ase():
        metals, others = atoms.positions[atoms.numbers > 9], atoms.positions[atoms.numbers < 10]
        light = max(light, len(others))
        if len(others):
            assert others[:, 2].min() > np.sort(metals[:, 2])[len(metals) // 2]
    assert light >= 2


def test_what_the_policy_cannot_finish_the_core_finishes_and_it_teaches() -> None:
    """Two force calls are too few for anybody: without the core there is no lesson at all."""
    emt = relaxion.potential("emt")
    starts = MetalStarts(sizes=(2, 4), free_share=0.5)
    chosen = EnvironmentSettings(force_tolerance_ev_per_angstrom=2e-4, max_force_calls=2, stall_length_angstrom=0)
    environment = Environment(emt, starts, chosen)
    found = rollout(environment, policy_of(), environment.reset(torch.Generator().manual_seed(1), 6))
    assert lessons_of(found, 0.01, 1.0) is None
    carried_on = finished_by_core(found, emt, 1e-3, 60)
    lessons = lessons_of(carried_on, 0.01, 1.0)
    assert lessons is not None
    arrived = emt(lessons.state.structures.moved(lessons.goal))
    assert float(arrived.forces.norm(dim=1).max()) < 5e-3
    assert bool((carried_on.calls > found.calls).all())
    assert finished_by_core(carried_on, emt, 1e-3, 60) is carried_on


def test_learning_lowers_the_error_on_other_structures() -> None:
    learner = learner_of(60, 20)
    environment = world(force_tolerance_ev_per_angstrom=2e-3, max_force_calls=40)
    start = environment.begin(TINY.sample(torch.Generator().manual_seed(77), 24))
    unseen = lessons_of(rollout(environment, policy_of(), start), 0.01, 1.0)
    assert unseen is not None
    before = float(relative_errors(learner.policy.network, unseen).detach().mean())
    while not learner.done:
        scalars = learner.update()
    after = float(relative_errors(learner.policy.network, unseen).detach().mean())
    assert after < 0.75 * before
    assert set(scalars) >= {"imitation/relative_error", "imitation/gradient_norm", "imitation/learning_rate"}
    assert learner.examples.force_calls > 100


def test_stop_and_resume_is_the_straight_run() -> None:
    straight, first = learner_of(), learner_of()
    for _ in range(4):
        straight.update()
        first.update()
    second = learner_of()
    second.restore(first.snapshot())
    for learner in (straight, second):
        while not learner.done:
            learner.update()
    one, two = straight.snapshot(), second.snapshot()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_lessons_survive_as_tensors() -> None:
    state = world().begin(TINY.sample(torch.Generator().manual_seed(3), 3))
    lessons = Lessons(state, Move.zero(state.structures))
    again = Lessons.of_tensors(lessons.tensors()).tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in lessons.tensors().items())


def test_gradients_that_are_no_numbers_change_nothing() -> None:
    learner = learner_of()
    learner.update()
    before = {name: tensor.clone() for name, tensor in learner.policy.state_dict().items()}
    lessons, _ = learner.examples.draw(1)
    broken = Lessons(lessons.state, Move(lessons.goal.displacements * torch.nan, lessons.goal.strains))
    assert np.isnan(learner.teacher.update(broken)["imitation/gradient_norm"])
    assert learner.n_updates == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.policy.state_dict().items())


def test_the_rate_falls_along_half_a_cosine() -> None:
    teacher = learner_of(8).teacher
    rates = []
    for teacher.n_updates in (0, 4, 8, 9):
        rates.append(teacher.learning_rate)
    assert rates == pytest.approx([3e-3, (3e-3 + 1e-5) / 2, 1e-5, 1e-5])
