"""From features to a displacement per atom and a strain per structure, neither of them bounded yet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relaxion.errors import MissingStressError
from relaxion.networks.layers import StackedLinear, StackedMLP, mixed
from relaxion.networks.strains import strain_vectors, symmetric_outer
from relaxion.networks.surroundings import structure_mean
from relaxion.structures import State

BOND_LENGTH = 2.5  # Å, of a usual metal: turns forces and stresses into strains
STRESS_FLOOR = 1e-4  # eV/Å³, below any tolerance: directions of smaller stresses fade away
N_PRODUCTS = 4  # outer products per atom that make up its part of the strain


class DisplacementHead(nn.Module):
    """u_i = Σ_c w_c(scalars_i) · v_ic."""

    def __init__(self, channels: int, n_vectors: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.weights = StackedMLP(channels, channels, n_vectors, 1, generator)

    def forward(self, scalars: Tensor, vectors: Tensor) -> Tensor:
        """scalars (n_atoms, channels), vectors (n_atoms, n_vectors, 3) -> (n_atoms, 3)."""
        weights = self.weights(scalars[None])[0]
        return (weights[:, :, None] * vectors).sum(dim=1) / vectors.shape[1] ** 0.5


class StrainHead(nn.Module):
    """Mean over the atoms of outer products of their vectors and of a pressure, and the stress by a learned factor.

    Trace (l = 0) and deviator (l = 2) both come from the products; the backbone need not know l = 2.
    """

    def __init__(self, channels: int, n_vectors: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.factors = StackedLinear(n_vectors, 2 * N_PRODUCTS, 1, generator, bias=False)
        self.weights = StackedMLP(channels, channels, N_PRODUCTS + 3, 1, generator)

    def forward(self, state: State, scalars: Tensor, vectors: Tensor) -> Tensor:
        """(n_structures, 6); meaningless for fixed cells."""
        weights, pressures, by_stress = self.weights(scalars[None])[0].split((N_PRODUCTS, 1, 2), dim=1)
        one, other = mixed(self.factors, vectors.transpose(1, 2)[None])[0].transpose(1, 2).chunk(2, dim=1)
        other = other / torch.sqrt(1 + other.square().sum(dim=2, keepdim=True))  # grows with the length, not its square
        products = (weights[:, :, None, None] * symmetric_outer(one, other)).mean(dim=1)  # (n_atoms, 3, 3)
        identity = torch.eye(3, dtype=scalars.dtype)
        pooled = structure_mean(products + pressures[:, :, None] * identity, state.structures)
        factors = structure_mean(by_stress, state.structures)[:, :, None, None]  # (n_structures, 2, 1, 1)
        stress = stress_directions(state, scalars.dtype)
        traces = stress.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        return strain_vectors(pooled + factors[:, 0] * stress + factors[:, 1] * traces * identity)


def stresses_of(state: State, dtype: torch.dtype) -> Tensor:
    """The stresses, which a free cell needs, (n_structures, 3, 3) eV/Å³."""
    stresses = state.evaluation.stresses
    if stresses is None:
        raise MissingStressError(
            "a cell is free, but the state carries no stress; use a potential that gives one, or fix the cell"
        )
    return stresses.to(dtype)


def stress_directions(state: State, dtype: torch.dtype) -> Tensor:
    """Stresses of length one, fading to zero with the last of them, (n_structures, 3, 3)."""
    stresses = stresses_of(state, dtype)
    sizes = torch.sqrt(stresses.flatten(1).square().sum(dim=1) + STRESS_FLOOR**2)
    return stresses / sizes[:, None, None]


def strain_scales(state: State, force_scales: Tensor, stiffness: float) -> Tensor:
    """Strain that stress and forces ask for against bonds of the given stiffness (eV/Å²), (n_structures,)."""
    sizes = stresses_of(state, force_scales.dtype).flatten(1).norm(dim=1)
    forces = structure_mean(force_scales, state.structures)
    return (sizes * BOND_LENGTH + forces / BOND_LENGTH) / stiffness
