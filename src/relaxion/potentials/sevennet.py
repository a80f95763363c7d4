"""SevenNet: many structures in one call of the network; network and weights from the package `sevenn`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaxion.errors import PotentialError
from relaxion.potentials.extras import package_folder
from relaxion.potentials.pairwise import evaluated_in_portions, on_device
from relaxion.potentials.potential import Potential
from relaxion.structures import Evaluation, Structures
from relaxion.structures.devices import DeviceLike, device_of
from relaxion.structures.graph import Pairs

# in the wheel, so that nothing is downloaded; names as sevenn's
MODELS = {
    "7net-0": "SevenNet_0__11Jul2024/checkpoint_sevennet_0.pth",
    "7net-l3i5": "SevenNet_l3i5/checkpoint_l3i5.pth",
}
PAIRS_AT_ONCE = 500  # more are slower: the products of spherical tensors fall out of the cache


class Sevennet(Potential):
    """Equal to `sevenn.calculator.SevenNetCalculator`. float32 inside."""

    name = "SevenNet"

    def __init__(self, model: str = "7net-0", device: DeviceLike = None) -> None:
        """`model`: "7net-0", or "7net-l3i5", which is more accurate and several times slower."""
        super().__init__()
        self.device = device_of(device)
        self._network = load_network(model, self.device)

    @property
    def elements(self) -> frozenset[int]:
        return self._network.elements

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        pairs = Pairs.of(structures, self._network.cutoff)
        network = on_device(self._network.energies_and_slopes, self.device)
        return evaluated_in_portions(structures, pairs, network, PAIRS_AT_ONCE, stresses)


@dataclass(frozen=True, eq=False)
class SevennetNetwork:
    """sevenn's modules up to the energies of atoms; derivatives are taken here, by the vectors of pairs."""

    modules: tuple[torch.nn.Module, ...]
    row_of_number: Tensor  # (120,) int64, -1: not known
    elements: frozenset[int]
    cutoff: float  # Å

    def energies_and_slopes(self, atomic_numbers: Tensor, ends: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Energies of the atoms (n_atoms,) eV, and dE/dr of the pairs (n_pairs, 3) eV/Å."""
        there = vectors.detach().to(torch.float32)
        there.requires_grad_()
        with torch.enable_grad():
            data = {
                "x": self.row_of_number.index_select(0, atomic_numbers),
                "edge_index": torch.cat([ends, ends.flip(0)], dim=1),
                "edge_vec": torch.cat([there, -there]),
            }
            for module in self.modules:
                data = module(data)
            energies = data["atomic_energy"][:, 0]
            (slopes,) = torch.autograd.grad(energies.sum(), there, allow_unused=True, materialize_grads=True)
        return energies.detach(), slopes


@cache
def load_network(model: str, device: torch.device) -> SevennetNetwork:
    """Once per process, model and device."""
    if model not in MODELS:
        raise PotentialError(f"unknown SevenNet model '{model}'; in the wheel are {', '.join(MODELS)}")
    file = package_folder("sevenn") / "pretrained_potentials" / MODELS[model]
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")  # torch.jit of e3nn is deprecated; an accelerator for GPUs is missing
        network = _build(file).to(device)
    modules = [
        module for name, module in network.named_children() if name not in ("reduce_total_enegy", "force_output")
    ]
    return SevennetNetwork(
        tuple(modules), network.z_to_onehot_tensor.to(device), frozenset(network.type_map), float(network.cutoff)
    )


def _build(file: Path) -> Any:
    from sevenn import checkpoint

    try:
        with _plain_tensors_only(checkpoint):
            network = checkpoint.SevenNetCheckpoint(file).build_model()
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise PotentialError(
            f"sevenn cannot build its network from {file} ({error}); try: pip install 'sevenn>=0.11,<0.14'"
        ) from error
    return network.eval().requires_grad_(False)


@contextmanager
def _plain_tensors_only(checkpoint: Any) -> Iterator[None]:
    """sevenn unpickles whatever lies in its checkpoints; tensors, arrays and plain values are enough."""
    numpy_parts: list[Any] = [np.ndarray, np.dtype, type(np.dtype("float64")), type(np.dtype("float32"))]
    rebuild = np.zeros(1).__reduce__()[0]  # NumPy 1 and 2 keep it in different places
    numpy_parts.append((rebuild, "numpy.core.multiarray._reconstruct"))

    def load(file: str, **_: Any) -> Any:
        with torch.serialization.safe_globals(numpy_parts):
            return torch.load(file, map_location="cpu", weights_only=True)

    original = checkpoint.torch_load
    checkpoint.torch_load = load
    try:
        yield
    finally:
        checkpoint.torch_load = original
