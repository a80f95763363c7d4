"""Policies and critics for atoms: bounds, densities, gate and late fusion, and nothing of them at width 0 (R6.2)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from torch import Tensor, nn

from relaxion.errors import MissingStressError, SettingsError
from relaxion.model.actions import INFORMATION, Gate, MoveActions, environment_information
from relaxion.model.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.stiffness import strain_vectors
from relaxion.structures import Evaluation, Move, State, Structures
from relaxion.train.agents.atom_critics import AtomCategoricalCritic, AtomCritics

BOUNDS = MoveActions(max_displacement_angstrom=0.4, max_strain=0.08)
both_backbones = pytest.mark.parametrize("backbone", ["light", "tensor_field"])


def settings_of(backbone: str = "light", informed: bool = False, **more: object) -> AtomNetworkSettings:
    names = tuple(INFORMATION) if informed else ()
    return AtomNetworkSettings.read({"backbone": backbone, "channels": 5, "environment_information": names, **more})


def make_state(seed: int = 0, force: float = 2.0) -> State:
    """A free alloy, a fixed slab-like cell, a pair of atoms, a single one, in the middle of a relaxation."""
    alloy = bulk("Al", cubic=True)
    alloy.numbers[0] = 28
    alloy.rattle(0.1, seed=seed)
    fixed = bulk("Cu", cubic=True)
    fixed.rattle(0.1, seed=seed)
    fixed.set_constraint(FixAtoms([1, 2]))
    images = [alloy, fixed, Atoms("CO", [[0, 0, 0], [1.2, 0, 0.1]]), Atoms("Au")]
    structures = Structures.from_ase(images, cell_free=[True, False, False, False])
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    stress = normal(4, 3, 3)
    evaluation = Evaluation(normal(4), force * normal(structures.n_atoms, 3), 0.02 * (stress + stress.mT))
    return State(
        structures=structures,
        evaluation=evaluation,
        graph=None,
        last_move=Move(0.1 * normal(structures.n_atoms, 3), torch.zeros(4, 3, 3, dtype=torch.float64)),
        last_forces=force * normal(structures.n_atoms, 3),
        trust_radii=torch.full((4,), 0.2, dtype=torch.float64),
        calls=torch.tensor([2, 3, 4, 5]),
    )


def a_move(state: State, seed: int = 1) -> Move:
    return BOUNDS.random(state, torch.Generator().manual_seed(seed))


@both_backbones
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0], ids=str)
def test_bounds_hold_for_any_weights_and_fixed_things_stay(backbone: str, size: float, generator) -> None:
    """R6.5; the gate cannot lift a move over its bound."""
    state = make_state(force=50.0)
    for kind in (AtomPolicy, AtomGaussianPolicy):
        policy = kind(BOUNDS, settings_of(backbone, informed=True), generator)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(size)
            moves = [policy(state)]
            if isinstance(policy, AtomGaussianPolicy):
                moves.append(policy.sample(state, generator)[0])
        for move in moves:
            lengths = move.displacements.norm(dim=1)
            assert bool(torch.isfinite(lengths).all())
            assert float(lengths.max()) <= 0.4 * (1 + 1e-5)
            assert float(move.strain_sizes().max()) <= 0.08 * (1 + 1e-5)
            assert bool((lengths[~state.structures.movable] == 0).all())
            assert bool((move.strains[~state.structures.cell_free] == 0).all())
            torch.testing.assert_close(move.strains, move.strains.mT, rtol=0, atol=0)
            assert float(move.strain_sizes()[0]) > 0


def all_networks(backbone: str, informed: bool) -> dict[str, nn.Module]:
    generator, settings = torch.Generator().manual_seed(3), settings_of(backbone, informed)
    return {
        "policy": AtomPolicy(BOUNDS, settings, generator),
        "gaussian": AtomGaussianPolicy(BOUNDS, settings, generator),
        "critics": AtomCritics(settings, 3, generator),
        "categorical": AtomCategoricalCritic(settings, 7, generator),
    }


@both_backbones
@pytest.mark.parametrize("informed", [False, True])
def test_no_parameter_is_dead(backbone: str, informed: bool, generator: torch.Generator) -> None:
    state = make_state()
    for name, network in all_networks(backbone, informed).items():
        network.double()
        if isinstance(network, AtomGaussianPolicy):
            move, densities, _ = network.sample(state, generator)
            outputs = [move.displacements, move.strains, densities]
        elif isinstance(network, AtomPolicy):
            move = network(state)
            outputs = [move.displacements, move.strains]
        else:
            outputs = [network(state, a_move(state))]
        loss = sum((out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum() for out in outputs)
        assert isinstance(loss, Tensor)
        loss.backward()
        for key, parameter in network.named_parameters():
            assert parameter.grad is not None, f"{name} {key}"
            assert float(parameter.grad.abs().max()) > 0, f"{name} {key}"


@both_backbones
def test_the_action_reaches_every_critic(backbone: str, generator: torch.Generator) -> None:
    state = make_state()
    critics = AtomCritics(settings_of(backbone), 2, generator).double()
    move = a_move(state)
    displacements, strains = move.displacements.requires_grad_(), move.strains.requires_grad_()
    for number in range(2):
        values = critics(state, Move(displacements, strains))[:, number]
        to_atoms, to_cells = torch.autograd.grad(values.sum(), (displacements, strains))
        assert ((to_atoms.norm(dim=1) > 0) == state.structures.movable).all()
        assert (to_cells.flatten(1).norm(dim=1) > 0).tolist() == state.structures.cell_free.tolist()


@both_backbones
def test_the_first_critic_alone_is_the_first_of_all_and_they_share_nothing(backbone: str, generator) -> None:
    state = make_state()
    critics = AtomCritics(settings_of(backbone, informed=True), 2, generator).double()
    move = a_move(state)
    values = critics(state, move)
    assert values.shape == (4, 2)
    torch.testing.assert_close(critics.first(state, move), values[:, 0], rtol=0, atol=1e-12)
    values[:, 1].sum().backward()
    for name, parameter in critics.named_parameters():
        assert parameter.grad is not None
        assert parameter.shape[0] == 2
        assert float(parameter.grad[0].abs().max()) == 0, name


def test_noise_on_what_may_not_move_does_not_matter(generator: torch.Generator) -> None:
    """Target smoothing adds it everywhere, for a move knows neither fixed atoms nor fixed cells."""
    state = make_state()
    critics, move = AtomCritics(settings_of(), 2, generator), a_move(state)
    noise = BOUNDS.perturb(move, 0.5, generator)
    fixed, locked = ~state.structures.movable, ~state.structures.cell_free
    noisy = Move(
        torch.where(fixed[:, None], noise.displacements, move.displacements),
        torch.where(locked[:, None, None], noise.strains, move.strains),
    )
    assert torch.equal(critics(state, noisy), critics(state, move))


@both_backbones
def test_forces_on_fixed_atoms_do_not_matter(backbone: str) -> None:
    """Nothing relaxes them: near convergence they would be all that is left to see."""
    state = make_state()
    fixed = ~state.structures.movable[:, None]
    pushed = replace(
        state,
        evaluation=replace(state.evaluation, forces=state.evaluation.forces + 9.0 * fixed),
        last_forces=state.last_forces - 5.0 * fixed,
    )
    policy, critics = AtomPolicy(BOUNDS, settings_of(backbone, informed=True)), AtomCritics(settings_of(backbone, True))
    move = a_move(state)
    assert torch.equal(policy(state).displacements, policy(pushed).displacements)
    assert torch.equal(critics(state, move), critics(pushed, move))


# ---- R6.2 to R6.4: gate and late fusion


@both_backbones
def test_r6_2_at_width_0_the_policy_is_the_plain_one(backbone: str) -> None:
    """Same names, shapes and values of parameters, bit-equal moves; the gate's parameters come on top."""
    state = make_state()
    for kind in (AtomPolicy, AtomGaussianPolicy):
        plain, gated = [
            kind(BOUNDS, settings_of(backbone, informed), torch.Generator().manual_seed(5))
            for informed in (False, True)
        ]
        assert plain.gate is None
        shared = {name: value for name, value in gated.state_dict().items() if not name.startswith("gate.")}
        assert {name: value.shape for name, value in plain.state_dict().items()} == {
            name: value.shape for name, value in shared.items()
        }
        assert all(torch.equal(value, shared[name]) for name, value in plain.state_dict().items())
        with torch.no_grad():
            proposal = gated.propose(state)
            ungated = gated._bounded(state, proposal.atoms, proposal.cells)
            move = plain(state)
        assert torch.equal(move.displacements, ungated.displacements)
        assert torch.equal(move.strains, ungated.strains)
        assert torch.equal(plain.gate_factors(state), torch.ones(4))


