"""Shared by all tests: one torch thread, small structures, a potential that can be worked out by hand."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from ase import Atoms
from ase.build import bulk

from relaxion.model.card import ModelCard
from relaxion.model.policy_file import Network, PolicyFile
from relaxion.model.roles import Policy
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Structures
from relaxion.structures.structures import per_structure_sum

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Springs(Potential):
    """Every atom on a spring to its own well: E = ½ Σ k |x - x0|². Its wells sit on multiples of 3 Å."""

    name = "springs"
    has_stress = False

    def __init__(self, stiffness: float = 1.0) -> None:
        super().__init__()
        self.stiffness = stiffness  # eV/Å²

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        assert not stresses
        away = structures.positions - 3.0 * torch.round(structures.positions / 3.0)
        energy = 0.5 * self.stiffness * (away**2).sum(dim=1)
        energies = per_structure_sum(energy, structures.structure_index, structures.n_structures)
        return Evaluation(energies, -self.stiffness * away, None)


METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")


def small_stiffness_policy(seed: int = 0) -> Policy:
    """Untrained: it says about what springs say, and takes steps of its own."""
    from relaxion.model.actions import MoveActions
    from relaxion.model.atom_policies import StiffnessPolicy
    from relaxion.model.stiffness_network import StiffnessSettings

    settings = StiffnessSettings(channels=8, n_hidden=8, n_radial=6, n_coordinates=2)
    return StiffnessPolicy(MoveActions(), settings, torch.Generator().manual_seed(seed))


def write_bundle(
    file: Path, policy: Policy, elements: Sequence[str] = METALS, gate: Network | None = None,
    periodic: bool | None = None,
) -> Path:  # fmt: skip
    """A bundle of the policy, named as its file."""
    from relaxion.model.policy_file import described

    card = ModelCard(
        elements=tuple(elements), smallest_n_atoms=2, largest_n_atoms=16, potential="emt", agent="none", seed=0,
        force_tolerance_ev_per_angstrom=0.05, training_command="none", environment_steps=0, relaxion_version="0",
        date="2026-11-16", periodic=periodic,
    )  # fmt: skip
    networks = {"policy": described(policy)} | ({} if gate is None else {"gate": gate})
    PolicyFile(file.name.removesuffix(".safetensors"), networks, card).write(file)
    return file


@pytest.fixture(scope="session")
def make_stiffness_policy() -> Callable[..., Policy]:
    return small_stiffness_policy


@pytest.fixture(scope="session")
def make_bundle() -> Callable[..., Path]:
    return write_bundle


@pytest.fixture(scope="session")
def stiffness_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a small untrained stiffness policy for the metals of EMT, and what is put on them."""
    file = tmp_path_factory.mktemp("policies") / "untrained.safetensors"
    return write_bundle(file, small_stiffness_policy(), (*METALS, "H", "C", "N", "O"))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the policies that ship; the user has none either."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr("relaxion.policies.SHIPPED", folder)
    monkeypatch.setenv("RELAXION_POLICIES", str(tmp_path / "users-own"))
    return folder


@pytest.fixture
def springs() -> Springs:
    return Springs()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240501)


@pytest.fixture
def make_generator() -> Callable[[int], torch.Generator]:
    return lambda seed=0: torch.Generator().manual_seed(seed)


@pytest.fixture
def copper() -> Atoms:
    return bulk("Cu", cubic=True)


@pytest.fixture
def mixed_structures(copper: Atoms) -> Structures:
    """Different sizes and elements: 4, 1, 8 and 3 atoms; the last is a cluster without a cell."""
    gold = bulk("Au")
    alloy = bulk("Al", cubic=True).repeat((2, 1, 1))
    alloy.numbers[::3] = 28
    cluster = Atoms("Cu3", positions=[[0, 0, 0], [2.5, 0, 0], [1.2, 2.1, 0]])
    return Structures.from_ase([copper, gold, alloy, cluster])
