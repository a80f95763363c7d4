"""Numbers per structure that a gate or a critic's tail may see, and the backbone never does (R6.2); the gate itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from relaxion.errors import SettingsError
from relaxion.model.layers import Generator, StackedMLP, covalent_radii, structure_mean
from relaxion.settings import nearest
from relaxion.structures import State
from relaxion.structures.structures import per_structure_max, per_structure_sum

FORCE_FLOOR = 1e-4  # eV/Å
LENGTH_FLOOR = 1e-5  # Å
STRESS_FLOOR = 1e-6  # eV/Å³


def _density(state: State) -> Tensor:
    """Volume of the atoms' covalent spheres per volume of the cell; 0 without a cell."""
    structures = state.structures
    spheres = 4 / 3 * math.pi * covalent_radii(structures.atomic_numbers, structures.dtype) ** 3
    filled = per_structure_sum(spheres, structures.structure_index, structures.n_structures)
    volumes = structures.volumes
    solid = (volumes > 1e-6) & structures.periodic.all(dim=1)
    return torch.where(solid, filled / volumes.clamp_min(1e-6), 0.0)


def _force_lengths(state: State, forces: Tensor) -> Tensor:
    """Of the movable atoms; others count as free of force, (n_atoms,) eV/Å."""
    return forces.norm(dim=1) * state.structures.movable


def _log_largest(state: State, forces: Tensor) -> Tensor:
    structures = state.structures
    largest = per_structure_max(_force_lengths(state, forces), structures.structure_index, structures.n_structures)
    return torch.log10(largest + FORCE_FLOOR)


def _mean_log_force(state: State) -> Tensor:
    structures = state.structures
    logs = torch.log10(_force_lengths(state, state.evaluation.forces) + FORCE_FLOOR) * structures.movable
    total = per_structure_sum(logs, structures.structure_index, structures.n_structures)
    movable = per_structure_sum(structures.movable.to(logs.dtype), structures.structure_index, structures.n_structures)
    return total / movable.clamp_min(1)


def _log_force_ratio(state: State) -> Tensor:
    """Largest force now against the one before the last move; below 0: the move helped."""
    return _log_largest(state, state.evaluation.forces) - _log_largest(state, state.last_forces)


def _log_last_move(state: State) -> Tensor:
    """Farthest an atom went in the last move, after all corrections; 0 at 0.1 Å."""
    return torch.log10(state.last_move.largest_displacements(state.structures) + LENGTH_FLOOR) + 1


def _alignment(state: State) -> Tensor:
    """Cosine between last move and present forces: below 0 the last move went too far, 0 at the start."""
    structures = state.structures
    forces = state.evaluation.forces * structures.movable[:, None]
    moved = state.last_move.displacements
    work = structure_mean((forces * moved).sum(dim=1), structures)
    sizes = [structure_mean(vectors.square().sum(dim=1), structures) for vectors in (forces, moved)]
    return work / torch.sqrt(sizes[0] * sizes[1] + (FORCE_FLOOR * LENGTH_FLOOR) ** 2)


def _log_curvature(state: State) -> Tensor:
    """Stiffness met along the last move, -Δx·ΔF/|Δx|², logarithm with sign; 0 at the start."""
    structures = state.structures
    moved = state.last_move.displacements
    changes = (state.evaluation.forces - state.last_forces) * structures.movable[:, None]
    resisted = -structure_mean((moved * changes).sum(dim=1), structures)
    stiffness = resisted / (structure_mean(moved.square().sum(dim=1), structures) + LENGTH_FLOOR**2)  # eV/Å²
    return torch.sign(stiffness) * torch.log1p(stiffness.abs()) / 2


def _log_stress(state: State) -> Tensor:
    """Norm of the stress of a free cell, 0 at 0.01 eV/Å³; as small as it gets for a fixed one."""
    stresses = state.evaluation.stresses
    size = torch.zeros_like(state.trust_radii) if stresses is None else stresses.flatten(1).norm(dim=1)
    return torch.log10(size * state.structures.cell_free + STRESS_FLOOR) + 2


def _log_trust_radius(state: State) -> Tensor:
    """0 at 0.1 Å."""
    return torch.log10(state.trust_radii.clamp_min(LENGTH_FLOOR)) + 1


INFORMATION: dict[str, Callable[[State], Tensor]] = {
    "density": _density,
    "log_largest_force": lambda state: _log_largest(state, state.evaluation.forces),
    "mean_log_force": _mean_log_force,
    "log_force_ratio": _log_force_ratio,
    "log_last_move": _log_last_move,
    "alignment": _alignment,
    "log_curvature": _log_curvature,
    "log_stress": _log_stress,
    "log_calls": lambda state: torch.log10(state.calls.to(state.trust_radii.dtype).clamp_min(1)),
    "log_trust_radius": _log_trust_radius,
}


def check_names(names: Sequence[str]) -> None:
    """Refuse what cannot be computed."""
    for name in names:
        if name not in INFORMATION:
            raise SettingsError(f"unknown environment information '{name}': {nearest(name, INFORMATION)}")
    if len(set(names)) < len(names):
        raise SettingsError(f"environment information is named twice: {', '.join(names)}")


def environment_information(state: State, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """One column per name, each the same in every frame and for every repeat of the cell."""
    columns = [INFORMATION[name](state).to(dtype) for name in names]
    return torch.stack(columns, dim=1)  # (n_structures, n_names)


class Gate(nn.Module):
    """Environment information -> how boldly a whole structure moves, `n_answers` numbers each, not yet bounded (R6.4).

    They begin near `first`: the plain network's moves.
    """

    def __init__(
        self, names: Sequence[str], n_hidden: int, generator: Generator = None, first: Sequence[float] = (0.0,)
    ) -> None:
        super().__init__()
        if not names:
            raise SettingsError(
                "a gate was asked for with no environment information; name some, e.g. "
                "environment_information = ['log_largest_force'], or leave the gate out"
            )
        check_names(names)
        self.names = tuple(names)
        self.network = StackedMLP(len(names), n_hidden, len(first), 1, generator)
        assert self.network.answer.bias is not None
        with torch.no_grad():
            self.network.answer.weight.mul_(0.1)
            self.network.answer.bias.copy_(torch.tensor(first))

    def forward(self, state: State) -> Tensor:
        """(n_structures, n_answers)."""
        information = environment_information(state, self.names, self.network.answer.weight.dtype)
        return self.network(information[None])[0]