@both_backbones
def test_r6_2_at_width_0_the_critics_answer_is_the_pooled_scalar(backbone: str) -> None:
    state = make_state()
    plain, fused = [
        AtomCritics(settings_of(backbone, informed), 2, torch.Generator().manual_seed(5)) for informed in (False, True)
    ]
    assert plain.networks.fusion is None
    shared = {name: value for name, value in fused.state_dict().items() if ".fusion." not in name}
    assert set(plain.state_dict()) == set(shared)
    assert all(torch.equal(value, shared[name]) for name, value in plain.state_dict().items())
    move = a_move(state)
    networks = fused.networks
    _, pooled = networks.pooled(networks.observer(state, move, 2)[0], state.structures)
    assert torch.equal(plain(state, move), pooled[:, :, 0].T)


@both_backbones
def test_r6_3_the_backbone_never_sees_environment_information(backbone: str, generator: torch.Generator) -> None:
    state = make_state()
    later = replace(state, calls=state.calls + 30, trust_radii=state.trust_radii / 4)
    critics, move = AtomCritics(settings_of(backbone, informed=True), 2, generator), a_move(state)
    seen = [critics.networks.observer(s, move, 2)[0] for s in (state, later)]
    assert torch.equal(seen[0].scalars, seen[1].scalars)
    assert torch.equal(seen[0].vectors, seen[1].vectors)
    assert float((critics(state, move) - critics(later, move)).detach().abs().min()) > 1e-6


