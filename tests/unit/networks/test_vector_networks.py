"""Networks and actions of control tasks: bounds of every kind, densities, separate critics in one product."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from relaxion.errors import SettingsError
from relaxion.model.roles import squashed_log_density
from relaxion.train.agents.vector_networks import (
    BoxActions,
    Layers,
    VectorCategoricalCritic,
    VectorCritics,
    VectorGaussianPolicy,
    VectorNetworkSettings,
    VectorPolicy,
)

BOUNDS = {
    "one": ([-1.0], [1.0]),
    "pendulum": ([-2.0], [2.0]),
    "asymmetric, different for each component": ([-1.0, 0.1, -300.0], [2.0, 0.7, -100.0]),
    "hardly any room": ([0.1], [0.1001]),
    "large": ([-3e38], [3e38]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_actions_stay_inside_and_reach_both_bounds(name: str, generator: torch.Generator) -> None:
    box = BoxActions(*BOUNDS[name])
    policy = VectorPolicy(2, box, (4,), generator)
    with torch.no_grad():
        policy.layers.get_parameter("bias_1").fill_(0.0)
    observations = 1e4 * torch.randn(500, 2, generator=generator)
    actions = box.bound(policy(observations).detach())
    assert bool((actions >= box.low).all())
    assert bool((actions <= box.high).all())
    torch.testing.assert_close(actions.amin(dim=0), box.low, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actions.amax(dim=0), box.high, rtol=1e-5, atol=1e-6)


def test_noise_is_measured_in_half_ranges_of_each_component(generator: torch.Generator) -> None:
    box = BoxActions([-1.0, 0.0, -300.0], [2.0, 0.5, -100.0])
    middle = box.centre.expand(50_000, 3)
    noise = box.perturb(middle, 0.1, generator) - middle
    np.testing.assert_allclose(noise.std(dim=0).numpy(), [0.15, 0.025, 10.0], rtol=0.02)
    clipped = box.perturb(middle, 0.1, generator, clip=0.15) - middle
    np.testing.assert_allclose(clipped.amax(dim=0).numpy(), [0.225, 0.0375, 15.0], rtol=1e-4)
    np.testing.assert_allclose(clipped.amin(dim=0).numpy(), [-0.225, -0.0375, -15.0], rtol=1e-4)


def test_noise_of_each_row_its_own_scale(generator: torch.Generator) -> None:
    box = BoxActions([-1.0], [1.0])
    scale = torch.tensor([[0.0], [1.0]]).repeat(1000, 1)
    noise = box.perturb(torch.zeros(2000, 1), scale, generator)
    assert torch.equal(noise[::2], torch.zeros(1000, 1))
    assert float(noise[1::2].std()) == pytest.approx(1.0, rel=0.1)


def test_bound_is_the_nearest_point_of_the_box() -> None:
    box = BoxActions([-1.0, 0.5], [2.0, 0.75])
    outside = torch.tensor([[5.0, 0.6], [-5.0, 0.0], [0.0, 9.0]])
    assert box.bound(outside).tolist() == [[2.0, pytest.approx(0.6)], [-1.0, 0.5], [0.0, 0.75]]


def test_random_actions_fill_the_box_evenly(generator: torch.Generator) -> None:
    box = BoxActions([-1.0, 100.0], [3.0, 101.0])
    drawn = box.random(torch.zeros(40_000, 7), generator)
    assert drawn.shape == (40_000, 2)
    fractions = (drawn - box.low) / (box.high - box.low)
    assert bool(((fractions >= 0) & (fractions <= 1)).all())
    for component in fractions.T:
        counts = torch.histc(component, bins=10, min=0, max=1)
        np.testing.assert_allclose(counts.numpy(), 4000, rtol=0.08)


def test_r3_6_dimensions_are_the_components_of_each_action() -> None:
    assert BoxActions([-1.0] * 3, [1.0] * 3).dimensions(torch.zeros(4, 9)).tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([-np.inf], [1.0], "finite bounds"),
        ([np.nan], [1.0], "finite bounds"),
        ([1.0], [1.0], "low < high"),
        ([2.0], [1.0], "low < high"),
        ([-1.0], [1.0, 2.0], "two vectors of one length"),
        ([[-1.0]], [[1.0]], "flatten"),
        ([], [], "two vectors of one length"),
    ],
)
def test_bounds_that_are_none_are_refused(low: list[float], high: list[float], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        BoxActions(low, high)


def test_layers_equal_separate_perceptrons(generator: torch.Generator) -> None:
    layers = Layers((5, 7, 6, 2), 3, generator)
    inputs = torch.randn(11, 5, generator=generator)
    together = layers(inputs)
    assert together.shape == (3, 11, 2)
    parameters = list(layers.parameters())
    for number in range(3):
        plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2))
        with torch.no_grad():
            for linear, weight, bias in zip(plain[::2], parameters[::2], parameters[1::2], strict=True):
                assert isinstance(linear, nn.Linear)
                linear.weight.copy_(weight[number].T)
                linear.bias.copy_(bias[number, 0])
        torch.testing.assert_close(together[number], plain(inputs), rtol=1e-5, atol=1e-6)
        if number == 0:
            torch.testing.assert_close(layers.first(inputs), plain(inputs), rtol=1e-5, atol=1e-6)


def test_layers_have_right_gradients_although_activations_are_overwritten(generator: torch.Generator) -> None:
    layers = Layers((2, 3, 3, 1), 2, generator).double()
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layers, (inputs,))
    assert torch.autograd.gradcheck(layers.first, (inputs,))
    weights = {name: parameter.detach().requires_grad_() for name, parameter in layers.named_parameters()}
    assert torch.autograd.gradcheck(
        lambda *tensors: torch.func.functional_call(layers, dict(zip(weights, tensors, strict=True)), (inputs,)),
        tuple(weights.values()),
    )


def test_first_weights_come_from_the_generator_alone(make_generator: Callable[[int], torch.Generator]) -> None:
    box = BoxActions([-1.0], [1.0])
    before = torch.get_rng_state()
    first, again, other = (VectorCritics(3, box, (8,), 2, make_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for one, two, three in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    for parameter in first.parameters():
        assert not torch.equal(parameter[0], parameter[1])  # the critics disagree, or they would be one


def test_r3_2_critics_answer_as_one_tensor_and_the_first_alone(generator: torch.Generator) -> None:
    box = BoxActions([-1.0, 0.0], [2.0, 9.0])
    critics = VectorCritics(3, box, (8, 8), 4, generator)
    observations, actions = torch.randn(6, 3, generator=generator), torch.rand(6, 2, generator=generator)
    values = critics(observations, actions)
    assert values.shape == (6, 4)
    torch.testing.assert_close(critics.first(observations, actions), values[:, 0])


def test_critics_see_actions_scaled_to_the_box(generator: torch.Generator) -> None:
    """The same weights on another box give the same value for the same relative action."""
    narrow, wide = BoxActions([-1.0], [1.0]), BoxActions([-30.0], [70.0])
    critics = VectorCritics(3, narrow, (8,), 2, generator)
    bins = VectorCategoricalCritic(3, narrow, (8,), 5, generator)
    observations, relative = torch.randn(6, 3, generator=generator), 2 * torch.rand(6, 1, generator=generator) - 1
    for network in (critics, bins):
        expected = network(observations, relative)
        network.centre, network.half_range = wide.centre, wide.half_range
        torch.testing.assert_close(network(observations, 20 + 50 * relative), expected, rtol=1e-4, atol=1e-5)


def test_r3_5_density_at_pre_tanh_15_is_exact() -> None:
    """log(1 - tanh² 15) is -28.6; log(1 - a² + 1e-6) would say -13.8."""
    before_tanh = torch.tensor([[15.0], [-15.0], [40.0]])
    zeros = torch.zeros(3, 1)
    slope = -0.5 * math.log(2 * math.pi) - squashed_log_density(before_tanh, zeros, zeros)
    expected = [math.log(4) - 2 * 15, math.log(4) - 2 * 15, math.log(4) - 2 * 40]  # 1 - tanh² u → 4 exp(-2|u|)
    assert expected[0] == pytest.approx(-28.6137, abs=1e-4)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(("mean", "log_deviation"), [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.5), (15.0, -2.0)])
def test_density_against_numerical_integration(mean: float, log_deviation: float) -> None:
    """∫ p(a) da over an interval of tanh equals the Gaussian's probability of the interval before tanh."""
    deviation = math.exp(log_deviation)
    ends = mean - 2 * deviation, mean + 1 * deviation
    before_tanh = torch.linspace(*ends, 20_001, dtype=torch.float64)
    # in a the interval is 1e-12 wide at mean 15: da = (1 - tanh² u) du, from cosh, which is exact there
    width_of_a = 1 / torch.cosh(before_tanh) ** 2
    noise = (before_tanh - mean) / deviation
    log_density = squashed_log_density(before_tanh[:, None], noise[:, None], torch.full((20_001, 1), log_deviation))
    integral = torch.trapezoid(log_density.exp() * width_of_a, before_tanh)
    expected = 0.5 * (math.erf(1 / math.sqrt(2)) + math.erf(2 / math.sqrt(2)))
    assert float(integral) == pytest.approx(expected, rel=1e-6)


