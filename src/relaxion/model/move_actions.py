"""Moves as actions: bounds act on lengths, noise is the same in every direction."""

from __future__ import annotations

import torch
from torch import Tensor

from relaxion.errors import MissingStressError, SettingsError
from relaxion.model.layers import structure_mean
from relaxion.model.stiffness import strain_matrices, strain_vectors
from relaxion.structures import Move, State, Structures
from relaxion.structures.structures import per_structure_sum

FORCE_FLOOR = 1e-4  # eV/Å, far below any tolerance
BOND_LENGTH = 2.5  # Å, of a usual metal: turns forces and stresses into strains


class MoveActions:
    """The action domain of atoms. The half range of a displacement is its greatest length, of a strain its norm."""

    def __init__(self, max_displacement_angstrom: float = 0.5, max_strain: float = 0.1) -> None:
        if not (0 < max_displacement_angstrom < float("inf") and 0 < max_strain < float("inf")):
            raise SettingsError(
                f"bounds of moves must be above 0 and finite, got max_displacement_angstrom = "
                f"{max_displacement_angstrom} and max_strain = {max_strain}"
            )
        self.max_displacement_angstrom, self.max_strain = max_displacement_angstrom, max_strain

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

    def __init__(
        self, max_displacement_angstrom: float, max_strain: float, stiffness_ev_per_angstrom2: float = 5.0
    ) -> None:
        super().__init__(max_displacement_angstrom, max_strain)
        self.stiffness = stiffness_ev_per_angstrom2

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
        lengths = (forces / self.stiffness).clamp_max(self.max_displacement_angstrom)
        atoms = atoms * lengths[structures.structure_index, None]
        if not bool(structures.cell_free.any()):
            return Move(actions.displacements + atoms, actions.strains)
        of_atoms = forces[structures.structure_index]
        sizes = strain_scales(state, of_atoms, self.stiffness).clamp_max(self.max_strain)
        return Move(actions.displacements + atoms, actions.strains + strain_matrices(cells * sizes[:, None]))
