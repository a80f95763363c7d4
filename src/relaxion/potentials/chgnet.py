"""CHGNet: many structures in one call of the network, weights from the wheel of the package `chgnet`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from relaxion.errors import PotentialError, SettingsError
from relaxion.potentials.base import Potential
from relaxion.potentials.chgnet import ANGLE_CUTOFF, CUTOFF, ChgnetGraph, ChgnetNetwork
from relaxion.potentials.engines import package_folder
from relaxion.potentials.pairwise import evaluated_in_portions, on_device
from relaxion.structures import Evaluation, Structures
from relaxion.structures.state import Pairs
from relaxion.structures.structures import DeviceLike, device_of, per_structure_sum

REPAIR = "pip install 'chgnet>=0.4,<0.5'"
VERSION = "0.3.0"  # what `chgnet.model.CHGNet.load()` loads
NEVER_SEEN = frozenset(range(84, 89))  # Po, At, Rn, Fr, Ra: 94 embeddings, but only 89 elements in the training set
PRECISIONS: dict[torch.dtype | str, torch.dtype] = {
    torch.float32: torch.float32, torch.float64: torch.float64, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
MOST_SHORT_BONDS = 64  # of an atom, on average: five times as dense as anything real, and angles are their square
PAIRS_AT_ONCE = 2000  # bounds the memory of one call; in time 500 to 8000 are alike (measured)


class Chgnet(Potential):
    """Equal to `chgnet.model.CHGNetCalculator`, without magnetic moments.

    Structures without cell, which CHGNet's own calculator refuses, are answered too; CHGNet was not made for them.
    Atoms far too dense are answered with NaN: their angles would fill the memory, and the network was not trained on
    them; optimizers here take such an answer as a step too far.
    """

    name = "CHGNet"

    def __init__(self, dtype: torch.dtype | str = torch.float32, device: DeviceLike = None) -> None:
        """`dtype`: precision inside. float64 is half as fast, and its forces are derivatives to the last digit."""
        super().__init__()
        if dtype not in PRECISIONS:
            raise SettingsError(f"dtype of CHGNet is float32 or float64, got {dtype}")
        self.device = device_of(device)
        self._network = load_network(PRECISIONS[dtype], self.device)

    @property
    def elements(self) -> frozenset[int]:
        return frozenset(range(1, len(self._network.element_energies) + 1)) - NEVER_SEEN

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        pairs = Pairs.of(structures, CUTOFF)
        crowded = are_crowded(structures, pairs)
        if bool(crowded.any()):
            return self._without(crowded, structures, stresses)
        network = on_device(self._energies_and_slopes, self.device)
        return evaluated_in_portions(structures, pairs, network, PAIRS_AT_ONCE, stresses)

    def _energies_and_slopes(self, atomic_numbers: Tensor, ends: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        energies, slopes = self._network.energies_and_slopes(ChgnetGraph.of(atomic_numbers, ends, vectors))
        return self._network.element_energies.index_select(0, atomic_numbers - 1) + energies, slopes

    def _without(self, crowded: Tensor, structures: Structures, stresses: bool) -> Evaluation:
        """NaN for the crowded ones, the others as ever."""
        number = structures.n_structures
        answer = Evaluation(
            energies=structures.positions.new_full((number,), torch.nan),
            forces=torch.full_like(structures.positions, torch.nan),
            stresses=structures.positions.new_full((number, 3, 3), torch.nan) if stresses else None,
        )
        if bool(crowded.all()):
            return answer
        others = self.evaluate(structures.select(~crowded), stresses)
        answer.energies[~crowded] = others.energies
        answer.forces[~crowded[structures.structure_index]] = others.forces
        if answer.stresses is not None and others.stresses is not None:
            answer.stresses[~crowded] = others.stresses
        return answer


def are_crowded(structures: Structures, pairs: Pairs) -> Tensor:
    """Structures with more angles than any real one, (n_structures,) bool."""
    short = torch.linalg.vector_norm(pairs.vectors, dim=1) < ANGLE_CUTOFF
    bonds = torch.bincount(pairs.ends[:, short].flatten(), minlength=structures.n_atoms)  # (n_atoms,)
    angles = per_structure_sum(bonds.square(), structures.structure_index, structures.n_structures)
    return angles > MOST_SHORT_BONDS**2 * torch.as_tensor(structures.counts)


@cache
def load_network(dtype: torch.dtype, device: torch.device) -> ChgnetNetwork:
    """Once per process and device. Of the package only the file of weights is read, as plain tensors."""
    folder = package_folder("chgnet") / "pretrained" / VERSION
    files = sorted(folder.glob("*.pth.tar"))
    if len(files) != 1:
        raise PotentialError(f"{folder} has {len(files)} files of weights, expected one; try: {REPAIR}")
    try:
        weights = torch.load(files[0], map_location=device, weights_only=True)["model"]["state_dict"]
        return ChgnetNetwork(weights, dtype)
    except (KeyError, RuntimeError, ValueError) as error:
        raise PotentialError(
            f"{files[0]} does not hold the weights of CHGNet {VERSION} ({error}); try: {REPAIR}"
        ) from error