def test_density_of_a_policy_sums_to_one_over_the_action(generator: torch.Generator) -> None:
    """A histogram of draws, in two dimensions, against the densities the policy reports for them."""
    box = BoxActions([-3.0, 0.0], [1.0, 0.5])
    policy = VectorGaussianPolicy(1, box, (4,), generator)
    actions, log_densities, penalties = policy.sample(torch.zeros(200_000, 1), generator)
    relative = (actions - box.centre) / box.half_range
    # E[1 / p] over draws is the area where p > 0: that of the square from -1 to 1
    inside = (relative.abs() < 0.8).all(dim=1)
    area = ((-log_densities).exp() * inside).mean()
    assert area.item() == pytest.approx(1.6**2, rel=0.02)
    assert torch.equal(penalties, torch.zeros(200_000))


def test_r3_5_the_policy_returns_its_own_penalty(generator: torch.Generator) -> None:
    box = BoxActions([-1.0, -1.0], [1.0, 1.0])
    policy = VectorGaussianPolicy(3, box, (4,), generator, penalty_weight=0.5)
    observations = torch.randn(6, 3, generator=generator)
    _, _, penalties = policy.sample(observations, generator)
    torch.testing.assert_close(penalties, 0.5 * policy.gaussian(observations)[0].square().mean(dim=1))


def test_middle_of_the_gaussian_policy_is_what_it_draws_without_noise(generator: torch.Generator) -> None:
    box = BoxActions([-3.0, 0.0], [1.0, 0.5])
    policy = VectorGaussianPolicy(2, box, (4,), generator)
    with torch.no_grad():
        policy.layers.get_parameter("bias_1")[..., 2:] = -100.0  # deviation at its floor, exp(-20)
    observations = torch.randn(6, 2, generator=generator)
    actions, log_densities, _ = policy.sample(observations, generator)
    torch.testing.assert_close(actions, policy(observations))
    assert bool(torch.isfinite(log_densities).all())


def test_settings_refuse_networks_without_layers() -> None:
    for wrong in ({"widths": ()}, {"widths": (0,)}):
        with pytest.raises(SettingsError):
            VectorNetworkSettings.read(wrong)