@pytest.mark.parametrize("kind", [AtomPolicy, AtomGaussianPolicy])
def test_r6_4_one_positive_factor_per_structure_before_the_bound(kind, generator: torch.Generator) -> None:
    state = make_state()
    policy = kind(BOUNDS, settings_of(informed=True), generator).double()
    with torch.no_grad():
        policy.gate.network.answer.weight.mul_(30)
        factors = policy.gate_factors(state)
        proposal, move = policy.propose(state), policy(state)
    assert factors.shape == (4,)
    assert bool((factors > 1 / 10.001).all())
    assert bool((factors < 10.001).all())
    assert float((factors - factors[0]).abs().max()) > 0.1
    before = torch.atanh(move.displacements.norm(dim=1) / 0.4)  # undo the bound
    expected = proposal.atoms.norm(dim=1) * factors[state.structures.structure_index]
    movable = state.structures.movable & (before < 8)
    torch.testing.assert_close(before[movable], expected[movable], rtol=1e-5, atol=1e-7)
    cell = torch.atanh(move.strain_sizes()[0] / 0.08)
    torch.testing.assert_close(cell, proposal.cells[0].norm() * factors[0], rtol=1e-5, atol=1e-7)


def test_a_gate_without_information_is_refused() -> None:
    with pytest.raises(SettingsError, match="no environment information"):
        Gate((), 4)


@pytest.mark.parametrize(
    ("names", "sentence"), [(("log_larges_force",), "log_largest_force"), (("density", "density"), "twice")]
)
def test_senseless_information_is_refused(names: tuple[str, ...], sentence: str) -> None:
    settings = AtomNetworkSettings(environment_information=names)
    with pytest.raises(SettingsError, match=sentence):
        AtomPolicy(BOUNDS, settings)
    with pytest.raises(SettingsError, match=sentence):
        AtomCritics(settings)


