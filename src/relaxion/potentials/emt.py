"""Effective medium theory with ASE's parameters and ASE's cutoff; it agrees with `ase.calculators.emt.EMT`.

K. W. Jacobsen, P. Stoltze, J. K. Nørskov, Surf. Sci. 366, 394 (1996). As in ASE, the bulk metal is near 0 eV
and an isolated atom has -E0. H, C, N and O have ASE's "just for fun" parameters: for tests, not for science.
"""

from __future__ import annotations

import math

import torch
from ase.calculators.emt import beta, parameters
from ase.units import Bohr
from torch import Tensor

from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick

SHELL_COUNTS = (12, 6, 24)  # atoms in the first three shells of an fcc crystal, at distances ∝ √1, √2, √3
TAIL_AT_FOURTH_SHELL = 1e-4  # what is left there of the smoothing function (ASE's choice)
SEARCH_MARGIN = 0.5  # Å beyond the middle of the smoothing function, where ASE drops the rest


class Emt(ElementPotential):
    """E_i = E0 (1 + λs) e^(-λs) + 6 V0 e^(-κs) - V0/(2 γ2) Σ_j χ e^(-κ_j (r/β - s_j)) w(r) - E0.

    s = -ln(σ/(12 γ1))/(βη) is the radius belonging to the density σ = Σ_j χ e^(-η_j (r - β s_j)) w(r).
    """

    name = "EMT"

    def __init__(self) -> None:
        super().__init__(list(parameters))
        self._set_cutoff(max(row[1] for row in parameters.values()) * Bohr)
        self._set_parameters(torch.tensor(list(parameters.values()), dtype=torch.float64))

    def _set_cutoff(self, largest_radius: float) -> None:
        # from the largest atom of the table, not of the structure, as ASE does by default
        nearest = beta * largest_radius
        self._middle = nearest * (math.sqrt(3) + 2) / 2  # Å, between the third and fourth shell
        self._steepness = math.log(1 / TAIL_AT_FOURTH_SHELL - 1) / (2 * nearest - self._middle)  # 1/Å
        self.cutoff = self._middle + SEARCH_MARGIN

    def _set_parameters(self, table: Tensor) -> None:
        e0, s0, v0, eta, kappa, lam, n0 = table.T  # each (n_kinds,), eV and Bohr
        self._e0, self._v0 = e0, v0  # eV
        self._eta, self._kappa, self._lam = eta / Bohr, kappa / Bohr, lam / Bohr  # 1/Å
        s0 = s0 * Bohr  # Å
        gamma1 = self._gamma(s0, self._eta)
        gamma2 = self._gamma(s0, self._kappa / beta)
        self._reference_density = 12 * gamma1
        chi = n0[None, :] / n0[:, None]  # (site, source)
        # prefactors of e^(-η r) and e^(-κ r/β), flat over (site, source)
        self._density_factors = (chi * torch.exp(self._eta * beta * s0)).flatten()
        self._bond_factors = (chi * torch.exp(self._kappa * s0) * (-v0 / (2 * gamma2))[:, None]).flatten()

    def _gamma(self, s0: Tensor, decay: Tensor) -> Tensor:
        """Sum over three fcc shells that makes the pure metal have its own lattice constant."""
        counts = torch.tensor(SHELL_COUNTS, dtype=torch.float64)
        shells = torch.sqrt(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        distances = beta * s0[:, None] * shells
        weights = torch.sigmoid(self._steepness * (self._middle - distances)) * counts / 12
        return (weights * torch.exp(-decay[:, None] * (distances - beta * s0[:, None]))).sum(dim=1)

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        sources = kinds.flip(0)
        flat = kinds * len(self._e0) + sources
        smoothing = torch.sigmoid(self._steepness * (self._middle - distances))
        smoothing_decay = self._steepness * (1 - smoothing)  # -w'/w, 1/Å
        eta = pick(self._eta, sources)
        kappa = pick(self._kappa / beta, sources)
        densities = pick(self._density_factors, flat) * torch.exp(-eta * distances) * smoothing
        bonds = pick(self._bond_factors, flat) * torch.exp(-kappa * distances) * smoothing  # (2, n_pairs) eV
        return PairTerms(
            energies=bonds.sum(dim=0),
            energy_slopes=-(bonds * (smoothing_decay + kappa)).sum(dim=0),
            densities=densities,
            density_slopes=-densities * (smoothing_decay + eta),
        )

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        e0 = self._e0[kinds]
        v0 = self._v0[kinds]
        lam = self._lam[kinds]
        kappa = self._kappa[kinds]
        stiffness = beta * self._eta[kinds]
        bound = densities > 0  # an isolated atom has the limit of an ever thinner density
        density = torch.where(bound, densities, torch.ones_like(densities))
        radius = -torch.log(density / self._reference_density[kinds]) / stiffness  # s, Å from the neutral radius
        cohesion = e0 * torch.exp(-lam * radius)
        repulsion = 6 * v0 * torch.exp(-kappa * radius)
        energies = cohesion * (1 + lam * radius) + repulsion
        slopes = (cohesion * lam * lam * radius + kappa * repulsion) / (stiffness * density)
        return torch.where(bound, energies, 0.0) - e0, torch.where(bound, slopes, 0.0)
