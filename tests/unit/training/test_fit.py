"""The fit: who steps which parameter, and that an interrupted fit goes on where it was."""

from __future__ import annotations

import copy

import pytest
import torch
from ase.build import bulk

from relaxion.errors import SettingsError
from relaxion.model.stiffness_network import StiffnessNetwork, StiffnessSettings
from relaxion.potentials.registry import potential
from relaxion.structures import Move, State, Structures
from relaxion.train.supervised.fit import ExampleDataset, Examples, Fit, FitSettings, by_muon, relative_errors

SETTINGS = FitSettings(fit_updates=8, fit_optimizer="muon", fit_learning_rate=1e-3)
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")


def network() -> StiffnessNetwork:
    shape = StiffnessSettings(channels=8, n_hidden=8, n_radial=6, n_coordinates=2, softens=True)
    return StiffnessNetwork(shape, torch.Generator().manual_seed(0))


def rattled() -> Examples:
    """Ways back of rattled copper."""
    whole = bulk("Cu", cubic=True)
    images = []
    for seed in range(3):
        images.append(whole.copy())
        images[-1].rattle(0.1, seed=seed)
    structures = Structures.from_ase(images)
    evaluation = potential("emt")(structures)
    ways = torch.cat([torch.from_numpy(whole.positions - image.positions) for image in images])
    return Examples(
        State.without_past(structures, evaluation, 0.3), Move(ways, torch.zeros(3, 3, 3, dtype=torch.float64))
    )


@needs_muon
def test_muon_steps_matrices_and_adam_all_else_as_torch_would() -> None:
    taught, plain, examples = network(), network(), rattled()
    fit = Fit(taught, ExampleDataset(), SETTINGS)
    parameters = list(plain.parameters())
    flat = [torch.nn.Parameter(p.detach()[0].clone()) for p in parameters if by_muon(p)]
    rate = 0.02 / 3  # a third of the usual rate, as Adam's
    muon = torch.optim.Muon(flat, lr=rate, weight_decay=0.0)
    adam = torch.optim.Adam([p for p in parameters if not by_muon(p)], lr=1e-3)
    assert 0 < len(flat) < len(parameters)
    for _ in range(3):
        share = fit.learning_rate / SETTINGS.fit_learning_rate
        fit.learn_from(examples)
        plain.zero_grad()
        relative_errors(plain, examples).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        matrices = [p for p in parameters if by_muon(p)]
        for matrix, p in zip(flat, matrices, strict=True):
            assert p.grad is not None
            matrix.grad = p.grad[0]
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = rate * share, 1e-3 * share
        muon.step(), adam.step()
        for matrix, p in zip(flat, matrices, strict=True):
            p.data[0] = matrix.data
    for (name, one), other in zip(taught.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)


@needs_muon
def test_an_interrupted_fit_goes_on_to_the_bit() -> None:
    straight, examples = Fit(network(), ExampleDataset(), SETTINGS), rattled()
    for _ in range(3):
        straight.learn_from(examples)
    later = Fit(copy.deepcopy(straight.network), ExampleDataset(), SETTINGS)
    later.restore(straight.snapshot())
    for fit in (straight, later):
        for _ in range(3):
            fit.learn_from(examples)
    pairs = zip(straight.network.parameters(), later.network.parameters(), strict=True)
    assert all(bool((one == other).all()) for one, other in pairs)


def test_without_muon_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SettingsError, match=r"needs torch 2\.9.*fit_optimizer = adam"):
        Fit(network(), ExampleDataset(), SETTINGS)
