"""What policies on atoms share: bounded moves and environment information."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from relaxion.errors import MissingStressError, SettingsError
from relaxion.model.backbone import FORCE_FLOOR, UNIT_STIFFNESS
from relaxion.model.layers import Generator, StackedMLP, covalent_radii, structure_mean
from relaxion.model.stiffness import strain_matrices, strain_vectors
from relaxion.settings import nearest
from relaxion.structures import Move, State, Structures
from relaxion.structures.structures import per_structure_max, per_structure_sum

BOND_LENGTH = 2.5  # Å, of a usual metal: turns forces and stresses into strains


class MoveActions:
    """The action domain of atoms. The half range of a displacement is its greatest length, of a strain its norm."""

    def __init__(self, max_displacement_angstrom: float = 0.5, max_strain: float = 0.1) -> None:
        if not (0 < max_displacement_angstrom < float("inf") and 0 < max_strain < float("inf")):
            raise SettingsError(
                f"bounds of moves must be above 0 and finite, got max_displacement_angstrom = "
                f"{max_displacement_angstrom} and max_strain = {max_strain}"
            )
        self.max_displacement_angstrom = max_displacement_angstrom
        self.max_strain = max_strain

    def bound(self, actions: Move) -> Move:
        """Displacements and strains that are too long, shortened; directions stay."""
        strains = shortened(strain_vectors(actions.strains), self.max_strain)
        return Move(shortened(actions.displacements, self.max_displacement_angstrom), strain_matrices(strains))

    def perturb(
        self,
        actions: Move,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: State | None = None,  # noqa: ARG002  one unit for all
    ) -> Move:
        """Actions + half range · noise, N(0, scale) along every axis, its length cut at `clip`; not yet bounded.

        Fixed atoms and cells get noise too, for a move does not know them: environment and critics ignore it there.
        """
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise SettingsError(f"noise of moves has one scale for all, got {tuple(scale.shape)}")
        atoms = self._noise(actions.displacements, 3, scale, generator, clip)
        cells = self._noise(actions.strains, 6, scale, generator, clip)
        return Move(
            actions.displacements + self.max_displacement_angstrom * atoms,
            actions.strains + self.max_strain * strain_matrices(cells),
        )

    @staticmethod
    def _noise(
        like: Tensor, n_components: int, scale: float | Tensor, generator: torch.Generator, clip: float | None
    ) -> Tensor:
        noise = scale * torch.randn((len(like), n_components), generator=generator, dtype=like.dtype)
        return noise if clip is None else shortened(noise, clip)

    def random(self, observations: State, generator: torch.Generator) -> Move:
        """Uniform in the ball of each movable atom, and among the strains of each free cell."""
        structures = observations.structures
        atoms, cells = self._in_balls(structures, generator)
        move = Move(self.max_displacement_angstrom * atoms, strain_matrices(self.max_strain * cells))
        return self.bound(move.allowed(structures))

    @staticmethod
    def _in_balls(structures: Structures, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        atoms = uniform_in_ball(structures.n_atoms, 3, generator, structures.dtype)
        return atoms, uniform_in_ball(structures.n_structures, 6, generator, structures.dtype)

    def dimensions(self, observations: State) -> Tensor:
        """3 for every movable atom, 6 more where the cell is free, for each structure."""
        structures = observations.structures
        movable = per_structure_sum(structures.movable.float(), structures.structure_index, structures.n_structures)
        return 3 * movable + 6 * structures.cell_free.float()  # (n_structures,)


def shortened(vectors: Tensor, longest: float) -> Tensor:
    """Vectors longer than `longest` made just so long, (n, components)."""
    lengths = vectors.norm(dim=1, keepdim=True)
    return torch.where(lengths > longest, vectors * (longest / lengths.clamp_min(1e-30)), vectors)


def uniform_in_ball(number: int, n_components: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Points of the unit ball, equally likely everywhere, (number, n_components)."""
    directions = torch.randn((number, n_components), generator=generator, dtype=dtype)
    radii = torch.rand((number, 1), generator=generator, dtype=dtype) ** (1 / n_components)
    return directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-30) * radii


def stresses_of(state: State, dtype: torch.dtype) -> Tensor:
    """The stresses, which a free cell needs, (n_structures, 3, 3) eV/Å³."""
    stresses = state.evaluation.stresses
    if stresses is None:
        raise MissingStressError(
            "a cell is free, but the state carries no stress; use a potential that gives one, or fix the cell"
        )
    return stresses.to(dtype)


def strain_scales(state: State, force_scales: Tensor, stiffness: float) -> Tensor:
    """Strain that stress and forces ask for against bonds of the given stiffness (eV/Å²), (n_structures,)."""
    sizes = stresses_of(state, force_scales.dtype).flatten(1).norm(dim=1)
    forces = structure_mean(force_scales, state.structures)
    return (sizes * BOND_LENGTH + forces / BOND_LENGTH) / stiffness


class ForceMoveActions(MoveActions):
    """Bounds as before; noise and random moves in units of F/k, F the root mean square force of the structure."""

    def perturb(
        self,
        actions: Move,
        scale: float | Tensor,
        generator: torch.Generator,
        clip: float | None = None,
        observations: State | None = None,
    ) -> Move:
        """Actions + F/k · noise, N(0, scale) along every axis, its length cut at `clip`; not yet bounded."""
        if observations is None:
            raise SettingsError("noise in units of the forces needs the states that the moves belong to")

        atoms = self._noise(actions.displacements, 3, scale, generator, clip)
        cells = self._noise(actions.strains, 6, scale, generator, clip)
        return self._added(actions, observations, atoms, cells)

    def random(self, observations: State, generator: torch.Generator) -> Move:
        """Uniform in the ball of radius F/k around each movable atom, and among the strains of each free cell."""
        structures = observations.structures
        move = self._added(Move.zero(structures), observations, *self._in_balls(structures, generator))
        return self.bound(move.allowed(structures))

    def _added(self, actions: Move, state: State, atoms: Tensor, cells: Tensor) -> Move:
        """With noise in its units. It is drawn for fixed cells too: draws depend on sizes alone."""
        structures = state.structures
        squares = state.evaluation.forces.square().sum(dim=1) * structures.movable
        forces = torch.sqrt(structure_mean(squares, structures) + FORCE_FLOOR**2)  # (n_structures,) eV/Å
        forces = forces.to(actions.displacements.dtype)
        lengths = (forces / UNIT_STIFFNESS).clamp_max(self.max_displacement_angstrom)
        atoms = atoms * lengths[structures.structure_index, None]
        if not bool(structures.cell_free.any()):
            return Move(actions.displacements + atoms, actions.strains)
        of_atoms = forces[structures.structure_index]
        sizes = strain_scales(state, of_atoms, UNIT_STIFFNESS).clamp_max(self.max_strain)
        return Move(actions.displacements + atoms, actions.strains + strain_matrices(cells * sizes[:, None]))


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
