"""R3.1: the worked example, the floor, the cut, and running statistics against plain ones."""

from __future__ import annotations

import pytest
import torch

from relaxion.train.experience.vectors import Normaliser


def make_normaliser(mean: list[float], variance: list[float]) -> Normaliser:
    normaliser = Normaliser(len(mean))
    numbers = {"count": torch.tensor(7), "mean": torch.tensor(mean), "variance": torch.tensor(variance)}
    normaliser.restore({name: tensor.double() for name, tensor in numbers.items()})
    return normaliser


def test_worked_example() -> None:
    normaliser = make_normaliser([10, 15, 25], [4, 9, 25])
    answer = normaliser(torch.tensor([[11.0, 18.0, 30.0], [12.0, 20.0, 33.0]]))
    torch.testing.assert_close(answer, torch.tensor([[0.5, 1.0, 1.0], [1.0, 5 / 3, 1.6]]), rtol=0, atol=1e-6)


def test_floor_and_cut() -> None:
    normaliser = make_normaliser([0, 0, 0], [0, 1, 1])
    assert normaliser(torch.tensor([[1e-5, 11.0, -11.0]])).tolist()[0] == pytest.approx([0.1, 10.0, -10.0])


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [5], [2, 30, 1]])
def test_running_statistics_are_the_plain_ones(sizes: list[int], generator: torch.Generator) -> None:
    parts = [1e3 + torch.randn(size, 3, generator=generator) for size in sizes]
    normaliser = Normaliser(3)
    for part in parts:
        normaliser.update(part)
    everything = torch.cat(parts).double()
    assert int(normaliser.count) == len(everything)
    torch.testing.assert_close(normaliser.mean, everything.mean(dim=0))
    torch.testing.assert_close(normaliser.variance, everything.var(dim=0, correction=0))


def test_before_the_first_observation_it_changes_nothing() -> None:
    numbers = torch.tensor([[1.0, -2.0]])
    assert torch.equal(Normaliser(2)(numbers), numbers)


def test_switched_off_it_changes_nothing() -> None:
    normaliser = Normaliser(1, enabled=False)
    normaliser.update(torch.tensor([[3.0], [50.0]]))
    assert normaliser(torch.tensor([[99.0]])).item() == 99.0


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="normaliser of 2 numbers, expected 3"):
        Normaliser(3).restore(Normaliser(2).snapshot())
