"""Moves whose noise shrinks with the forces: near the minimum a step of 0.05 Å is no small error any more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relaxion.errors import SettingsError
from relaxion.networks.move_actions import MoveActions, shortened, uniform_in_ball
from relaxion.networks.move_heads import strain_scales
from relaxion.networks.strains import strain_matrices
from relaxion.networks.surroundings import structure_mean
from relaxion.structures import Move, State

FORCE_FLOOR = 1e-4  # eV/Å, far below any tolerance


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

        def noise(number: int, n_components: int, dtype: torch.dtype) -> Tensor:
            drawn = scale * torch.randn((number, n_components), generator=generator, dtype=dtype)
            return drawn if clip is None else shortened(drawn, clip)

        return self._added(actions, observations, noise)

    def random(self, observations: State, generator: torch.Generator) -> Move:
        """Uniform in the ball of radius F/k around each movable atom, and among the strains of each free cell."""

        def noise(number: int, n_components: int, dtype: torch.dtype) -> Tensor:
            return uniform_in_ball(number, n_components, generator, dtype)

        structures = observations.structures
        return self.bound(self._added(Move.zero(structures), observations, noise).allowed(structures))

    def _added(self, actions: Move, state: State, noise: Callable[[int, int, torch.dtype], Tensor]) -> Move:
        dtype, structures = actions.displacements.dtype, state.structures
        forces = self._forces(state).to(dtype)  # (n_structures,) eV/Å
        lengths = (forces / self.stiffness).clamp_max(self.max_displacement_angstrom)
        atoms = noise(structures.n_atoms, 3, dtype) * lengths[structures.structure_index, None]
        cells = noise(structures.n_structures, 6, dtype)  # drawn for fixed cells too: draws depend on sizes alone
        if not bool(structures.cell_free.any()):
            return Move(actions.displacements + atoms, actions.strains)
        of_atoms = forces[structures.structure_index]
        sizes = strain_scales(state, of_atoms, self.stiffness).clamp_max(self.max_strain)
        return Move(actions.displacements + atoms, actions.strains + strain_matrices(cells * sizes[:, None]))

    @staticmethod
    def _forces(state: State) -> Tensor:
        squares = state.evaluation.forces.square().sum(dim=1) * state.structures.movable
        return torch.sqrt(structure_mean(squares, state.structures) + FORCE_FLOOR**2)
