"""A model of TorchSim as a batched potential."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relaxion.errors import PotentialError
from relaxion.potentials.base import Potential
from relaxion.structures import Evaluation, Structures

TRAITS = ("compute_forces", "compute_stress", "memory_scales_with", "device", "dtype", "forward")


def is_torchsim_model(thing: object) -> bool:
    """Whether it has what every model of TorchSim has; TorchSim itself need not be loaded to know."""
    return isinstance(thing, torch.nn.Module) and all(hasattr(thing, trait) for trait in TRAITS)


class TorchSimPotential(Potential):
    """Asks the model about all structures of the same periodicity at once, where it is and in its own precision."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.name = model, type(model).__name__
        self.has_stress = bool(model.compute_stress)
        if not model.compute_forces:
            raise PotentialError(f"the model {self.name} gives energies without forces; try compute_forces=True")

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        answer = Evaluation(
            energies=structures.positions.new_empty(structures.n_structures),
            forces=torch.empty_like(structures.positions),
            stresses=torch.zeros_like(structures.cells) if stresses else None,
        )
        kinds, kind = structures.periodic.unique(dim=0, return_inverse=True)  # TorchSim has one for a whole batch
        for number in range(len(kinds)):
            self._evaluate(structures, kind == number, answer)
        return answer

    def _evaluate(self, structures: Structures, which: Tensor, answer: Evaluation) -> None:
        part = structures.select(which)
        found = self.model(state_of(part, self.model.device, self.model.dtype))
        answer.energies[which] = found["energy"].detach().to(answer.energies)
        answer.forces[which[structures.structure_index]] = found["forces"].detach().to(answer.forces)
        if answer.stresses is not None and bool(part.periodic.all()):
            answer.stresses[which] = found["stress"].detach().to(answer.stresses)


def state_of(structures: Structures, device: torch.device, dtype: torch.dtype) -> Any:
    """As TorchSim has them: cells with their vectors in columns, one periodicity for all."""
    import torch_sim  # pyright: ignore[reportMissingImports]

    periodic = structures.periodic[0].tolist()
    return torch_sim.SimState(
        positions=structures.positions.to(device, dtype),
        masses=torch.ones(structures.n_atoms, device=device, dtype=dtype),
        cell=structures.cells.mT.contiguous().to(device, dtype),
        pbc=periodic[0] if len(set(periodic)) == 1 else periodic,  # pyright: ignore[reportArgumentType]
        atomic_numbers=structures.atomic_numbers.to(device),
        system_idx=structures.structure_index.to(device),
    )
