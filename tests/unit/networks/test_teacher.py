"""The teacher of a metric: who steps which parameter, and that an interrupted teacher goes on where it was."""

from __future__ import annotations

import copy

import pytest
import torch
from ase.build import bulk

from relaxion.errors import SettingsError
from relaxion.networks.metric.network import MetricNetwork, MetricSettings
from relaxion.networks.metric.teacher import Lessons, Teacher, TeachingSettings, by_muon, relative_errors
from relaxion.potentials import potential
from relaxion.structures import Move, State, Structures

SETTINGS = TeachingSettings(lesson_updates=8, lesson_optimizer="muon", lesson_learning_rate=1e-3)
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")


def network() -> MetricNetwork:
    shape = MetricSettings(channels=8, n_hidden=8, n_radial=6, n_coordinates=2, softens=True)
    return MetricNetwork(shape, torch.Generator().manual_seed(0))


def lessons() -> Lessons:
    """Ways back of rattled copper."""
    whole = bulk("Cu", cubic=True)
    images = []
    for seed in range(3):
        images.append(whole.copy())
        images[-1].rattle(0.1, seed=seed)
    structures = Structures.from_ase(images)
    evaluation = potential("emt")(structures)
    ways = torch.cat([torch.from_numpy(whole.positions - image.positions) for image in images])
    return Lessons(
        State.without_past(structures, evaluation, 0.3), Move(ways, torch.zeros(3, 3, 3, dtype=torch.float64))
    )


@needs_muon
def test_muon_steps_matrices_and_adam_all_else_as_torch_would() -> None:
    taught, plain, examples = network(), network(), lessons()
    teacher = Teacher(taught, SETTINGS)
    parameters = list(plain.parameters())
    flat = [torch.nn.Parameter(p.detach()[0].clone()) for p in parameters if by_muon(p)]
    muon = torch.optim.Muon(flat, lr=0.02, weight_decay=0.0)
    adam = torch.optim.Adam([p for p in parameters if not by_muon(p)], lr=1e-3)
    assert 0 < len(flat) < len(parameters)
    for _ in range(3):
        share = teacher.learning_rate / SETTINGS.lesson_learning_rate
        teacher.update(examples)
        plain.zero_grad()
        relative_errors(plain, examples).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        matrices = [p for p in parameters if by_muon(p)]
        for matrix, p in zip(flat, matrices, strict=True):
            assert p.grad is not None
            matrix.grad = p.grad[0]
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * share, 1e-3 * share
        muon.step(), adam.step()
        for matrix, p in zip(flat, matrices, strict=True):
            p.data[0] = matrix.data
    for (name, one), other in zip(taught.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)


@needs_muon
def test_an_interrupted_teacher_goes_on_to_the_bit() -> None:
    straight, examples = Teacher(network(), SETTINGS), lessons()
    for _ in range(3):
        straight.update(examples)
    later = Teacher(copy.deepcopy(straight.network), SETTINGS)
    later.restore(straight.tensors(), straight.n_updates)
    for teacher in (straight, later):
        for _ in range(3):
            teacher.update(examples)
    pairs = zip(straight.network.parameters(), later.network.parameters(), strict=True)
    assert all(bool((one == other).all()) for one, other in pairs)


def test_without_muon_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SettingsError, match=r"needs torch 2\.9.*lesson_optimizer.*adam"):
        Teacher(network(), SETTINGS)


def test_older_runs_know_nothing_of_muon() -> None:
    assert "lesson_optimizer" not in TeachingSettings().model_dump()
    assert SETTINGS.model_dump()["lesson_optimizer"] == "muon"