def test_information_by_hand() -> None:
    atoms = Atoms("Cu2", [[0, 0, 0], [2, 0, 0]], cell=[4.0] * 3, pbc=True)
    structures = Structures.from_ase(atoms, cell_free=True)
    forces = torch.tensor([[-3.0, 0, 0], [0, 4.0, 0]], dtype=torch.float64)
    state = State(
        structures,
        Evaluation(torch.zeros(1), forces, 0.1 * torch.eye(3, dtype=torch.float64)[None]),
        None,
        Move(torch.tensor([[0.1, 0, 0], [0, 0, 0]], dtype=torch.float64), torch.zeros(1, 3, 3, dtype=torch.float64)),
        torch.tensor([[-2.0, 0, 0], [0, 0.4, 0]], dtype=torch.float64),
        torch.tensor([0.3], dtype=torch.float64),
        torch.tensor([10]),
    )
    expected = {
        "density": 2 * 4 / 3 * math.pi * 1.32**3 / 64,
        "log_largest_force": math.log10(4.0),
        "mean_log_force": (math.log10(3.0) + math.log10(4.0)) / 2,
        "log_force_ratio": math.log10(4.0 / 2.0),
        "log_last_move": 0.0,
        "alignment": -0.3 / (5 * 0.1),
        "log_curvature": math.log1p(10.0) / 2,  # 0.1 Å changed the force by -1 eV/Å
        "log_stress": math.log10(0.1 * 3**0.5) + 2,
        "log_calls": 1.0,
        "log_trust_radius": math.log10(0.3) + 1,
    }
    found = environment_information(state, tuple(expected), torch.float64)
    assert set(expected) == set(INFORMATION)
    torch.testing.assert_close(found[0], torch.tensor(list(expected.values()), dtype=torch.float64), rtol=0, atol=1e-3)


# ---- Gaussian policy


