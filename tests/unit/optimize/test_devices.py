"""Where networks compute: no tensor is made elsewhere than where its neighbours are, and doors pass the device on.

There is no second device here. Instead, while a network computes, every tensor made out of nothing must say where: such
a tensor would be on the CPU, whatever device the network is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ase.build import bulk
from torch.overrides import TorchFunctionMode

import relaxion
from relaxion.errors import SettingsError
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.potentials.chgnet import Chgnet
from relaxion.structures import Structures
from relaxion.structures.structures import device_of, moved_to

MAKERS = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn")


class SaysWhere(TorchFunctionMode):
    """Remembers every tensor that was made without a word on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.strays = 0, list[str]()

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords, name = keywords or {}, getattr(function, "__name__", "")
        self.seen += 1
        from_nothing = name in MAKERS and getattr(function, "__module__", "") in (None, "torch")
        if from_nothing and "device" not in keywords:
            self.strays.append(name)
        return function(*arguments, **keywords)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], SaysWhere]:
    """A method of a class, watched while it runs."""

    def watch(owner: type, name: str) -> SaysWhere:
        mode, method = SaysWhere(), getattr(owner, name)

        def inside(*arguments: Any, **keywords: Any) -> Any:
            with mode:
                return method(*arguments, **keywords)

        monkeypatch.setattr(owner, name, inside)
        return mode

    return watch


def salt() -> Any:
    atoms = bulk("NaCl", "rocksalt", a=5.5, cubic=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def test_the_watch_notices(watched: Any) -> None:
    class Stray:
        def make(self) -> torch.Tensor:
            return torch.zeros(3) + torch.zeros(3, device="cpu")

    mode = watched(Stray, "make")
    Stray().make()
    assert mode.strays == ["zeros"]


@pytest.mark.parametrize("cell", [False, True])
def test_the_network_of_a_policy(watched: Any, cell: bool) -> None:
    mode = watched(StiffnessNetwork, "_learned")
    (done,) = relaxion.relax_batch([salt()], "chgnet", policy="universal", cell=cell, device="cpu")
    assert done.policy_used == "universal"
    assert mode.seen > 100
    assert mode.strays == []


def test_the_network_of_a_potential(watched: Any) -> None:
    mode = watched(Chgnet, "_energies_and_slopes")
    relaxion.potential("chgnet", device="cpu")(Structures.from_ase([salt(), bulk("Cu")]), stresses=True)
    assert mode.seen > 10
    assert mode.strays == []


def test_everything_in_a_dataclass_moves() -> None:
    structures = Structures.from_ase(salt())
    assert moved_to(torch.device("cpu"), structures) is structures
    there = moved_to(torch.device("meta"), structures)
    assert {tensor.device.type for tensor in vars(there).values()} == {"meta"}
    assert there.n_atoms == structures.n_atoms


def test_doors_pass_the_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def remember(word: Any) -> torch.device:
        asked.append(word)
        return torch.device("cpu")

    for module in ("relaxion.optimizer.choice", "relaxion.potentials.registry", "relaxion.potentials.chgnet"):
        monkeypatch.setattr(f"{module}.device_of", remember)
    relaxion.Relaxer(salt(), device="cuda:7", logfile=None)
    relaxion.potential("chgnet", device="cuda:8")
    relaxion.relax_batch([salt()], "chgnet", device="cuda:9", max_force_calls=1)
    assert {"cuda:7", "cuda:8", "cuda:9"} <= set(map(str, asked))
    assert list(map(str, asked)).count("cuda:9") == 2, "policy and potential"


def test_refused() -> None:
    with pytest.raises(SettingsError, match="unknown device 'gpu'"):
        relaxion.Relaxer(salt(), device="gpu")
    assert device_of(None) == torch.device("cpu")
