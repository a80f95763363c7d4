"""Stiffness, solves, network, policies: against planted crystals, finite differences and the classical springs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from torch import Tensor

import relaxion
from relaxion.model.actions import MoveActions
from relaxion.model.atom_policies import StiffnessActions, StiffnessGaussianPolicy, StiffnessPolicy
from relaxion.model.solve import LEAST_STIFF, SHARES, Method, by_size, softened_by, solve
from relaxion.model.stiffness import Stiffness, Unknowns, strain_matrices, strain_vectors
from relaxion.model.stiffness_network import SolveInputs, StiffnessNetwork, StiffnessSettings, pulls_of
from relaxion.optimizer.hessian.springs import SpringSettings, springs_at
from relaxion.optimizer.point import Geometry
from relaxion.structures import Evaluation, Graph, State, Structures

ACTIONS = MoveActions(0.3, 0.05)
SMALL = {"channels": 6, "n_hidden": 8, "cutoff_angstrom": 4.5}
both_methods = pytest.mark.parametrize("method", ["dense", "gradients"])


def rattled(atoms: Atoms, seed: int = 0, size: float = 0.1) -> Atoms:
    atoms = atoms.copy()
    atoms.rattle(size, seed=seed)
    return atoms


def alloy() -> Atoms:
    atoms = bulk("Cu", cubic=True) * (2, 1, 1)
    atoms.symbols[::3] = "Au"
    return rattled(atoms)


def state_of(images: list[Atoms], cell_free: bool | list[bool] = False) -> State:
    structures = Structures.from_ase(images, cell_free=cell_free)
    return State.without_past(structures, relaxion.potential("emt")(structures), 0.3)


def planted(cell_free: bool, n_arms: int = 3, seed: int = 0) -> Stiffness:
    """Random springs and coordinates on a crystal and on a cluster."""
    cluster = Atoms("Cu3", [[0, 0, 0], [2.5, 0, 0.2], [0.3, 2.4, 0]])
    structures = Structures.from_ase([alloy(), cluster], cell_free=[cell_free, False])
    graph = Graph.of(structures, 3.2)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Stiffness(
        structures,
        graph.centers,
        graph.neighbors,
        graph.pair_structure,
        graph.vectors(structures),
        along=normal(graph.n_pairs // 2).exp(),
        across=0.1 * normal(graph.n_pairs // 2).exp(),
        arms=0.5 * normal(graph.n_pairs, n_arms, 3),
        floors=normal(2).exp(),
        cell_floors=100 * normal(2).exp(),
        free=Stiffness.all_free(structures),
    )


def planted_energy(stiffness: Stiffness, change: Unknowns) -> Tensor:
    """The docstring of `stiffness_values`, pair by pair and link by link."""
    strains = strain_matrices(change.cells)
    energy = torch.zeros((), dtype=torch.float64)
    coordinates = {}
    for link, (i, j) in enumerate(zip(stiffness.centers.tolist(), stiffness.neighbors.tolist(), strict=True)):
        vector = stiffness.vectors[link]
        shift = change.atoms[j] - change.atoms[i] + vector @ strains[int(stiffness.link_structure[link])]
        for m in range(stiffness.arms.shape[1]):
            coordinates[i, m] = coordinates.get((i, m), 0.0) + stiffness.arms[link, m] @ shift
        if link % 2 == 0:
            stretch = shift @ vector / vector.norm()
            along, across = stiffness.along[link // 2], stiffness.across[link // 2]
            energy = energy + 0.5 * along * stretch**2 + 0.5 * across * (shift @ shift - stretch**2)
    energy = energy + 0.5 * sum(q**2 for q in coordinates.values())
    floors = stiffness.floors[stiffness.structures.structure_index]
    energy = energy + 0.5 * (floors[:, None] * change.atoms**2).sum()
    return energy + 0.5 * (stiffness.cell_floors[:, None] * change.cells**2).sum()


@both_methods
@pytest.mark.parametrize("cell_free", [False, True])
def test_newton_step_of_a_planted_crystal_is_the_way_back(cell_free: bool, method: Method) -> None:
    stiffness = planted(cell_free)
    generator = torch.Generator().manual_seed(1)
    atoms = 0.1 * torch.randn(stiffness.structures.n_atoms, 3, generator=generator, dtype=torch.float64)
    cells = 0.01 * torch.randn(2, 6, generator=generator, dtype=torch.float64) * stiffness.free.cells
    atoms.requires_grad_(), cells.requires_grad_()
    forces = torch.autograd.grad(-planted_energy(stiffness, Unknowns(atoms, cells)), (atoms, cells))
    answer = solve(stiffness, Unknowns(*forces), method)
    torch.testing.assert_close(answer.atoms, -atoms.detach(), rtol=0, atol=1e-7)
    torch.testing.assert_close(answer.cells, -cells.detach(), rtol=0, atol=1e-7)


def test_applied_and_dense_are_the_same_matrix() -> None:
    stiffness = planted(True).restricted(
        atoms=torch.rand(11, 3, generator=torch.Generator().manual_seed(3)) > 0.3,
        cells=torch.tensor([[True, True, False, True, False, True], [True] * 6]),
    )
    layout = stiffness.layout
    generator = torch.Generator().manual_seed(2)
    change = Unknowns(*[torch.randn(n, generator=generator, dtype=torch.float64) for n in ((11, 3), (2, 6))])
    applied = stiffness.apply(change)
    packed = layout.packed(change.masked(stiffness.free))
    products = [(m @ part[:, :, None])[:, :, 0] for m, part in zip(stiffness.matrices, packed, strict=True)]
    expected = layout.unpacked(products).masked(stiffness.free)
    torch.testing.assert_close(applied.atoms, expected.atoms)
    torch.testing.assert_close(applied.cells, expected.cells)
    assert float(applied.cells[0, 2]) == 0
    assert float(applied.cells[0, 3]) != 0


@both_methods
def test_only_free_coordinates_move(method: Method) -> None:
    stiffness = planted(True)
    free = torch.ones(11, 3, dtype=torch.bool)
    free[0] = False  # FixAtoms
    free[1, 2] = False  # FixCartesian
    cells = torch.tensor([[True, True, False, False, False, False], [True] * 6])
    pulls = Unknowns(torch.ones(11, 3, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64))
    restricted = stiffness.restricted(free, cells)
    answer = solve(restricted, pulls, method)
    assert bool((answer.atoms[~free] == 0).all())
    assert bool((answer.cells[0, 2:] == 0).all())
    assert bool((answer.atoms[free] != 0).all())
    assert bool((answer.cells[0, :2] != 0).all())
    assert bool((answer.cells[1] == 0).all())  # its cell is not free
    back = restricted.apply(answer)
    torch.testing.assert_close(back.atoms[free], pulls.atoms[free], rtol=1e-6, atol=1e-6)


@both_methods
def test_gradients_by_finite_differences(method: Method) -> None:
    stiffness = planted(True, n_arms=2)
    generator = torch.Generator().manual_seed(2)
    pulls = [torch.randn(n, generator=generator, dtype=torch.float64, requires_grad=True) for n in ((11, 3), (2, 6))]
    names = ("along", "across", "arms", "floors", "cell_floors")
    parts = [getattr(stiffness, name).clone().requires_grad_() for name in names]

    def answer(*values: Tensor) -> tuple[Tensor, Tensor]:
        changed = replace(stiffness, **dict(zip(names, values[:5], strict=True)))
        solved = solve(changed, Unknowns(values[5], values[6]), method)
        return solved.atoms, solved.cells

    assert torch.autograd.gradcheck(answer, (*parts, *pulls), atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("cell_free", [False, True])
def test_the_prior_is_the_classical_springs(cell_free: bool) -> None:
    atoms = alloy()
    state = state_of([atoms], cell_free)
    wide = StiffnessSettings(cutoff_angstrom=7.5)  # beyond every spring of the classical core
    frame = SolveInputs.of(state, wide, torch.float64)
    answer = solve(frame.prior(), frame.pulls)
    n_atoms = len(atoms)
    free = torch.ones((n_atoms + 3 * cell_free, 3), dtype=torch.bool).numpy()
    geometry = Geometry(atoms.positions, atoms.cell.array, atoms.pbc, atoms.numbers, free, float(cell_free))
    forces = frame.pulls.atoms
    if cell_free:
        forces = torch.cat([forces, strain_matrices(frame.pulls.cells)[0]])
    expected = torch.from_numpy(springs_at([geometry], SpringSettings())[0].solve(forces.numpy()))
    # the classical core has nine deformations instead of six strains, and cuts springs at 1.8 sums of radii
    difference = (answer.atoms - expected[:n_atoms]).norm() / expected[:n_atoms].norm()
    assert float(difference) < (0.02 if cell_free else 0.005)


def test_an_untrained_policy_relaxes_about_as_springs_do() -> None:
    state = state_of([alloy()])
    policy = StiffnessPolicy(ACTIONS, StiffnessSettings.read(SMALL), torch.Generator().manual_seed(0))
    frame = SolveInputs.of(state, policy.settings, torch.float32)
    with torch.no_grad():
        springs, learned = solve(frame.prior(), frame.pulls), policy.newton(state)
    cosine = torch.nn.functional.cosine_similarity(springs.atoms.flatten(), learned.atoms.flatten().double(), dim=0)
    assert float(cosine) > 0.9
    assert 0.3 < float(learned.atoms.norm() / springs.atoms.norm()) < 3


def test_moves_are_bounded_as_a_whole() -> None:
    state = state_of([rattled(alloy(), size=0.3), alloy()], [True, False])
    policy = StiffnessPolicy(MoveActions(0.05, 0.001), StiffnessSettings.read(SMALL), torch.Generator().manual_seed(0))
    with torch.no_grad():
        move, newton = policy(state), policy.newton(state)
    assert float(move.largest_displacements(state.structures).max()) <= 0.05 * (1 + 1e-6)
    assert float(move.strain_sizes().max()) <= 0.001 * (1 + 1e-6)
    atoms = state.structures.structure_index == 1
    ratio = move.displacements[atoms] / newton.atoms[atoms]
    assert float(ratio.max() - ratio.min()) < 1e-5


def test_odd_structures() -> None:
    """A lone atom, all atoms fixed, a linear molecule, a cell thinner than the cutoff; alone and together."""
    fixed = alloy()
    fixed.set_constraint(FixAtoms(range(len(fixed))))
    linear = Atoms("Cu3", [[0, 0, 0], [2.3, 0, 0], [4.9, 0, 0]])
    thin = Atoms("Al", cell=[[2.2, 0, 0], [0, 3, 0], [0, 0.3, 9]], pbc=True)
    images = [Atoms("Au"), fixed, linear, thin]
    policy = StiffnessPolicy(ACTIONS, StiffnessSettings.read(SMALL), torch.Generator().manual_seed(0))
    for chosen in ([0], [1], [2], [3], [0, 1, 2, 3]):
        state = state_of([images[number] for number in chosen], [number == 3 for number in chosen])
        with torch.no_grad():
            move = policy(state)
        assert bool(torch.isfinite(move.displacements).all())
        assert bool(torch.isfinite(move.strains).all())
    assert bool((move.displacements[:9] == 0).all())  # the lone atom and the fixed ones
    axis, across = move.displacements[9:12, 0], move.displacements[9:12, 1:]
    assert float(axis.abs().max()) > 1e-3
    assert float(across.abs().max()) < 1e-6
    assert float(move.strains[3].abs().max()) > 1e-4


def test_softening_keeps_the_matrix_positive_definite() -> None:
    stiffness = planted(True)
    softening = torch.stack([2 * stiffness.along, 30 * stiffness.across], dim=1)
    pulls = Unknowns(torch.ones(11, 3, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64))
    least = [LEAST_STIFF * torch.linalg.eigvalsh(matrix).min() for matrix in stiffness.matrices]
    shares = []
    for factor in (1.0, 0.3, 0.1, 0.01):
        softened = softened_by(stiffness, factor * softening, pulls)
        made_anew = replace(softened, along=softened.along).matrices
        for matrix, anew, lowest in zip(softened.matrices, made_anew, least, strict=True):
            torch.testing.assert_close(matrix, anew)
            assert float(torch.linalg.eigvalsh(matrix).min()) >= float(lowest)
        taken = (stiffness.across - softened.across) / (factor * softening[:, 1])
        shares.append(float(taken[stiffness.link_structure[::2] == 0].mean()))
    assert shares == sorted(shares)
    assert shares[0] < 1 == pytest.approx(shares[-1])
    assert all(min(abs(share - known) for known in (0.0, *SHARES)) < 1e-12 for share in shares)


def test_softened_pairs_may_push() -> None:
    """The stiffness of an EAM crystal has negative springs, which springs that only pull cannot say."""
    stiffness, generator = planted(False), torch.Generator().manual_seed(4)
    softening = 1.5 * torch.stack([stiffness.along, stiffness.across], dim=1)
    softening *= torch.rand(len(softening), 1, generator=generator, dtype=torch.float64) < 0.1
    pulls = Unknowns(torch.ones(11, 3, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64))
    softened = softened_by(stiffness, softening, pulls)
    assert float(softened.along.min()) < 0
    answers = [solve(softened, pulls, method) for method in ("dense", "gradients")]
    torch.testing.assert_close(answers[0].atoms, answers[1].atoms, rtol=1e-5, atol=1e-7)


def test_large_structures_are_softened_without_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    stiffness = planted(True)
    generator = torch.Generator().manual_seed(5)
    pulls = Unknowns(*[torch.randn(n, generator=generator, dtype=torch.float64) for n in ((11, 3), (2, 6))])
    softening = torch.stack([0.9 * stiffness.along, 0.9 * stiffness.across], dim=1)
    by_matrix = [softened_by(stiffness, factor * softening, pulls) for factor in (0.2, 5.0)]
    monkeypatch.setattr("relaxion.model.solve.LARGEST_DENSE", 0)
    without = [softened_by(stiffness, factor * softening, pulls) for factor in (0.2, 5.0)]
    for one, other in zip(by_matrix, without, strict=True):
        torch.testing.assert_close(one.along, other.along)


@pytest.mark.parametrize("cell_free", [False, True])
def test_sizes_solved_apart_are_solved_alike(cell_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stiffness, generator = planted(cell_free), torch.Generator().manual_seed(6)
    pulls = Unknowns(*[torch.randn(n, generator=generator, dtype=torch.float64) for n in ((11, 3), (2, 6))])
    factors = torch.tensor([0.1, 5.0])[stiffness.link_structure[::2]].double()  # only one softens in full
    softening = factors[:, None] * torch.stack([stiffness.along, stiffness.across], dim=1)

    def answers() -> list[Tensor]:
        along = stiffness.along.clone().requires_grad_()
        softened = softened_by(replace(stiffness, along=along), softening, pulls)
        step = solve(softened, pulls)
        gradient = torch.autograd.grad(step.atoms.square().sum() + step.cells.square().sum(), along)[0]
        return [softened.along.detach(), step.atoms.detach(), step.cells.detach(), gradient]

    assert [which.tolist() for which, _ in by_size(stiffness)] == [[0, 1]]
    together = answers()
    share = (stiffness.along - together[0]) / softening[:, 0]
    assert [len({round(float(s), 6) for s in share[stiffness.link_structure[::2] == n]}) for n in (0, 1)] == [1, 1]
    assert float(share[0]) == pytest.approx(1.0)
    assert float(share[-1]) < 0.6
    smallest = int(stiffness.structures.counts.min())
    monkeypatch.setattr("relaxion.model.solve.LARGEST_DENSE", smallest)
    assert sorted(which.tolist() for which, _ in by_size(stiffness)) == [[0], [1]]
    for one, other in zip(together, answers(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_stiffness_of_some_structures_is_theirs() -> None:
    generator = torch.Generator().manual_seed(7)
    fixed = torch.zeros(11, 3, dtype=torch.bool)
    fixed[4, 1] = fixed[9, 0] = True
    stiffness = planted(True).restricted(~fixed)
    change = Unknowns(*[torch.randn(n, generator=generator, dtype=torch.float64) for n in ((11, 3), (2, 6))])
    which, counts = torch.tensor([1, 0]), stiffness.structures.counts
    expected = stiffness.apply(change).select(counts, which)
    found = stiffness.select(which).apply(change.select(counts, which))
    torch.testing.assert_close(found.atoms, expected.atoms)
    torch.testing.assert_close(found.cells, expected.cells)
    assert float(found.atoms.abs().max()) > 0.1


def test_an_indefinite_matrix_gives_no_nan_without_a_matrix() -> None:
    """Of large structures not every direction can be looked at."""
    stiffness = planted(True, n_arms=0)
    broken = replace(stiffness, along=-stiffness.along, across=-stiffness.across)
    pulls = Unknowns(torch.ones(11, 3, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float64))
    answer = solve(broken, pulls, "gradients")
    assert bool(torch.isfinite(answer.atoms).all())
    assert bool(torch.isfinite(answer.cells).all())


def test_a_gate_lowers_floors_before_pairs_soften() -> None:
    settings = StiffnessSettings.read({**SMALL, "softens": True, "n_coordinates": 0})
    policy = StiffnessPolicy(ACTIONS, settings, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        assert policy.network.to_softening.bias is not None
        policy.network.to_softening.bias.add_(1.0)
    state = state_of([alloy()])
    frame = SolveInputs.of(state, settings, torch.float64)
    for factor in (1.0, 0.25, 0.1):
        stiffness = policy.network.stiffness(frame, torch.full((1,), factor, dtype=torch.float64))
        assert all(float(torch.linalg.eigvalsh(matrix).min()) > 0 for matrix in stiffness.matrices)


@pytest.mark.parametrize("softens", [False, True])
def test_weights_get_gradients_and_none_is_dead(softens: bool) -> None:
    state = state_of([alloy(), Atoms("Cu2", [[0, 0, 0], [2.4, 0.1, 0]])], [True, False])
    settings = StiffnessSettings.read({**SMALL, "softens": softens})
    network = StiffnessNetwork(settings, torch.Generator().manual_seed(0)).double()
    answer = solve(network(state), pulls_of(state))
    (answer.atoms.square().sum() + answer.cells.square().sum()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_gradients_of_weights_by_finite_differences() -> None:
    state = state_of([alloy()], True)
    settings = StiffnessSettings.read({**SMALL, "softens": True})
    network = StiffnessNetwork(settings, torch.Generator().manual_seed(0)).double()

    def loss() -> Tensor:
        answer = solve(network(state), pulls_of(state))
        return answer.atoms.square().sum() + 30 * answer.cells.square().sum()

    loss().backward()
    layers = (network.to_springs, network.to_softening, network.to_arms, network.from_link)
    for parameter in (layer.weight for layer in layers):
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-5 * direction)
                values.append(float(loss().detach()))
                parameter.sub_(sign * 1e-5 * direction)
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4)


def test_without_information_there_is_no_gate() -> None:
    """R6.4: the same parameters, the same numbers, a factor of exactly 1."""
    informed = StiffnessSettings.read({**SMALL, "environment_information": ("log_largest_force",)})
    plain, gated = [
        StiffnessPolicy(ACTIONS, s, torch.Generator().manual_seed(4)) for s in (StiffnessSettings.read(SMALL), informed)
    ]
    state = state_of([alloy()])
    assert bool((plain.gate_factors(state) == 1).all())
    names = [name for name, _ in gated.named_parameters() if not name.startswith("gate.")]
    assert names == [name for name, _ in plain.named_parameters()]
    assert torch.equal(plain(state).displacements, gated.move(state).displacements)
    factors = gated.factors(state)
    assert factors is not None
    assert not torch.equal(gated(state).displacements, plain(state).displacements)


def test_draws_have_the_density_of_their_factors() -> None:
    """log p = log N - Σ log tanh', by the derivative of tanh itself."""
    settings = StiffnessSettings.read({**SMALL, "environment_information": ("log_largest_force",)})
    policy = StiffnessGaussianPolicy(
        StiffnessActions(0.3, 0.05), settings, torch.Generator().manual_seed(0), 0.5
    ).double()
    state = state_of([alloy(), alloy()])
    noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    move, densities, penalties = policy.sample_with(state, noise)
    assert policy.gate is not None
    deviations, middles = policy.log_deviations.exp(), policy.gate(state)
    drawn = middles + deviations * noise
    normal = torch.distributions.Normal(middles, deviations.expand_as(middles))
    expected = (normal.log_prob(drawn) - torch.log1p(-torch.tanh(drawn).square())).sum(dim=1)
    torch.testing.assert_close(densities, expected)
    torch.testing.assert_close(penalties, 0.5 * middles.square().mean(dim=1))
    quiet, _, _ = policy.sample_with(state, torch.zeros_like(noise))
    torch.testing.assert_close(quiet.displacements, policy(state).displacements)
    assert float((move.displacements - quiet.displacements).detach().abs().max()) > 1e-4
    assert StiffnessActions().dimensions(state).tolist() == [3.0, 3.0]


def test_strains_answer_stress() -> None:
    """A crystal pulled apart shrinks, and the step in strain has the size elasticity asks for."""
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell * 1.02, scale_atoms=True)
    state = state_of([atoms], True)
    policy = StiffnessPolicy(MoveActions(0.5, 0.2), StiffnessSettings.read(SMALL), torch.Generator().manual_seed(0))
    strain = policy(state).strains[0].detach()
    assert -0.1 < float(strain.diagonal().mean()) < -0.005
    torch.testing.assert_close(strain, strain.diagonal().mean() * torch.eye(3), rtol=0, atol=1e-4)
    assert math.isclose(float(strain_vectors(strain[None]).norm()), float(strain.norm()), rel_tol=1e-6)


def test_a_free_cell_without_stress_is_refused() -> None:
    state = state_of([alloy()], True)
    blind = Evaluation(state.evaluation.energies, state.evaluation.forces, None)
    with pytest.raises(relaxion.errors.MissingStressError, match="stress"):
        StiffnessPolicy(ACTIONS, StiffnessSettings.read(SMALL))(replace(state, evaluation=blind))
