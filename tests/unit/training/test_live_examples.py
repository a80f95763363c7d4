"""Examples from live relaxations, and learning from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk

import relaxion
from relaxion.errors import SettingsError
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.stiffness_network import StiffnessNetwork, StiffnessSettings
from relaxion.structures import Move, Outcome, Structures
from relaxion.train.data.alloys import EAM_METALS
from relaxion.train.data.slabs import ADSORBATES
from relaxion.train.data.starts import KINDS, MetalStarts
from relaxion.train.experience.environment import Environment, EnvironmentSettings, rollout
from relaxion.train.supervised.dataset import LiveExamples, LiveSettings, LiveSource
from relaxion.train.supervised.fit import Examples, Fit, relative_errors, way_to

SETTINGS = StiffnessSettings(channels=8, n_hidden=8, n_layers=1, cutoff_angstrom=4.0)
TINY = MetalStarts(elements=("Cu", "Ni"), sizes=(2, 4), rattle_angstrom=(0.05, 0.15))


def policy_of(seed: int = 0) -> StiffnessPolicy:
    return StiffnessPolicy(MoveActions(0.3, 0.05), SETTINGS, torch.Generator().manual_seed(seed))


def world(**settings) -> Environment:
    chosen = EnvironmentSettings(max_displacement_angstrom=0.3, **settings)
    return Environment(relaxion.potential("emt"), TINY, chosen)


def dataset_of(network: StiffnessNetwork, seed: int = 1, **changes) -> LiveExamples:
    chosen = LiveSettings(
        examples_per_update=16,
        example_relaxations=8,
        example_rounds_before=2,
        example_rounds_kept=3,
        example_tolerance_ev_per_angstrom=2e-3,
        **changes,
    )
    source = LiveSource(relaxion.potential("emt"), TINY)
    return LiveExamples(network, [source], chosen, torch.Generator().manual_seed(seed))


def fit_of(n_updates: int = 6, interval: int = 3) -> Fit:
    network = policy_of().network
    dataset = dataset_of(network, fit_updates=n_updates, example_interval_updates=interval)
    return Fit(network, dataset, dataset.settings)


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


def test_examples_end_where_their_relaxations_ended() -> None:
    dataset = dataset_of(policy_of().network)
    emt = dataset.sources[0].potential
    before = emt.calls
    examples, scalars = dataset.draw(0)
    assert scalars["fit/finished_share"] == 1
    assert dataset.force_calls == emt.calls - before
    assert examples.number == 16
    arrived = emt(examples.state.structures.moved(examples.goal))
    assert float(arrived.forces.norm(dim=1).max()) < 5e-3
    assert float(examples.state.evaluation.forces.norm(dim=1).max()) > 0.5


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


def test_learning_lowers_the_error_on_other_structures() -> None:
    fit = fit_of(60, 20)
    unseen, _ = dataset_of(policy_of().network, seed=77).draw(0)
    before = float(relative_errors(fit.network, unseen).detach().mean())
    while not fit.done:
        scalars = fit.update()
    after = float(relative_errors(fit.network, unseen).detach().mean())
    assert after < 0.75 * before
    assert set(scalars) >= {"fit/relative_error", "fit/gradient_norm", "fit/learning_rate"}
    assert fit.dataset.force_calls > 100


def test_stop_and_resume_is_the_straight_run() -> None:
    straight = fit_of()
    first = fit_of()
    for _ in range(4):
        straight.update()
        first.update()
    second = fit_of()
    second.network.load_state_dict(first.network.state_dict())
    second.restore(first.snapshot())
    for fit in (straight, second):
        while not fit.done:
            fit.update()
    one = straight.snapshot() | straight.network.state_dict()
    two = second.snapshot() | second.network.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_examples_survive_as_tensors() -> None:
    state = world().begin(TINY.sample(torch.Generator().manual_seed(3), 3))
    examples = Examples(state, Move.zero(state.structures))
    again = Examples.of_tensors(examples.tensors()).tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in examples.tensors().items())


def test_gradients_that_are_no_numbers_change_nothing() -> None:
    fit = fit_of()
    fit.update()
    before = {name: tensor.clone() for name, tensor in fit.network.state_dict().items()}
    examples, _ = fit.dataset.draw(1)
    broken = Examples(examples.state, Move(examples.goal.displacements * torch.nan, examples.goal.strains))
    assert np.isnan(fit.learn_from(broken)["fit/gradient_norm"])
    assert fit.n_updates == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in fit.network.state_dict().items())


def test_the_rate_falls_along_half_a_cosine() -> None:
    fit = fit_of(8)
    rates = []
    for fit.n_updates in (0, 4, 8, 9):
        rates.append(fit.learning_rate)
    assert rates == pytest.approx([3e-3, (3e-3 + 1e-5) / 2, 1e-5, 1e-5])
