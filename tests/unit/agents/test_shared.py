"""What agents share: Bellman target, projection, soft update, descent."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relaxion.train.agents.shared import (
    adam,
    bellman_target,
    descend,
    project_onto_support,
    soft_update,
    target_copy,
)

# rewards and discounts, on a support of -10 … 10 with 51 bins (0.4 apart)
PROJECTION_CASES = {
    "nothing happens": (0.0, 1.0),
    "shifted by whole bins": (1.2, 1.0),
    "shifted by a whole bin, other sign": (-0.4, 1.0),
    "between bins": (0.33, 0.97),
    "all beyond the upper end": (1e4, 1.0),
    "all beyond the lower end": (-1e4, 1.0),
    "partly beyond": (7.0, 0.99),
    "terminal on a bin": (0.8, 0.0),
    "terminal between bins": (0.7, 0.0),
    "terminal on the upper end": (10.0, 0.0),
    "terminal on the lower end": (-10.0, 0.0),
    "terminal outside": (12.0, 0.0),
    "just inside the upper end": (9.999999, 0.0),
    "three steps": (1.7, 0.99**3),
}


def slow_projection(reward: float, discount: float, probabilities: Tensor, support: Tensor) -> Tensor:
    """Bin by bin, in float64, as one would explain it."""
    values, answer = support.tolist(), [0.0] * len(support)
    for value, probability in zip(values, probabilities.tolist(), strict=True):
        moved = min(max(reward + discount * value, values[0]), values[-1])
        for lower in range(len(values) - 1):
            if values[lower] <= moved <= values[lower + 1]:
                share = (moved - values[lower]) / (values[lower + 1] - values[lower])
                answer[lower] += probability * (1 - share)
                answer[lower + 1] += probability * share
                break
    return torch.tensor(answer, dtype=torch.float64)


def distributions(n_bins: int, generator: torch.Generator) -> dict[str, Tensor]:
    random = torch.softmax(3 * torch.randn(n_bins, generator=generator), dim=0)
    ends = torch.zeros(n_bins)
    ends[0], ends[-1] = 0.25, 0.75
    return {"random": random, "uniform": torch.full((n_bins,), 1 / n_bins), "only ends": ends}


@pytest.mark.parametrize("case", PROJECTION_CASES)
@pytest.mark.parametrize("kind", ["random", "uniform", "only ends"])
def test_r5_3_projection_conserves_mass_and_equals_the_slow_version(
    case: str, kind: str, generator: torch.Generator
) -> None:
    support = torch.linspace(-10, 10, 51)
    probabilities = distributions(51, generator)[kind]
    reward, discount = PROJECTION_CASES[case]
    fast = project_onto_support(torch.tensor([reward]), torch.tensor([discount]), probabilities[None], support)[0]
    assert fast.dtype == torch.float32
    assert float(fast.double().sum()) == pytest.approx(1, abs=1e-6)
    assert float(fast.min()) >= 0
    slow = slow_projection(reward, discount, probabilities.double(), torch.linspace(-10, 10, 51, dtype=torch.float64))
    torch.testing.assert_close(fast.double(), slow, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (-1626.0, 0.0), (-150.0, 150.0), (0.1, 0.7), (1e5, 2e5)])
@pytest.mark.parametrize("n_bins", [2, 51, 101])
def test_r5_3_mass_is_conserved_for_many_random_rows_and_supports(
    ends: tuple[float, float], n_bins: int, generator: torch.Generator
) -> None:
    support = torch.linspace(*ends, n_bins)
    rows = 500
    width = ends[1] - ends[0]
    rewards = ends[0] + width * (2 * torch.rand(rows, generator=generator) - 0.5)
    rewards[::3] = support[torch.randint(n_bins, (len(rewards[::3]),), generator=generator)]  # exactly on bins
    discounts = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.3)
    probabilities = torch.softmax(torch.randn(rows, n_bins, generator=generator), dim=1)
    projected = project_onto_support(rewards, discounts, probabilities, support)
    torch.testing.assert_close(projected.sum(dim=1), torch.ones(rows), rtol=0, atol=1e-6)


def test_r5_3_terminal_reward_on_a_bin_gives_all_mass_to_that_bin() -> None:
    support = torch.linspace(-2, 2, 5)
    projected = project_onto_support(support, torch.zeros(5), torch.full((5, 5), 0.2), support)
    torch.testing.assert_close(projected, torch.eye(5))


def test_projection_keeps_the_mean_inside_the_support(generator: torch.Generator) -> None:
    support = torch.linspace(-10, 10, 51)
    probabilities = torch.softmax(torch.randn(20, 51, generator=generator), dim=1)
    rewards, discounts = torch.rand(20, generator=generator), torch.full((20,), 0.9)  # stays within ±10
    projected = project_onto_support(rewards, discounts, probabilities, support)
    torch.testing.assert_close(projected @ support, rewards + discounts * (probabilities @ support), atol=1e-5, rtol=0)


def test_bellman_target_bootstraps_with_the_discount_of_each_transition() -> None:
    target = bellman_target(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.9, 0.0, 0.729]), torch.full((3,), 10.0))
    torch.testing.assert_close(target, torch.tensor([10.0, 2.0, 10.29]))


def test_soft_update_moves_by_the_rate_and_leaves_the_online_network_alone() -> None:
    online, target = nn.Linear(2, 1), nn.Linear(2, 1)
    before, expected = copy.deepcopy(online), [0.9 * t + 0.1 * o for t, o in _pairs(target, online)]
    soft_update(target, online, 0.1)
    for parameter, value in zip(target.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, value)
    assert all(torch.equal(a, b) for a, b in _pairs(online, before))


def _pairs(first: nn.Module, second: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return list(zip(first.parameters(), second.parameters(), strict=True))


def test_soft_update_refuses_networks_of_different_length() -> None:
    with pytest.raises(ValueError, match="argument"):
        soft_update(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1), 0.1)


def test_target_copy_is_equal_separate_and_without_gradient() -> None:
    network = nn.Linear(2, 1)
    copied = target_copy(network)
    assert all(torch.equal(a, b) for a, b in _pairs(network, copied))
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    with torch.no_grad():
        network.weight += 1
    assert not torch.equal(network.weight, copied.weight)
    assert network.weight.requires_grad


def test_descend_touches_only_its_own_parameters_and_leaves_no_gradient_behind() -> None:
    mine, other = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0, -1.0]))
    optimizer = adam([mine], learning_rate=0.1)
    norm = descend((mine * other).sum(), optimizer)
    torch.testing.assert_close(mine.detach(), torch.tensor([0.9, 2.1]))  # Adam's first step is lr · sign
    assert torch.equal(other.detach(), torch.tensor([3.0, -1.0]))
    assert float(norm) == pytest.approx(math.sqrt(10))
    assert mine.grad is None
    assert other.grad is None


def test_descend_leaves_parameters_the_loss_does_not_know_where_they_are() -> None:
    used, unused = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    descend(used.square(), adam([used, unused], learning_rate=0.1))
    assert used.item() == pytest.approx(0.9)
    assert unused.item() == 1.0


def test_descend_that_does_not_move_only_fills_adams_memory() -> None:
    mine = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = adam([mine], learning_rate=0.1)
    descend(mine.square().sum(), optimizer, moves=False)
    assert mine.tolist() == [1.0, 2.0]
    assert optimizer.state[mine]["exp_avg"].tolist() == pytest.approx([0.2, 0.4])
    assert optimizer.state[mine]["step"] == 1
    descend(mine.square().sum(), optimizer)
    torch.testing.assert_close(mine.detach(), torch.tensor([0.9, 1.9]))


def laid_out(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers, in memory in another order of the axes."""
    return values.permute(order).contiguous().permute(*torch.tensor(order).argsort().tolist())


class Permuted(torch.autograd.Function):
    """Passes values on; their gradient comes back in another layout, as it does from networks that permute."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.order = order
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return laid_out(gradient, ctx.order), None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("own_order", [(0, 1, 2), (1, 2, 0)])  # parameters need not be contiguous either
def test_gradients_of_any_layout_step_their_own_numbers(
    order: tuple[int, ...], own_order: tuple[int, ...], generator: torch.Generator
) -> None:
    start = torch.randn(4, 3, 2, generator=generator)
    ours, theirs = nn.Parameter(laid_out(start, own_order)), nn.Parameter(start.clone())
    optimizer, plain = adam([ours], 0.1), torch.optim.Adam([theirs], lr=0.1, foreach=False, fused=False)
    for _ in range(5):
        weights = torch.randn(start.shape, generator=generator)
        descend((Permuted.apply(ours, order) * weights).sum(), optimizer)
        theirs.grad = weights
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours.grad is None