@both_backbones
@pytest.mark.parametrize("informed", [False, True])
def test_density_is_that_of_the_move_by_its_jacobian(backbone: str, informed: bool) -> None:
    """log p(move) = log N(noise) - log |det ∂(move in the policy's units)/∂noise|, atoms and cell together."""
    state = make_state().select(torch.tensor([0]))
    policy = AtomGaussianPolicy(BOUNDS, settings_of(backbone, informed), torch.Generator().manual_seed(2)).double()
    n_atoms = state.structures.n_atoms
    flat = torch.randn(3 * n_atoms + 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    proposal = policy.propose(state)
    assert proposal.cell_units is not None
    lengths, size = 0.4 * proposal.atom_units[:, None], 0.08 * proposal.cell_units

    def draw(noise: Tensor) -> Tensor:
        move, _, _ = policy.sample_with(state, noise[: 3 * n_atoms].view(-1, 3), noise[3 * n_atoms :][None])
        return torch.cat([(move.displacements / lengths).flatten(), strain_vectors(move.strains)[0] / size])

    jacobian = torch.autograd.functional.jacobian(draw, flat)
    gaussian = -0.5 * flat.square().sum() - len(flat) / 2 * math.log(2 * math.pi)
    exact = gaussian - torch.linalg.slogdet(jacobian).logabsdet
    _, density, _ = policy.sample_with(state, flat[: 3 * n_atoms].view(-1, 3), flat[3 * n_atoms :][None])
    assert float(density[0].detach()) == pytest.approx(float(exact), abs=1e-5)


def test_entropy_is_the_same_near_the_minimum_as_far_from_it() -> None:
    """In units of F/k: else SAC would be paid for large forces, and its entropy could not reach the target."""
    noise = torch.randn((11, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cells = torch.zeros((4, 6), dtype=torch.float64)
    policy = AtomGaussianPolicy(BOUNDS, settings_of(), torch.Generator().manual_seed(2)).double()
    for parameter in policy.deviation_head.parameters():
        torch.nn.init.constant_(parameter, 0.0)  # deviations of exactly F/k
    near, far = (policy.sample_with(make_state(force=force), noise, cells)[1][3] for force in (1e-3, 0.1))
    assert float((near - far).detach()) == pytest.approx(0, abs=0.05)


def test_densities_count_only_what_may_move(generator: torch.Generator) -> None:
    state = make_state()
    policy = AtomGaussianPolicy(BOUNDS, settings_of(), generator, penalty_weight=0.5).double()
    atoms, cells = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((11, 3), (4, 6))]
    fixed = ~state.structures.movable
    others = torch.where(fixed[:, None], 2.0, atoms), torch.where(state.structures.cell_free[:, None], cells, 3.0)
    one, two = policy.sample_with(state, atoms, cells), policy.sample_with(state, *others)
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[0].displacements, two[0].displacements)
    proposal = policy.propose(state)
    by_hand = 0.5 * proposal.atoms[-1].square().mean()  # the single atom
    torch.testing.assert_close(one[2][3], by_hand)


def test_draws_come_from_the_generator_and_scatter_around_the_middle() -> None:
    state = make_state(force=0.1)
    policy = AtomGaussianPolicy(BOUNDS, settings_of(), torch.Generator().manual_seed(0))
    one, again = [policy.sample(state, torch.Generator().manual_seed(7))[0].displacements for _ in range(2)]
    assert torch.equal(one, again)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        draws = torch.stack([policy.sample(state, generator)[0].displacements for _ in range(300)])
        middle = policy(state).displacements
    spread = draws.std(dim=0).max()
    torch.testing.assert_close(draws.mean(dim=0), middle, rtol=0, atol=5 * float(spread) / 300**0.5)


def test_moves_follow_the_forces_down() -> None:
    """A thousandth of the force, a thousandth of the step; and with the setting off, steps of the allowed length."""
    policy = AtomPolicy(BOUNDS, settings_of(moves_follow_forces=True), torch.Generator().manual_seed(1)).double()
    free = AtomPolicy(BOUNDS, settings_of(moves_follow_forces=False), torch.Generator().manual_seed(1)).double()
    state, small = at_start(make_state(force=1.0)), at_start(make_state(force=1e-3))
    with torch.no_grad():
        sizes = [p(s).displacements.norm() for p in (policy, free) for s in (small, state)]
    assert float(sizes[0] / sizes[1]) < 0.01
    assert float(sizes[2] / sizes[3]) > 0.1


@both_backbones
def test_unusual_states_do_not_explode(backbone: str) -> None:
    """Forces of 1e4 eV/Å, or hardly any after a long move: vectors grow with their logarithm, not with its powers."""
    policy = AtomPolicy(BOUNDS, settings_of(backbone, n_layers=3), torch.Generator().manual_seed(1))
    critics = AtomCritics(settings_of(backbone, n_layers=3), 2, torch.Generator().manual_seed(1))
    usual = make_state()
    for force in (1e4, 1e-6):
        state = make_state(force=force)
        with torch.no_grad():
            sizes = [policy.observer(s)[0].vectors.abs().max() for s in (usual, state)]
            values = [critics(s, a_move(s)).abs().max() for s in (usual, state)]
        assert float(sizes[1]) < 30 * float(sizes[0])
        assert float(values[1]) < 10 + 10 * float(values[0])


def at_start(state: State) -> State:
    """Without history."""
    return replace(state, last_move=Move.zero(state.structures), last_forces=state.evaluation.forces)


def test_a_free_cell_needs_its_stress() -> None:
    state = make_state()
    blind = replace(state, evaluation=replace(state.evaluation, stresses=None))
    with pytest.raises(MissingStressError, match="no stress"):
        AtomPolicy(BOUNDS, settings_of())(blind)
    fixed = replace(blind, structures=replace(blind.structures, cell_free=torch.zeros(4, dtype=torch.bool)))
    assert bool((AtomPolicy(BOUNDS, settings_of())(fixed).strains == 0).all())


def test_stress_reaches_policy_and_critics_of_free_cells_only() -> None:
    state = make_state()
    assert state.evaluation.stresses is not None
    other = replace(state, evaluation=replace(state.evaluation, stresses=-2 * state.evaluation.stresses))
    policy, critics, move = AtomPolicy(BOUNDS, settings_of()), AtomCritics(settings_of()), a_move(state)
    strains = [policy(s).strains.detach() for s in (state, other)]
    assert float((strains[0] - strains[1])[0].abs().max()) > 1e-5
    values = [critics(s, move).detach() for s in (state, other)]
    assert float((values[0] - values[1])[0].abs().max()) > 1e-6
    assert torch.equal(values[0][1:], values[1][1:])


@both_backbones
def test_copies_are_independent_and_equal(backbone: str) -> None:
    """Target networks are deep copies."""
    state = make_state()
    policy = AtomPolicy(BOUNDS, settings_of(backbone, informed=True))
    twin = copy.deepcopy(policy)
    assert torch.equal(policy(state).displacements, twin(state).displacements)
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(policy(state).displacements, twin(state).displacements)


def test_a_saved_policy_carries_its_bounds() -> None:
    assert AtomPolicy(BOUNDS).state_dict()["bounds"].tolist() == pytest.approx([0.4, 0.08])
