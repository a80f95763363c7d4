"""The analytic alloy EAM of Zhou, Johnson and Wadley, Phys. Rev. B 69, 144113 (2004): 16 metals.

Numbers: Zhou's own parameter file (`EAM_code`, distributed with LAMMPS), compared number by number with two
tables typed by others (OpenMD's, identical; one of the printed paper). Where the latter, called paper here, differs:

- Ni, densities above 1.15 ρ_e: paper ρ_s 27.93041, η 0.469, F_e -2.699486; file 27.562031, 0.44547, -2.7.
  Both join on smoothly (within 5e-7 eV), so continuity does not decide. Taken: the file, as LAMMPS users do.
- W: paper η -0.582714, file +0.582714. Taken: plus, which joins on (4e-8 eV; minus leaves a step of 2 meV).
- Pt: paper ρ_n = 0.85 ρ_e, file 0.25 ρ_e. Taken: 0.25, which joins on (6e-8 eV; 0.85 leaves 2.6 eV).

Cutoff: √5·max(r_e) of the two atoms, the fifth shell of fcc, as in Zhou's tabulation, but pair by pair, so
that a structure does not depend on what else is in the batch. The functions are not quite zero there, so a
C² switch takes them to zero over the last tenth, beyond four shells of fcc. Against functions followed to 3 r_e
this moves lattice constants by less than 1e-4 of their length and energies by 0.2 meV per atom at most (hcp;
0.04 meV in fcc). An isolated atom has 0 eV to the 1e-6 of the printed digits.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from relaxion.potentials.pairwise import ElementPotential, PairTerms, pick, smooth_step
from relaxion.structures import Structures

CUTOFF_FACTOR = math.sqrt(5)  # times the larger r_e
SWITCH_SHARE = 0.1  # of the cutoff, at its end
UPPER_JOINT = 1.15  # ρ_0/ρ_e; below it the polynomial, above it the logarithmic branch


def _table() -> tuple[tuple[str, ...], dict[str, tuple[float, ...]]]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    (_, *columns), *rows = (line.split() for line in lines if not line.startswith("#"))
    return tuple(columns), {element: tuple(map(float, numbers)) for element, *numbers in rows}


COLUMNS, PARAMETERS = _table()


class ZhouEam(ElementPotential):
    """E = Σ_i F(Σ_j f_j(r)) + Σ_pairs φ(r); φ of unlike atoms is mixed from the pure metals by density."""

    name = "EAM (Zhou 2004)"

    def __init__(self) -> None:
        super().__init__(list(PARAMETERS))
        columns = torch.tensor(list(PARAMETERS.values()), dtype=torch.float64).T.contiguous()
        self._columns = dict(zip(COLUMNS, columns, strict=True))  # each (n_kinds,)

    def cutoff_for(self, structures: Structures) -> float:
        present = self.kinds_of(structures.atomic_numbers).unique()
        return CUTOFF_FACTOR * float(self._columns["r_e"][present].max())

    def pair_terms(self, distances: Tensor, kinds: Tensor) -> PairTerms:
        r_e = pick(self._columns["r_e"], kinds)  # (2, n_pairs) Å, row per end
        density, density_decay = self._cut_exponential(distances, kinds, r_e, "beta", "lambda")
        repulsion, repulsion_decay = self._cut_exponential(distances, kinds, r_e, "alpha", "kappa")
        repulsion = repulsion * pick(self._columns["A"], kinds)
        attraction = density * pick(self._columns["B"], kinds)
        density = density * pick(self._columns["f_e"], kinds)
        pure = repulsion - attraction  # φ of each end with its own kind, eV
        pure_slopes = attraction * density_decay - repulsion * repulsion_decay
        # φ_ab = ½ (f_b/f_a φ_aa + f_a/f_b φ_bb)
        ratios = density.flip(0) / density
        ratio_slopes = ratios * (density_decay - density_decay.flip(0))
        energies = (ratios * pure).sum(dim=0) / 2
        energy_slopes = (ratios * pure_slopes + ratio_slopes * pure).sum(dim=0) / 2
        cutoffs = CUTOFF_FACTOR * r_e.amax(dim=0)
        switch, switch_slopes = smooth_step(distances, (1 - SWITCH_SHARE) * cutoffs, cutoffs)
        felt, felt_decay = density.flip(0), density_decay.flip(0)  # an end feels the other
        return PairTerms(
            energies=energies * switch,
            energy_slopes=energy_slopes * switch + energies * switch_slopes,
            densities=felt * switch,
            density_slopes=felt * (switch_slopes - felt_decay * switch),
        )

    def _cut_exponential(
        self, distances: Tensor, kinds: Tensor, r_e: Tensor, decay_name: str, onset_name: str
    ) -> tuple[Tensor, Tensor]:
        """g = e^(-a(x-1)) / (1 + (x-b)²⁰) with x = r/r_e, and -g'/g in 1/Å; both (2, n_pairs)."""
        scaled = distances / r_e
        decay = pick(self._columns[decay_name], kinds)
        beyond = scaled - pick(self._columns[onset_name], kinds)
        square = beyond * beyond
        fourth = square * square
        sixteenth = fourth * fourth * fourth * fourth
        damping = 1 + sixteenth * fourth
        values = torch.exp(decay * (1 - scaled)) / damping
        return values, (decay + 20 * sixteenth * square * beyond / damping) / r_e

    def embedding(self, densities: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        at = {name: column[kinds] for name, column in self._columns.items()}
        joint = at["rho_n/rho_e"] * at["rho_e"]
        zero = torch.zeros_like(joint)
        thin = _cubic(densities, joint, at["Fn0"], at["Fn1"], at["Fn2"], at["Fn3"])
        usual = _cubic(densities, at["rho_e"], at["F0"], zero, at["F2"], at["F3"])
        dense = _logarithmic(densities, at["rho_s"], at["eta"], at["Fe"])
        is_thin, is_dense = densities < joint, densities >= UPPER_JOINT * at["rho_e"]
        energies, slopes = (
            torch.where(is_thin, low, torch.where(is_dense, high, middle))
            for low, middle, high in zip(thin, usual, dense, strict=True)
        )
        return energies, slopes


def _cubic(density: Tensor, center: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_k c_k (ρ/center - 1)^k and its derivative."""
    x = density / center - 1
    return c0 + x * (c1 + x * (c2 + x * c3)), (c1 + x * (2 * c2 + x * 3 * c3)) / center


def _logarithmic(density: Tensor, rho_s: Tensor, eta: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """F_e (1 - η ln y) y^η with y = ρ/ρ_s, and its derivative; used at high density only."""
    safe = density.clamp_min(1e-300)  # the branch is also computed where it is not used
    logarithm = torch.log(safe / rho_s)
    power = energy * torch.exp(eta * logarithm)
    return power * (1 - eta * logarithm), -power * eta * eta * logarithm / safe
